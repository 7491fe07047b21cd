"""One case of `families.py`: a model of `family_configs`, decoded here and by transformers."""

from __future__ import annotations

import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from family_configs import LAYERS, VOCAB, build
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

import torch_dflash as td
from torch_dflash.selftest.pairs import make_drafter, randomise
from torch_dflash.targets.adapter import Target

LENGTHS = (19, 11, 4)
NEW = 24
CAPACITY = 64
TIE = 1e-4
# Seeds, gains of random weights, and scales of norms, tried in turn until the text varies.
WEIGHTS = ((0, 2.0, 1.0), (1, 3.0, 5.0), (2, 5.0, 8.0), (3, 8.0, 8.0), (4, 3.0, 8.0))
ENOUGH = 8
PROPOSERS = ("ngram", "dflash", "plain")
# Outcomes, worst first.
OUTCOMES = ("crash", "differs", "tie", "equal", "refused")


def prompts() -> list[Tensor]:
    """One row [1, T] for each of `LENGTHS`, without the last ids, which stand for padding and the like."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB - 4, (1, length), generator=generator) for length in LENGTHS]


def padded(rows: list[Tensor]) -> dict[str, Any]:
    """The rows as one left-padded batch."""
    widest = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), widest, dtype=torch.long), torch.zeros(len(rows), widest).long()
    for index, row in enumerate(rows):
        ids[index, widest - row.shape[1] :] = row[0]
        mask[index, widest - row.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def natively(target, row: Tensor) -> list[int]:
    """transformers' own greedy text of one row."""
    ids = target.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=NEW, do_sample=False)
    return ids[0, row.shape[1] :].tolist()


def varied(case: str, rows: list[Tensor]) -> tuple[Any, list[list[int]]]:
    """The target with the random weights that give the most varied text, and its texts."""
    best, found = -1, None
    for seed, gain, scale in WEIGHTS:
        torch.manual_seed(seed)
        target: Any = randomise(build(case), seed, gain)
        raise_norms(target, scale)
        # No stop ids and none of the penalties that some configs bring.
        target.generation_config = GenerationConfig(pad_token_id=VOCAB - 1, bos_token_id=VOCAB - 2)
        distinct = len(set(natively(target, rows[0])))
        if distinct > best:
            best, found = distinct, target
        if distinct >= ENOUGH:
            break
    return found, [natively(found, row) for row in rows]


def raise_norms(target: Any, scale: float) -> None:
    """Enlarge the norms that `randomise` does not know by name and makes as small as biases."""
    with torch.no_grad():
        for module in target.modules():
            weight = getattr(module, "weight", None)
            if "norm" in type(module).__name__.lower() and weight is not None and weight.abs().mean() < 0.6:
                weight.mul_(scale)


def make_proposer(name: str, target) -> Any:
    """The proposer by name; a random drafter is seldom right, prompt lookup often in text that repeats."""
    if name == "plain":
        return None
    if name == "ngram":
        return td.NGramProposer(4)
    hidden = target.get_input_embeddings().weight.shape[1]
    sizes = SimpleNamespace(vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=LAYERS)
    return make_drafter(SimpleNamespace(config=sizes), block_size=5, mask_token_id=VOCAB - 1)


def judge(target, row: Tensor, ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """Judges a text by forwards of the target without a cache where the two texts disagree."""
    if ours == theirs:
        return {"outcome": "equal"}
    found = {"outcome": "equal", "note": "transformers' cached text is not that of its own uncached forwards"}
    for index, token in enumerate(ours):
        ids = torch.cat([row, torch.tensor([ours[:index]], dtype=torch.long)], dim=1)
        with torch.no_grad():
            logits = target(input_ids=ids, use_cache=False).logits[0, -1].float()
        best = int(logits.argmax())
        margin = float(logits[best] - logits[token])
        if best != token and margin >= TIE:
            what = {"token": index, "ours": token, "theirs": theirs[index], "uncached": best}
            return {"outcome": "differs", **what, "margin": round(margin, 4)}
        if best != token:
            found = {"outcome": "tie", "token": index, "margin": margin}
    return found


def attempt(target, rows: list[Tensor], theirs: list[list[int]], proposer: str, **options) -> dict[str, Any]:
    """Decode alone and in a ragged batch, and judge every row."""
    try:
        drafter = make_proposer(proposer, target)
        engine = td.compile(
            target, drafter, max_length=CAPACITY, batch_size=len(rows), filters=False, **options
        )
        decoded = []
        for batch in (rows[:1], rows):
            ids = engine.generate(**padded(batch), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
            decoded += [(index, text[-NEW:].tolist()) for index, text in enumerate(ids)]
    except Exception as error:
        found = {"outcome": "refused" if _refused(error) else "crash", "detail": _first_line(error)}
        if "not among those tested" in str(error):  # would it have been right?
            found["unverified"] = attempt(target, rows, theirs, proposer, **options, verify=False)["outcome"]
        return found
    return worst([judge(target, rows[row], ours, theirs[row]) | {"row": row} for row, ours in decoded])


def _refused(error: Exception) -> bool:
    """Whether this package refused, before any step of decoding."""
    frames = traceback.extract_tb(error.__traceback__)
    root = Path(td.__file__).parent.parent
    ours = any(frames[-1].filename.startswith(f"{root / name}/") for name in ("torch_dflash", "jax_bridge"))
    stepped = any(Path(frame.filename).name == "runtime.py" for frame in frames)
    return isinstance(error, TypeError | ValueError) and ours and not stepped


def worst(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict that counts; something refused is worse than equal only where nothing was equal."""
    found = min(verdicts, key=lambda one: (OUTCOMES.index(one["outcome"]), "note" not in one))
    if found["outcome"] == "equal":  # all of them are
        return {name: value for name, value in found.items() if name in ("outcome", "note")}
    return found


def report(pipe: Connection, case: str, runtime: str, caches: list[str], proposers: list[str]) -> None:
    """Send a dictionary about the model through ``pipe``, then one for each cache."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = prompts()
    try:
        target: Any = build(case)
    except Exception as error:
        return pipe.send({"outcome": "not instantiable", "detail": _first_line(error)})
    pipe.send({"model": type(target).__name__, "parameters": target.num_parameters()})
    try:
        target, theirs = varied(case, rows)
    except Exception as error:
        return pipe.send({"outcome": "their generate fails", "detail": _first_line(error)})
    pipe.send({"distinct": len(set(theirs[0]))} | recurrence(target))
    for cache in caches:
        verdicts = {
            name: attempt(target, rows, theirs, name, runtime=runtime, cache=cache) for name in proposers
        }
        found = worst([{"proposer": name} | verdict for name, verdict in verdicts.items()])
        ran = [name for name in proposers if verdicts[name]["outcome"] != "refused"]
        pipe.send(found | {"runtime": runtime, "cache": cache, "proposers": ran})


def recurrence(target) -> dict[str, Any]:
    """Counts the layers with a recurrent state or a convolution's tail, and all layers; {} for none."""
    try:
        specs = Target(target).specs
    except (TypeError, ValueError):
        return {}
    found = [spec.kind for spec in specs if spec.scan or spec.conv]
    return {"recurrent": len(found), "layers": len(specs)} if found else {}


def _first_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
