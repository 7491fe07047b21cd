"""Scores, logits and log-probabilities of new tokens are transformers' own, through every door."""

from dataclasses import replace

import pytest
import torch
from support.refusals import refuses
from support.scripted import Scripted
from support.versions import COUNTS_PADDING, REVIVES_BANNED_STOPS
from transformers import LogitsProcessorList
from transformers.generation import logits_process

import torch_dflash as td
from torch_dflash import decode, eager, record, rows
from torch_dflash.generation import prepare

NEW = 16
ALL = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
OWN = {"output_logprobs": True, "top_logprobs": 3}
RULES = {
    "none": {},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    "bans": {"suppress_tokens": [10, 33], "bad_words_ids": [[90, 12]], "sequence_bias": [[[48, 5], 6.0]]},
    "ends": {
        "forced_eos_token_id": 7,
        "exponential_decay_length_penalty": (6 if REVIVES_BANNED_STOPS else 4, 1.3),
        "min_new_tokens": 6,
        "eos_token_id": [11, 12],
    },
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.2},
}


def asked(options):
    fixed = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return fixed | ALL | options


def theirs(pair, row, options):
    """transformers' output on one row without padding, which some of its processors count."""
    ids, mask = row
    ids = ids[mask.bool()][None]
    return ids, pair[0].generate(ids, attention_mask=torch.ones_like(ids), **asked(options))


def close(found, want):
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4, equal_nan=True)


def check(pair, batch, out, options, whole=True):
    """Asserts that ``out`` holds transformers' values for each row's tokens, and none behind its end."""
    width = batch["input_ids"].shape[1]
    new, rows = out.sequences.shape[1] - width, zip(*batch.values(), strict=True)
    for at, (row, tokens) in enumerate(zip(rows, out.new_tokens, strict=True)):
        ids, want = theirs(pair, row, options)
        assert tokens == want.sequences[0, ids.shape[1] :].tolist()
        raw = torch.cat(want.logits).log_softmax(-1)
        close(out.logprobs[at, : len(tokens)], raw.gather(1, torch.tensor(tokens)[:, None])[:, 0])
        best = raw.topk(3)
        close(out.top_logprobs[at, : len(tokens)], best.values)
        assert torch.equal(out.top_ids[at, : len(tokens)].long(), best.indices)
        assert out.logprobs[at, len(tokens) :].isnan().all() and (out.top_ids[at, len(tokens) :] == -1).all()
        for name in ("scores", "logits") if whole else ():
            assert len(out[name]) == new and out[name][0].dtype == torch.float32
            close(torch.stack(out[name])[: len(tokens), at], torch.cat(want[name]))
            assert torch.stack(out[name])[len(tokens) :, at].isnan().all()


@pytest.mark.parametrize("name", RULES)
def test_greedy_values_are_those_of_transformers(pair, batch, name):
    options = RULES[name]
    out = td.generate(*pair, **batch, runtime="eager", **asked(options), **OWN)
    check(pair, batch, out, options)
    assert name != "none" or max(map(max, out.stats.acceptance_lengths)) > 1


@pytest.fixture(scope="module")
def scripted(pair, batch):
    """A proposer with right drafts for the first row and some for the second; stops lie inside of blocks."""
    rows = zip(*batch.values(), strict=True)
    texts = [theirs(pair, row, {})[1].sequences[0].tolist() for row in rows]
    starts = batch["attention_mask"].sum(1).tolist()
    proposer = Scripted(2, 128, 6)
    proposer.say(texts)
    proposer.script[1, starts[1] + 3 :: 4] += 1
    new = [text[start:] for text, start in zip(texts, starts, strict=True)]
    assert 12 in new[0][2:5] and 12 not in new[1]  # the first block holds the tokens 1 to 6
    return proposer, 12


@pytest.mark.parametrize("options", [{"runtime": "eager"}, {"runtime": "eager", "rounds_per_chunk": 5}, {}])
def test_rows_end_apart_and_blocks_are_uneven(pair, batch, scripted, options):
    proposer, stop = scripted
    how = {"runtime": "xla", "rounds_per_chunk": 2} | options
    for ends in ({}, {"eos_token_id": stop}):
        out = td.generate(pair[0], proposer, **batch, **how, **asked(ends), **OWN)
        check(pair, batch, out, ends)
        first, second = out.stats.acceptance_lengths
        assert first == ([6, 6, 3] if not ends else [out.new_tokens[0].index(stop)]) and len({*second}) > 1
        assert not ends or len(out.new_tokens[0]) < len(out.new_tokens[1])


