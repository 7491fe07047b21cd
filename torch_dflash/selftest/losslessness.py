"""Losslessness: with any drafter the text is the target's own, greedy and sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.sampling import gumbel
from torch_dflash.selftest.backend import Case, prompts
from torch_dflash.selftest.parity import TOLERANCE
from torch_dflash.selftest.report import Check, judged

NEW = 24
TEMPERATURE = 8.0  # the two best logits of an agreeing pair lie tens above the others: see `correlate`
SEED = 5
KINDS = ("plain", "agreeing", "random", "n-gram", "paged")


def own_texts(case: Case) -> dict[str, list[list[int]]]:
    """By mode, each prompt's text to reproduce: transformers' greedy text, plain samples on the CPU."""
    greedy, sampled = [], []
    sample = case.plain_on_cpu()
    for row, prompt in enumerate(prompts()):
        ids = torch.tensor([prompt])
        options: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        out = case.target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **options
        )
        greedy.append(out[0, len(prompt) :].tolist())
        out = sample(ids, torch.ones_like(ids), **options, **_sampled([SEED + row]))
        sampled.append(out[0, len(prompt) :].tolist())
    return {"greedy": greedy, "sampled": sampled}


def lossless(case: Case, single: bool) -> Iterator[Check]:
    """Yield a check per drafter, mode and batch; ``single`` adds engines of batch size 1."""
    wanted = own_texts(case)
    everything = list(range(len(prompts())))
    for rows in (everything, [0]) if single else (everything,):
        for kind in KINDS:
            for mode in ("greedy", "sampled"):
                yield _same_text(case, kind, mode, rows, wanted)


def _sampled(seeds: list[int]) -> dict[str, Any]:
    return {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "seed": seeds}


def _same_text(case: Case, kind: str, mode: str, rows: list[int], texts: dict[str, list[list[int]]]) -> Check:
    wanted = texts[mode]
    chosen = [prompts()[row] for row in rows]
    how: Any = _sampled([SEED + row for row in rows]) if mode == "sampled" else {"do_sample": False}
    how |= {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    out = case.engine(kind, len(rows)).generate(*pad_rows(chosen), **how)
    assert isinstance(out, GenerateOutput) and out.stats is not None
    wrong, ties = [], []
    for row, prompt, ids in zip(rows, chosen, out.new_tokens, strict=True):
        at, gap = _difference(case, prompt, wanted[row], ids, SEED + row if mode == "sampled" else None)
        if at is not None:
            (wrong if gap is None else ties).append(f"row {row} at token {at}")
    lengths = sum(out.stats.acceptance_lengths, [])
    tau = out.stats.mean_acceptance_length
    detail = f"acceptance length {tau:.2f} ({min(lengths)} to {max(lengths)})"
    blind = {
        "acceptance never varied": kind in ("agreeing", "paged") and len(set(lengths)) < 2,
        "samples equal the greedy text": mode == "sampled" and wanted == texts["greedy"],
    }
    for words, what in ((wrong, "another text"), (ties, "a tie of the two best, so not compared further")):
        detail += f"; {what}: {', '.join(words)}" if words else ""
    detail += "".join(f"; {what}, so this shows nothing" for what, seen in blind.items() if seen)
    against = "plain" if mode == "sampled" else "target.generate"
    batch = f"{len(rows)} ragged rows" if len(rows) > 1 else "batch 1"
    named = {"plain": "plain", "n-gram": "n-gram", "paged": "agreeing drafter, paged cache"}
    drafter = named.get(kind, f"{kind} drafter")
    return judged(
        f"{case.family}, {mode} = {against}: {drafter}, {batch}",
        not wrong and not any(blind.values()),
        detail,
        acceptance_length=tau,
        ties=len(ties),
    )


@torch.no_grad()
def _difference(
    case: Case, prompt: list[int], wanted: list[int], got: list[int], seed: int | None
) -> tuple[int | None, float | None]:
    """(First token that differs, or None; gap of the two scores if rounding alone may have swapped them)."""
    if wanted == got:
        return None, None
    if len(wanted) != len(got):
        return min(len(wanted), len(got)), None
    at = next(index for index, (one, other) in enumerate(zip(wanted, got, strict=True)) if one != other)
    logits = case.target(torch.tensor([prompt + wanted[:at]]), use_cache=False).logits[0, -1]
    scores, temperature = logits, 1.0
    if seed is not None:
        place = torch.tensor([[len(prompt) + at]], dtype=torch.int32)
        noise = gumbel(torch.tensor([seed], dtype=torch.int32), place, len(logits))
        temperature = TEMPERATURE
        scores = logits / temperature + noise[0, 0]
    gap = float(scores.max() - scores[got[at]])
    # Two computations of the logits may differ by the tolerance, once for each of the two tokens.
    return at, gap if gap * temperature <= 2 * TOLERANCE * float(logits.abs().max()) else None
