"""`vllm serve` with our drafter: many requests at once, streamed and whole, from a server of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pair
import pytest
from support import DRAFTS, options_of, pair_folder, replay_of, run
from test_in_vllm import NEAR, TOKENS, batch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROMPTS = pair.prompts(16, 21)
START = WAIT = 1800  # seconds, of which a busy machine needs many


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a running server; its log is shown if it does not start."""
    folder, log = pair_folder("tied"), tmp_path_factory.mktemp("served") / "log.txt"
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(pair.VOCAB)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "target")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = options_of("tied")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options["model"]]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "256"]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--block-size", "16"]
    command += ["--num-gpu-blocks-override", "64", "--served-model-name", "pair"]
    command += ["--speculative-config", json.dumps(options["speculative_config"])]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
            try:
                if httpx.get(f"{address}/health", timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait(300)


def ask(address, prompt, stream):
    """The ids of one completion."""
    asked = {"model": "pair", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    asked |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
    if not stream:
        reply = httpx.post(f"{address}/v1/completions", json=asked, timeout=WAIT).json()
        return reply["choices"][0]["token_ids"]
    found = []
    with httpx.stream("POST", f"{address}/v1/completions", json=asked, timeout=WAIT) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found += choice["token_ids"] or []
    return found


def test_sixteen_requests_at_once(address):
    plain = run("tied", [batch(PROMPTS)], drafted=False)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda at: ask(address, PROMPTS[at], at % 2 == 0), range(16)))
    parted = 0
    for prompt, (text,), served in zip(PROMPTS, plain.texts[0], found, strict=True):
        assert len(served) == TOKENS
        parted += text != served
        assert replay_of("tied").parts_at_a_tie(prompt, text, served, NEAR)
    assert parted <= 3
    lines = httpx.get(f"{address}/metrics", timeout=WAIT).text.splitlines()
    counted = {
        name: sum(
            float(line.split()[-1]) for line in lines if line.startswith(f"vllm:spec_decode_num_{name}")
        )
        for name in ("drafts_total", "draft_tokens_total", "accepted_tokens_total")
    }
    assert 0 < counted["draft_tokens_total"] <= DRAFTS * counted["drafts_total"]
    assert counted["accepted_tokens_total"] > 0.2 * counted["drafts_total"]
