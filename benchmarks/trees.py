"""Tokens a round by the rows of its verify pass: chains, trees and unions, replayed on recorded drafts.

The target decodes each prompt plainly. At every position the drafts of each form are recorded, by the
library's own code; the rounds of all forms are then replayed on the text. A draft never changes the text, so
these are the counts of real rounds. ``--check`` decodes some prompts with the forms and compares.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.cli.loading import load_named
from torch_dflash.cli.outputs import write_results
from torch_dflash.decode import commit, verify
from torch_dflash.proposers.dflash.proposer import _noise
from torch_dflash.proposers.trees.nodes import beam, best, children, in_preorder, join
from torch_dflash.proposers.union import LONG
from torch_dflash.requests.prompts import pad_rows
from torch_dflash.state import Draft, DraftRequest
from torch_dflash.train.answers.data import encode_conversation, read_prompts

ROWS = (4, 8, 16, 32, 64)


def main() -> None:
    """Record the prompts, replay each form, write the JSON after each chunk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=100, help="prompts of each set")
    parser.add_argument("--chunk", type=int, default=25, help="prompts of each set that share a batch")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--check", type=int, default=0, help="prompts that are decoded, too")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    loaded = load_named(arguments.target, arguments.drafter, dtype=arguments.dtype)
    checked = check(arguments, loaded) if arguments.check else {}
    rounds: dict[str, dict[str, list[int]]] = {path.stem: {} for path in arguments.prompts}
    for start in range(0, arguments.limit, arguments.chunk):
        some = range(start, min(start + arguments.chunk, arguments.limit))
        for name, forms in record_prompts(arguments, loaded, some).items():
            for form, own in forms.items():
                rounds[name].setdefault(form, []).extend(own)
        means = {
            name: {form: round(sum(own) / len(own), 4) for form, own in forms.items()}
            for name, forms in rounds.items()
        }
        print(some.stop, means, flush=True)
        options = {"dtype": arguments.dtype, "temperature": arguments.temperature}
        options |= {"prompts of each set": some.stop, "new tokens": arguments.max_new_tokens}
        options |= {"checked by decoding": checked}
        write_results(arguments.json, options | {"tokens a round": means})


def record_prompts(
    arguments: argparse.Namespace, loaded: Any, which: range
) -> dict[str, dict[str, list[int]]]:
    """The tokens of each form's rounds by set, over all turns of those prompts; sets share a batch."""
    prompts = [
        (path.stem, prompt.turns)
        for path in arguments.prompts
        for prompt in read_prompts([path])[which.start : which.stop]
    ]
    rounds: dict[str, dict[str, list[int]]] = {path.stem: {} for path in arguments.prompts}
    talks: list[list[dict]] = [[] for _ in prompts]
    for turn in range(max(len(turns) for _, turns in prompts)):
        asking = [at for at, (_, turns) in enumerate(prompts) if turn < len(turns)]
        for at in asking:
            talks[at].append({"role": "user", "content": prompts[at][1][turn]})
        asked = [encode_conversation(loaded.tokenizer, talks[at]) for at in asking]
        texts, drafts = record(arguments, loaded, asked)
        for row, (at, text) in enumerate(zip(asking, texts, strict=True)):
            said = loaded.tokenizer.decode(text, skip_special_tokens=True)
            talks[at].append({"role": "assistant", "content": said})
            for form in drafts[0]:
                own = [[rows[row] for rows in step[form]] for step in drafts[: len(text) - 1]]
                rounds[prompts[at][0]].setdefault(form, []).extend(replay(text, own))
    return rounds


