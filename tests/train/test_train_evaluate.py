"""Figures of an evaluation are those of real decoding; replayed n-gram lookup equals a real run."""

import json
import math

import pytest
from support.refusals import refuses
from support.scripted import pad
from support.trained import CONTEXT, NEW, WIDTH

import torch_dflash as td
from torch_dflash.proposers import NGramProposer
from torch_dflash.train.answers.data import Prompt, encode_conversation
from torch_dflash.train.evaluate import Acceptance, evaluate, replay_ngram
from torch_dflash.train.export import acceptance_table
from torch_dflash.train.options import EvaluateOptions

EAGER = EvaluateOptions(max_new_tokens=NEW, runtime="eager")


def chosen(**changes) -> EvaluateOptions:
    return EvaluateOptions(**vars(EAGER) | changes)


def decoded(world, drafter, rows, new=NEW, **options):
    """(Texts, rounds that the cap did not cut, marks of rows with a stop id) of `torch_dflash.generate`."""
    ids, mask = pad(rows)
    given = {"max_new_tokens": new, "runtime": "eager", "do_sample": False, "return_dict_in_generate": True}
    out = td.generate(world.target, drafter, ids, mask, **options, **given)
    texts, lengths = [], []
    for row, (rounds, capped) in enumerate(zip(out.stats.acceptance_lengths, out.stats.capped, strict=True)):
        texts.append(out.sequences[row, ids.shape[1] : ids.shape[1] + 1 + sum(rounds)].tolist())
        lengths += rounds[:-1] if capped else rounds
    stops = options.get("eos_token_id") or world.target.generation_config.eos_token_id
    return texts, lengths, [text[-1] in stops for text in texts]