def test_rows_that_wait_for_pages(pair, batch):
    more = {name: rows.repeat(2, 1) for name, rows in batch.items()}
    options = {"runtime": "eager", "max_length": 64, "batch_size": 4, "cache": "paged", "page_size": 16}
    told = {"outputs": ("output_scores", "output_logits", "output_logprobs"), "top_logprobs": 5}
    engine = td.compile(*pair, **options, pool_pages=7, rounds_per_chunk=3, processors=(), **told)
    reads = []
    read = engine.runtime.read
    engine.runtime.read = lambda state, *at: reads.append(state.length.tolist()) or read(state, *at)
    check(pair, more, engine.generate(**more, **asked({}), **OWN), {})
    assert 0 in reads[0]  # a row waited


@pytest.mark.parametrize("drafter", [None, "auto"])
def test_other_widths(pair, batch, drafter):
    width = {} if drafter is None else {"verify_width": "auto", "rounds_per_chunk": 4}
    out = td.generate(pair[0], drafter and pair[1], **batch, runtime="eager", **width, **asked({}), **OWN)
    check(pair, batch, out, {})


def test_a_users_own_processor_sees_its_scores(pair, batch):
    def own(ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % ids.shape[1] == 0, -torch.inf)

    block = td.dflash(pair[1], runtime="eager")
    options = asked({}) | {"logits_processor": LogitsProcessorList([own])}
    want = pair[0].generate(**batch, **options)
    out = pair[0].generate(**batch, **options, custom_generate=block)
    assert torch.equal(out.sequences, want.sequences)
    close(torch.stack(out.scores), torch.stack(want.scores))
    close(torch.stack(out.logits), torch.stack(want.logits))


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 12, "top_p": 0.95, "typical_p": 0.98, "seed": 3}


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_sampled_values_are_those_of_transformers_for_the_text(pair, batch, runtime):
    options = asked(SAMPLED | {"max_new_tokens": 6, "repetition_penalty": 1.2, "num_return_sequences": 2})
    out = td.generate(*pair, **batch, runtime=runtime, **options, **OWN)
    warpers = [logits_process.RepetitionPenaltyLogitsProcessor(1.2)]
    warpers += [logits_process.TemperatureLogitsWarper(0.7), logits_process.TopKLogitsWarper(12)]
    warpers += [logits_process.TopPLogitsWarper(0.95), logits_process.TypicalLogitsWarper(0.98)]
    texts = out.sequences.view(2, 2, -1)
    assert not torch.equal(texts[:, 0], texts[:, 1])
    for at, tokens in enumerate(out.new_tokens):
        prompt = batch["input_ids"][at // 2][batch["attention_mask"][at // 2].bool()]
        ids = torch.cat([prompt, torch.tensor(tokens)])[None]
        raw = pair[0](ids).logits[0, len(prompt) - 1 : -1].float()
        close(torch.stack(out.logits)[:, at], raw)
        close(out.logprobs[at], raw.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])
        for place in range(len(tokens)):
            scores = LogitsProcessorList(warpers)(ids[:, : len(prompt) + place], raw[place][None])
            close(out.scores[place][at], scores[0])


def test_the_targets_own_generate(pair, batch):
    if COUNTS_PADDING:
        batch = {name: value[:1] for name, value in batch.items()}
    block = td.dflash(pair[1], runtime="eager", top_logprobs=3)
    out = pair[0].generate(**batch, **asked(RULES["penalties"]), custom_generate=block, output_logprobs=True)
    want = td.generate(*pair, **batch, runtime="eager", **asked(RULES["penalties"]), **OWN)
    for name in ("sequences", "logprobs", "top_logprobs", "top_ids"):
        assert torch.equal(out[name], want[name])
    for name in ("scores", "logits"):
        assert all(map(torch.equal, out[name], want[name]))
    transition = pair[0].compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    close(transition, out.logprobs)


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_pieces_of_a_stream_have_theirs(pair, batch, runtime):
    options = {"max_new_tokens": [NEW, 7], "do_sample": False, "eos_token_id": None, "runtime": runtime}
    told = options | OWN | {"rounds_per_chunk": 4}
    want = td.generate(*pair, **batch, return_dict_in_generate=True, **told)
    rows = list(zip(*td.stream(*pair, **batch, **told), strict=True))
    for at, row in enumerate(rows):
        said = [one for piece in row for one in piece.logprobs]
        pairs = [entry for piece in row for one in piece.top_logprobs for entry in one]
        count = len(want.new_tokens[at])
        assert said == want.logprobs[at, :count].tolist()
        assert [token for token, _ in pairs] == want.top_ids[at, :count].flatten().tolist()
        assert [log for _, log in pairs] == want.top_logprobs[at, :count].flatten().tolist()
    (piece, _), *_ = td.stream(*pair, **batch, **options | {"runtime": "eager"})
    assert piece.logprobs is None and piece.top_logprobs is None