def record(arguments: argparse.Namespace, loaded: Any, asked: list[list[int]]) -> tuple[list, list]:
    """(The new tokens of each prompt, the drafts of each form at each of them)."""
    ids, mask = pad_rows(asked)
    new, both = arguments.max_new_tokens, td.Union(td.NGramProposer(), loaded.drafter, rows=max(ROWS))
    room = {"max_length": ids.shape[1] + new, "batch_size": len(asked), "filters": False, "verify": False}
    engine = td.compile(loaded.target, both, runtime="eager", **room)
    state = engine.start(ids, mask, max_new_tokens=new, **sampling(arguments))
    params, drafts = engine.tensors(), []
    while not state.done.all():
        told, state = engine.pair.run(step, params, state)
        drafts.append(told)
        print(f"\r{len(drafts)} of {new}", end="", flush=True)
    texts = []
    for row, prompt in enumerate(asked):
        texts.append(state.tokens[row, len(prompt) : int(state.length[row]) + 1].tolist())
    return texts, drafts


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a request."""
    if not arguments.temperature:
        return {"do_sample": False}
    more = {"top_k": 0, "top_p": 1.0, "seed": arguments.seed}
    return {"do_sample": True, "temperature": arguments.temperature} | more


def step(pair: Any, state: Any) -> tuple[dict[str, tuple], Any]:
    """(The drafts of each form, the state a token later)."""
    target, (lookup, inner), (words, block) = pair.target, pair.proposer.parts, state.proposer.parts
    anchor, length, asked = (
        state.anchor.clone(),
        state.length.clone(),
        DraftRequest(state.sampling, max(ROWS)),
    )
    hidden, block = inner._block(block, anchor, length, target.embed)
    noise = _noise(length, asked)
    found, words = lookup.look_up(words, anchor, length)
    drafter, sampled = inner.drafter, bool(noise.sampled.any())
    logits = drafter.logits(hidden, target.head).to(torch.float32)
    noisy = noise.added(logits, drafter._known_ids(logits)) if sampled else logits
    chain = drafter.chosen(hidden, noisy, anchor)
    count, copied = chain.shape[1], found.tokens[:, : chain.shape[1]]
    whole = torch.full_like(length, count)
    long = found.matched >= LONG
    drafts = {
        "lookup": Draft(copied, torch.where(found.matched > 0, whole, 0)),
        "drafter": Draft(chain, whole),
        "union": Draft(torch.where(long[:, None], copied, chain), whole),
    }
    if sampled:
        drafts["drafter without the noise"] = Draft(drafter.chosen(hidden, logits, anchor), whole)
    following = drafter.followers(hidden, noisy, noise.scale[:, None, None], children(max(ROWS)))
    for rows in ROWS:
        own = best(beam(first(following, children(rows)), anchor, count, rows), rows - 1)
        asked = DraftRequest(state.sampling, rows)
        copies = best(lookup.nodes(state.proposer.parts[0], anchor, length, None, None, asked)[0], rows - 1)
        deepest = min(rows - 1, lookup.width - 1)
        drafts[f"tree of {rows}"] = in_preorder(own, deepest)
        drafts[f"union of {rows}"] = in_preorder(best(join(copies, own, deepest), rows - 1), deepest)
    none = Draft(chain[:, :0], torch.zeros_like(whole))
    seen = verify(pair, state, none, 1)
    state = commit(pair, state, none, replace(state.proposer, parts=(words, block)), seen)
    return {form: plain(draft) for form, draft in drafts.items()}, state


def first(following: Callable, most: int) -> Callable:
    """The ``most`` likeliest alone."""

    def fewer(at: int, before: Any) -> tuple[Any, Any]:
        ids, logs = following(at, before)
        return ids[..., :most], logs[..., :most]

    return fewer


def plain(draft: Draft) -> tuple[list, list, list]:
    """(tokens, parents, how many are real) of each row."""
    parent = draft.parent
    if parent is None:
        parent = torch.arange(-1, draft.tokens.shape[1] - 1).expand(draft.tokens.shape)
    return draft.tokens.tolist(), parent.tolist(), draft.valid.tolist()


def replay(text: list[int], drafts: list) -> list[int]:
    """The tokens of each round, where ``drafts`` are those behind each token of the text."""
    at, rounds = 0, []
    while at < len(text) - 1:
        tokens, parents, valid = drafts[at]
        depth, deepest = {-1: 0}, 0
        for node in range(valid):
            before = depth.get(parents[node])
            follows = before is not None and at + before + 1 < len(text)
            if follows and tokens[node] == text[at + before + 1]:
                depth[node] = before + 1
                deepest = max(deepest, before + 1)
        rounds.append(min(deepest + 1, len(text) - 1 - at))
        at += deepest + 1
    return rounds


def check(arguments: argparse.Namespace, loaded: Any) -> dict[str, float]:
    """Tokens a round of some forms, decoded; they must be those of the replay."""
    path = arguments.prompts[0]
    alone = argparse.Namespace(**(vars(arguments) | {"prompts": [path]}))
    rounds = record_prompts(alone, loaded, range(arguments.check))[path.stem]
    prompts = read_prompts([path])[: arguments.check]
    talks = [[{"role": "user", "content": prompt.turns[0]}] for prompt in prompts]
    ids, mask = pad_rows([encode_conversation(loaded.tokenizer, talk) for talk in talks])
    forms = {"drafter": loaded.drafter, "union": td.Union(td.NGramProposer(), loaded.drafter)}
    forms |= {"tree of 8": td.TreeProposer(loaded.drafter, rows=8)}
    forms |= {f"union of {n}": td.Union(td.NGramProposer(), loaded.drafter, rows=n) for n in (8, 16)}
    found = {}
    for form, drafter in forms.items():
        options = {"max_new_tokens": arguments.max_new_tokens, "runtime": "eager", "verify": False}
        options |= {"return_dict_in_generate": True} | sampling(arguments)
        out: Any = td.generate(loaded.target, drafter, ids, mask, **options)
        lengths = [count for row in out.stats.acceptance_lengths for count in row]
        assert lengths == rounds[form] or sum(lengths) == sum(rounds[form]), form
        found[form] = round(sum(lengths) / len(lengths), 4)
        replayed = round(sum(rounds[form]) / len(rounds[form]), 4)
        assert abs(found[form] - replayed) < 0.02, f"{form}: {found[form]} decoded, {replayed} replayed"
    return found


if __name__ == "__main__":
    main()