def encoded(world, prompts):
    return [
        encode_conversation(world.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for prompt in prompts
    ]


def test_lengths_are_those_of_decoding(world, overfit):
    found = evaluate(world.target, overfit.drafter, world.tokenizer, world.prompts, EAGER)
    texts, lengths, _ = decoded(world, overfit.drafter, encoded(world, world.prompts))
    assert sorted(found.drafter.lengths) == sorted(lengths) and found.drafter.width == WIDTH
    assert (found.prompts, found.left_out, found.new_tokens) == (9, 0, sum(map(len, texts)))
    assert found.seconds > 0
    _, looked_up, _ = decoded(world, NGramProposer(WIDTH), encoded(world, world.prompts))
    assert sorted(found.ngram.lengths) == sorted(looked_up) and found.ngram.width == WIDTH
    row = found.row()
    assert row["acceptance_length"] == round(sum(lengths) / len(lengths), 4) == round(found.drafter.mean, 4)
    assert row["rounds"] == len(lengths) and len(row["per_position"]) == WIDTH - 1
    assert row["ngram_acceptance_length"] == round(sum(looked_up) / len(looked_up), 4)


def test_xla_gives_the_same_figures(world, overfit):
    given = world.target, overfit.drafter, world.tokenizer, world.prompts
    one, other = (evaluate(*given, chosen(limit=1, batch_size=1, runtime=name)) for name in ("eager", "xla"))
    assert one.drafter == other.drafter and one.ngram == other.ngram and one.new_tokens == other.new_tokens


def test_the_drafter_reads_the_targets_states(world, overfit):
    """With the states of another conversation few drafts of learnt answers are accepted."""
    prompts = [one for one, ids in zip(world.prompts, encoded(world, world.prompts), strict=True)
               if ids in overfit.trained]  # fmt: skip
    given = world.target, overfit.drafter, world.tokenizer, prompts
    true, shuffled = (evaluate(*given, chosen(shuffled=flag)) for flag in (False, True))
    assert true.drafter.mean > 5.5 > 2.5 > shuffled.drafter.mean
    assert true.new_tokens == shuffled.new_tokens  # the text is the target's for any drafter
    with refuses(ValueError, "batch_size=1 with shuffled"):
        chosen(shuffled=True, batch_size=1)


def looping(world):
    """Prompts whose answers n-gram lookup can draft: they hold the target's next tokens."""
    rows = []
    for one in world.answers:
        prompt = encode_conversation(world.tokenizer, one.messages)
        rows.append([*prompt, *one.response_ids[:12], *prompt, *one.response_ids[:3]])
    return rows + [[7, 8, 9] * 9, [5] * 20]


@pytest.mark.parametrize("width", [2, 3, 6, 16])
@pytest.mark.parametrize("new", [1, 2, 11, 33])
def test_replayed_lookup_is_a_real_run(world, width, new):
    """Rows that a stop id ended and rows that the cap cut, in one ragged batch."""
    rows = looping(world)
    texts, _, _ = decoded(world, None, rows, 33)
    # Stop ids that end some rows early, one of them within a match.
    stops = [texts[0][14], texts[3][20], texts[-1][5]]
    texts, lengths, stopped = decoded(world, NGramProposer(width), rows, new, eos_token_id=stops)
    if new == 33:
        assert True in stopped and False in stopped
        assert width == 2 or max(lengths) > 2  # something is found
    assert sorted(replay_ngram(rows, texts, stopped, width)) == sorted(lengths)
    assert replay_ngram(rows, texts, stopped, 1) == []


def test_positions_are_counted(world, overfit):
    lengths = [1, 3, 6, 6, 2, 1]
    found = Acceptance(lengths, 6)
    wanted = []
    for draft in range(1, 6):
        wanted.append(sum(1 for length in lengths if length - 1 >= draft) / len(lengths))
    assert found.per_position == wanted and found.mean == sum(lengths) / 6
    assert math.isclose(1 + sum(found.per_position), found.mean)
    assert Acceptance([], 4).per_position == [0.0] * 3 and math.isnan(Acceptance([], 4).mean)


def test_a_narrower_verification_bounds_the_lengths(world, overfit):
    given = world.target, overfit.drafter, world.tokenizer, world.prompts
    found = evaluate(*given, chosen(verify_width=3))
    assert (
        found.drafter.width == 3 and max(found.drafter.lengths) == 3 and len(found.drafter.per_position) == 2
    )
    plain = evaluate(*given, chosen(verify_width=1))
    assert (
        set(plain.drafter.lengths) == {1} and plain.drafter.per_position == [] and plain.ngram.lengths == []
    )


def test_turns_beyond_the_context_are_left_out_and_counted_with_those_after_them(world, overfit, capsys):
    prompts = [*world.prompts[:2], Prompt("long", ["x" * (CONTEXT - NEW), "never"])]
    found = evaluate(world.target, overfit.drafter, world.tokenizer, prompts, EAGER)
    short = evaluate(world.target, overfit.drafter, world.tokenizer, prompts[:2], EAGER)
    assert found.left_out == 2 and found.drafter == short.drafter and found.new_tokens == short.new_tokens
    assert "left_out=2" in capsys.readouterr().err
    for few, words in (
        (prompts[2:], f"none of the 1 is at most {CONTEXT - NEW} tokens"),
        ([], "at least one"),
    ):
        with refuses(ValueError, "prompts", words):
            evaluate(world.target, overfit.drafter, world.tokenizer, few, EAGER)


def test_no_rounds_have_no_figure(world, overfit):
    """An answer of one token takes none."""
    given = world.target, overfit.drafter, world.tokenizer, world.prompts[:1]
    row = evaluate(*given, chosen(max_new_tokens=1)).row()
    assert row["acceptance_length"] is row["ngram_acceptance_length"] is None
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    table = acceptance_table({"a": row, "b": row | {"left_out": 3}})
    assert "| a | - | - |" in table and table.endswith("beyond the target's context: b 3.")


def test_the_limit_is_of_prompts(world, overfit):
    found = evaluate(world.target, overfit.drafter, world.tokenizer, world.prompts, chosen(limit=2))
    assert found.prompts == 2
    _, lengths, _ = decoded(world, overfit.drafter, encoded(world, world.prompts[:2]))
    assert sorted(found.drafter.lengths) == sorted(lengths)


def test_later_turns_follow_the_answers(world, overfit):
    found = evaluate(
        world.target, overfit.drafter, world.tokenizer, [Prompt("a", ["be", "so?"])], chosen(max_new_tokens=9)
    )
    messages, wanted, tokens = [], [], 0
    for turn in ("be", "so?"):
        messages.append({"role": "user", "content": turn})
        rows = [encode_conversation(world.tokenizer, messages)]
        texts, lengths, _ = decoded(world, overfit.drafter, rows, 9)
        wanted, tokens = wanted + lengths, tokens + len(texts[0])
        answer = world.tokenizer.decode(texts[0], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    assert sorted(found.drafter.lengths) == sorted(wanted) and found.new_tokens == tokens


def test_bad_options_are_refused_by_name():
    for changes, words in (
        ({"limit": 0}, ["limit=0"]),
        ({"verify_width": 0}, ["verify_width=0"]),
        ({"runtime": "gpu"}, ["runtime='gpu'", "'eager'"]),
    ):
        with refuses(ValueError, *words):
            EvaluateOptions(**changes)


def test_a_stop_id_of_one_number_is_one(world, overfit, monkeypatch):
    monkeypatch.setattr(world.target.generation_config, "eos_token_id", 0)
    found = evaluate(world.target, overfit.drafter, world.tokenizer, world.prompts[:3], EAGER)
    texts, lengths, _ = decoded(world, overfit.drafter, encoded(world, world.prompts[:3]), eos_token_id=[0])
    assert found.new_tokens == sum(map(len, texts)) and sorted(found.drafter.lengths) == sorted(lengths)
