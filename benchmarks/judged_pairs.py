"""Tiny pairs whose drafters learned by one convention, while their configs name another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import torch_dflash as td
from torch_dflash.doctor.changes import Change, Convention, changes
from torch_dflash.doctor.judge import Answered, Judge, record
from torch_dflash.selftest.pairs import make_drafter, make_target
from torch_dflash.train.fit.blocks import block_targets

PROMPT, NEW, ROWS = 6, 40, 8
MASKS = 8
ASKED, OTHERWISE = 0, 1
"""Templates: prompts as they are asked, and with another first id, as another variable's text would be."""
RATE = 4e-3
OTHER_ROPE = {"rope_type": "default", "rope_theta": 30.0}


@dataclass(frozen=True)
class Case:
    """A pair, its texts, ids to try as masks, and the changes by which the drafter learned.

    ``others`` are the target's answers by the other template.
    """

    target: Any
    drafter: Any
    texts: list[Answered]
    others: list[Answered]
    masks: list[int]
    learned: tuple[Change, ...]


def make_case(
    family: str,
    seed: int,
    kinds: tuple[str, ...] = (),
    steps: int = 150,
    drafter: dict[str, Any] | None = None,
    templates: tuple[int, ...] = (ASKED,),
    **target_sizes: Any,
) -> Case:
    """A pair of ``family`` that learned by another convention in ``kinds``; the seed draws each change.

    It learned from answers by ``templates``.
    """
    target = make_target(family, seed, **target_sizes)
    rope = OTHER_ROPE if "rope" in kinds else dict(target.config.rope_parameters)
    small = make_drafter(target, seed + 1, **{"rope_parameters": rope} | (drafter or {}))
    size, generator = target.config.vocab_size, torch.Generator().manual_seed(seed + 2)
    masks = list(range(size - MASKS, size))
    every = changes(target, small, PROMPT + NEW, masks)
    learned = []
    for kind in kinds:
        options = [one for one in every if one.kind == kind]
        learned.append(options[int(torch.randint(len(options), (), generator=generator))])
    convention = Convention.of(small)
    for change in learned:
        convention = change.apply(convention)
    texts = _texts(target, generator)
    _teach(target, small, [text for one in templates for text in texts[one]], convention, steps, generator)
    return Case(target, small.eval(), texts[ASKED], texts[OTHERWISE], masks, tuple(learned))


def kinds_of(family: str, drafter: dict[str, Any], **target_sizes: Any) -> set[str]:
    """The kinds of changes that such a pair has."""
    target = make_target(family, 0, **target_sizes)
    small = make_drafter(target, 1, **{"rope_parameters": OTHER_ROPE} | drafter)
    return {one.kind for one in changes(target, small, PROMPT + NEW, [0])} - {"dtype"}


def _texts(target: Any, generator: torch.Generator) -> dict[int, list[Answered]]:
    """By template, the same random prompts and the target's own greedy answers."""
    ids = torch.randint(0, target.config.vocab_size - MASKS, (ROWS, PROMPT), generator=generator)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "runtime": "eager"}
    texts = {}
    for template in (ASKED, OTHERWISE):
        ids[:, 0] = OTHERWISE if template == OTHERWISE else ids[:, 0]
        out = td.generate(target, None, ids, torch.ones_like(ids), **options)
        texts[template] = [Answered(row, PROMPT) for row in out]
    return texts


def _teach(
    target: Any,
    drafter: Any,
    texts: list[Answered],
    convention: Convention,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Train ``drafter`` in place to draft these texts by ``convention``."""
    judge = Judge(target, drafter, record(target, texts))
    twin = convention.applied(drafter).train()
    weights = [weight.requires_grad_() for weight in twin.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(steps):
        loss = torch.zeros(())
        for one in judge.recorded:
            drawn = torch.randperm(len(one.text.ids) - 1 - one.text.start, generator=generator)[:12]
            batch = judge.batch(convention, one, (one.text.start + drawn).tolist())
            wanted, known = block_targets(batch, judge.width)
            said = judge.read(twin, convention, batch, judge.rows(twin, convention, batch))
            loss = loss + F.cross_entropy(said[known], wanted[known].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for weight in weights:
        weight.requires_grad_(False)