def test_stop_strings_cut_them_too(pair, batch):
    class StopRule:  # ends the first row behind its third new token, the second behind its sixth
        def ends(self, texts, since, record):
            keep = [row.length + new for row, new in zip(call.request.rows, (3, 6), strict=True)]
            return [end if len(text) >= end else None for text, end in zip(texts, keep, strict=True)]

    options = asked(OWN) | {"rounds_per_chunk": 3}
    whole = td.generate(*pair, **batch, runtime="eager", **options)
    call = prepare("generate", *pair, *batch.values(), options | {"runtime": "eager"})
    rule = StopRule()
    rows = [replace(row, stopping=(rule,)) for row in call.request.rows]
    out = call.engine().run(replace(call.request, rows=rows))
    assert list(map(len, out.new_tokens)) == [3, 6]
    for at, count in enumerate((3, 6)):
        close(out.logprobs[at, :count], whole.logprobs[at, :count])
        for name in ("scores", "logits"):
            close(torch.stack(out[name])[:count, at], torch.stack(whole[name])[:count, at])
    assert out.logprobs[0, 3:].isnan().all() and out.scores[3][0].isnan().all()


def test_nothing_is_kept_that_was_not_asked_for(pair, batch):
    engine = td.compile(*pair, runtime="eager", max_length=64, batch_size=2)
    state = engine.start(**batch, max_new_tokens=4)
    assert state.record == {} and engine.plan.outputs == ()
    out = td.generate(*pair, **batch, runtime="eager", return_dict_in_generate=True, max_new_tokens=4)
    assert (out.scores, out.logits, out.logprobs, out.top_ids) == (None,) * 4
    # As in transformers, without an effect.
    quiet = {"output_scores": True, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(td.generate(*pair, **batch, runtime="eager", **quiet), out.sequences)


def test_what_cannot_be_told_is_refused(pair, batch):
    engine = td.compile(*pair, runtime="eager", max_length=64, batch_size=2, top_logprobs=2)
    for name in ("output_scores", "output_logits"):
        with refuses(ValueError, f"{name} was asked for", f"outputs=('{name}',)"):
            engine.generate(**batch, max_new_tokens=4, return_dict_in_generate=True, **{name: True})
        with refuses(ValueError, f"{name}=True", "log-probabilities alone"):
            td.stream(*pair, **batch, max_new_tokens=4, runtime="eager", **{name: True})
    with refuses(ValueError, "top_logprobs=3 was asked for", "compiled with 2"):
        engine.generate(**batch, max_new_tokens=4, return_dict_in_generate=True, top_logprobs=3)
    fewer = engine.generate(**batch, max_new_tokens=4, return_dict_in_generate=True, top_logprobs=1)
    assert fewer.top_ids.shape == (2, 4, 1)
    for call in (engine.generate, engine.stream, engine.start):
        with refuses(ValueError, "output_logprobs=True", "return_dict_in_generate=True"):
            call(**batch, max_new_tokens=4, output_logprobs=True)
    with refuses(ValueError, "outputs=('scores',)", "output_scores"):
        td.compile(*pair, runtime="eager", outputs=("scores",))
    with refuses(ValueError, "top_logprobs=100000", "at most"):
        td.compile(*pair, runtime="eager", max_length=64, top_logprobs=100_000)
    keeps = td.compile(*pair, runtime="eager", max_length=64, batch_size=2, outputs=("output_scores",))
    with refuses(ValueError, "outputs=('output_scores',)", "handed out"):
        keeps.start(**batch, max_new_tokens=4)
    block = td.dflash(pair[1], runtime="eager")
    for moved in (logits_process.TopKLogitsWarper(5), logits_process.LogitNormalization()):
        with refuses(ValueError, "output_scores=True", type(moved).__name__):
            lists = LogitsProcessorList([moved])
            pair[0].generate(**batch, **asked({}), logits_processor=lists, custom_generate=block)


def test_log_probabilities_move_with_a_state(pair, batch, tmp_path):
    engine = td.compile(*pair, runtime="eager", max_length=64, batch_size=2, outputs=("output_logprobs",))
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    whole = engine.generate(**batch, **options, return_dict_in_generate=True, output_logprobs=True)
    state = engine.advance(engine.start(**batch, **options))
    td.save_state(state, tmp_path / "state", engine)
    other = td.compile(*pair, max_length=64, batch_size=2, outputs=("output_logprobs",))
    state = td.load_state(tmp_path / "state", other)
    while not state.done.all():
        state = other.advance(state)
    length = int(batch["attention_mask"][0].sum())
    kept = other.runtime.fetch(state.record)["logprobs"]
    close(kept[0, length : length + NEW], whole.logprobs[0])


BROKEN = {
    "off by one row": lambda picks, logits: (picks, logits.roll(1, dims=1)),
    "a neighbour's": lambda picks, logits: (picks, logits.roll(1, dims=0)),
    "of another id": lambda picks, logits: (picks.roll(1, dims=1), logits),
}


@pytest.mark.parametrize(
    "name", [*BROKEN, "after a rejected draft", "processed for raw", "raw for processed"]
)
def test_each_wrong_row_is_caught(pair, batch, monkeypatch, name):
    options, note = RULES["penalties"], record.note_picks

    def broken(kept, picks, logits, scores, at, count=None):
        if name == "processed for raw":
            return note(kept, picks, scores, scores, at, count)
        if name == "raw for processed":
            return note(kept, picks, logits, logits, at, count)
        if name == "after a rejected draft":  # as if each draft had been kept
            skipped = at + (picks.shape[1] > 1)
            return note(kept, picks, logits, scores, skipped, count)
        picks, logits = BROKEN[name](picks, logits)
        return note(kept, picks, logits, scores, at, count)

    monkeypatch.setattr(decode, "note_picks", broken)
    out = td.generate(*pair, **batch, runtime="eager", **asked(options), **OWN)
    with pytest.raises(AssertionError):
        check(pair, batch, out, options)


def test_a_wrong_start_is_caught(pair, batch, monkeypatch):
    start = eager.EagerRuntime.record_from
    monkeypatch.setattr(
        eager.EagerRuntime, "record_from", lambda self, state, known: start(self, state, known - 1)
    )
    out = td.generate(*pair, **batch, runtime="eager", **asked({}), **OWN)
    with pytest.raises(AssertionError):
        check(pair, batch, out, {})


def test_a_reset_row_keeps_nothing(pair, batch):
    engine = td.compile(*pair, runtime="eager", max_length=64, batch_size=2, outputs=("output_logprobs",))
    state = engine.start(**batch, max_new_tokens=4, do_sample=False)
    idle = rows.RowRequests.idle(engine.plan)
    before = state.record["logprobs"].clone()
    state = rows.reset(engine.pair, engine.tensors(), state, torch.tensor([True, False]), idle)
    assert before[0].any() and not state.record["logprobs"][0].any()
    assert torch.equal(state.record["logprobs"][1], before[1])


def test_a_text_that_goes_on_has_them(pair):
    told = {"outputs": ("output_logprobs", "output_scores"), "runtime": "eager", "max_length": 96}
    engine = td.compile(*pair, **told, rounds_per_chunk=2)
    session, prompt = engine.session(), [5, 17, 80, 33, 2, 9, 41]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "output_logprobs": True}
    for more in ([], [3, 4, 8]):
        prompt = prompt + more
        gains = list(session.gains(prompt, **options))
        ids = torch.tensor([prompt])
        want = engine.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **options)
        assert [token for gain in gains for token in gain.tokens] == want.new_tokens[0]
        close(torch.tensor([[one for gain in gains for one in gain.logprobs]]), want.logprobs)
        assert not more or session.stats.prefilled == len(more) + 1
        prompt = want.sequences[0].tolist()
    with refuses(ValueError, "output_scores=True", "pass output_logprobs=True"):
        session.gains(prompt, **options, output_scores=True)
