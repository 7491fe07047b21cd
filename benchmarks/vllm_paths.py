"""Compares upstream's JAX proposer and target with our proposer and a PyTorch target, in vLLM on a CPU.

    .venv-vllm/env/bin/python benchmarks/vllm_paths.py --json docs/results/vllm_paths.json

Runs in the environment of `make test-vllm`, with its LD_LIBRARY_PATH and ``PYTHONPATH=tests/in_vllm/site``.
Both paths get one pair and the same prompts. The two targets compute in bfloat16 by different programs, so
their texts differ at near-ties: each path is compared with a replay of its own text.

    python benchmarks/vllm_paths.py --turned --json docs/results/vllm_paths_turned.json

needs no vLLM, and shows why the JAX path accepts less than its replay: its drafter reads ``rope_theta`` of a
config whose ``rope_parameters`` have it, so it takes its default, 1,000,000, where this pair has 10,000.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path

IN_VLLM = Path(__file__).parents[1] / "tests" / "in_vllm"
PATHS = {"ours, PyTorch target": "vllm", "upstream's, JAX target": "flax_nnx"}
# Upstream divides hidden_size by heads for the width of a drafter's head: here that is right.
SIZES = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
JAX_TURN = {"rope_type": "default", "rope_theta": 1e6}


def one(folder, tokens):
    """Counts of the path that the environment names."""
    sys.path.insert(0, str(IN_VLLM))
    import engine
    import pair
    from replay import Replay

    batches = [[(prompt, {"max_tokens": tokens}) for prompt in pair.prompts(12, seed)] for seed in (0, 1, 2)]
    drafter = str(folder / "drafter")
    given = {"method": "dflash", "model": drafter, "num_speculative_tokens": pair.BLOCK - 1}
    answer = engine.run(batches, model=str(folder / "target"), speculative_config=given)
    replay = Replay(folder / "target", folder / "drafter")
    drafts, accepted, replayed, alike, *_ = map(
        sum, zip(*(replay.compare(request, pair.BLOCK - 1) for request in answer.requests), strict=True)
    )
    each = [0] * (pair.BLOCK - 1)
    for request in answer.requests:
        for _, drafted, gained in request["steps"]:
            for at in range(len(gained) - 1 if drafted else 0):
                each[at] += 1
    counts = {"drafts": drafts, "accepted": accepted, "per_position": each}
    return counts | {"accepted_in_replay": replayed, "drafts_accepted_alike": alike}


def turned(folder, tokens):
    """Counts of a drafter that turns positions by 1,000,000, over transformers' greedy texts in float32."""
    sys.path.insert(0, str(IN_VLLM))
    import pair
    import torch
    from replay import Replay

    right = Replay(folder / "target", folder / "drafter")
    pair.rewrite(folder / "drafter", lambda fields: fields | {"rope_parameters": JAX_TURN})
    wrong = Replay(folder / "target", folder / "drafter")
    drafts = accepted = replayed = alike = 0
    for prompt in [prompt for seed in (0, 1, 2) for prompt in pair.prompts(12, seed)]:
        with torch.no_grad():
            given = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
            text = right.target.generate(torch.tensor([prompt]), **given)[0].tolist()
        features, _ = right.read(text)
        at = len(prompt)
        while at < len(text) - 1:
            both = []
            for replay in (wrong, right):
                pairs = zip(
                    replay.draft(features, text[at], at, pair.BLOCK - 1), text[at + 1 :], strict=False
                )
                both.append(sum(1 for _ in takewhile(lambda two: two[0] == two[1], pairs)))
            drafts, accepted, replayed = drafts + 1, accepted + both[0], replayed + both[1]
            alike += both[0] == both[1]
            at += both[0] + 1
    counts = {"drafts": drafts, "accepted": accepted}
    return counts | {"accepted_in_replay": replayed, "drafts_accepted_alike": alike}


def main():
    """Run both paths, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turned", action="store_true")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        (args.one / "counts.json").write_text(json.dumps(one(args.one, args.tokens)))
        return
    sys.path.insert(0, str(IN_VLLM))
    import pair

    from torch_dflash.cli.outputs import write_results

    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair.save(folder, target=SIZES, drafter=SIZES)
        if args.turned:
            found["a drafter that turns by 1,000,000"] = turned(folder, args.tokens)
            print(found, flush=True)
        for label, implementation in () if args.turned else PATHS.items():
            environment = {"MODEL_IMPL_TYPE": implementation, "DRAFT_MODEL_IMPL_TYPE": implementation}
            environment |= {"JAX_PLATFORMS": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            environment |= {"SKIP_JAX_PRECOMPILE": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, __file__, "--one", str(folder), "--tokens", str(args.tokens)]
            subprocess.run(command, env=os.environ | environment, check=True)
            found[label] = json.loads((folder / "counts.json").read_text())
            print(label, found[label], flush=True)
    if args.json:
        write_results(args.json, {"paths": found})


if __name__ == "__main__":
    main()
