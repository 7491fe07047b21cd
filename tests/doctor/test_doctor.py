"""The doctor names the convention by which a drafter learned, and leaves sound pairs alone."""

import json
import math
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support import ROOT
from support.layouts import expected, publish
from support.refusals import refuses
from support.tiny import make_drafter, make_target
from support.tokenizers import TEMPLATE, byte_tokenizer

import torch_dflash as td
from torch_dflash.cli import loading, main
from torch_dflash.cli.loading import Loaded
from torch_dflash.doctor import answers, judge_texts
from torch_dflash.doctor.answers import other_way
from torch_dflash.doctor.changes import Convention, changes, repair
from torch_dflash.doctor.diagnosis import _best, check_judged
from torch_dflash.doctor.judge import Answered, Drafted, Judge, record, standard_score
from torch_dflash.doctor.tried import ENOUGH, FEW, SURE, Tried, surely, weigh
from torch_dflash.proposers.notes import findings

LESSER = 15400
"""A pair whose second fault hardly costs drafts; only likelihood shows the fault."""


@pytest.fixture(scope="module")
def judged():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import judged_pairs
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return judged_pairs


@pytest.mark.parametrize(
    ("family", "seed", "kinds", "steps"),
    [
        ("qwen3", 0, (), 120), ("llama", 30, (), 8), ("llama", 10, ("taps", "mask"), 100),
        ("gpt_oss", 3, ("row",), 100), ("qwen3", 4, ("causal",), 150), ("llama", 5, ("tied",), 100),
        ("qwen2", 12, ("window",), 150), ("llama", 7, ("normed", "rope"), 150),
        ("qwen2", LESSER, ("causal", "scale"), 150),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(judged, family, seed, kinds, steps):
    case = judged.make_case(family, seed, kinds, steps, {"num_hidden_layers": 1} if seed == LESSER else {})
    before = {name: value.clone() for name, value in case.drafter.state_dict().items()}
    own = Convention.of(case.drafter)
    found = judge_texts(case.target, case.drafter, case.texts, masks=case.masks)
    assert sorted(one.name for one in found.changes) == sorted(one.name for one in case.learned), str(found)
    assert found.verdict == ("broken" if kinds else "weak" if steps < 20 else "healthy"), str(found)
    assert found.verdict in str(found) and all(change.words in str(found) for change in found.changes)
    assert Convention.of(case.drafter) == own
    assert all(torch.equal(value, before[name]) for name, value in case.drafter.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_as_it_is_counts_what_decoding_accepts(family):
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    second = {"selector_rank": 8, "selector_top_k": 6, "conv_group_size": 4}
    chained = {"sample_from_anchor": True, "markov_rank": 4}
    for more, strength in (({}, 6.0), (window, 6.0), (second, 2.0), (chained, 6.0)):
        target = make_target(family)
        drafter = make_drafter(target, **more)
        td.selftest.pairs.correlate(target, drafter, strength)
        if more is second:  # its choice is often not the likeliest
            drafter.candidate_selector.successor_codebook.data.mul_(10)
        if more is chained:  # enough to change drafts
            drafter.markov_head.markov_w2.weight.data.mul_(10)
        ids = torch.tensor([[5, 17, 80, 33, 2, 9, 41]])
        options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
        out = td.generate(target, drafter, ids, torch.ones_like(ids), runtime="eager", **options)
        judge = Judge(target, drafter, record(target, [Answered(out.sequences[0], 7)]), blocks=10_000)
        counts = judge(Convention.of(drafter)).accepted.tolist()
        counts = dict(zip((at for _, at in judge.places), counts, strict=True))
        place, lengths = 7, out.stats.acceptance_lengths[0]
        for length in lengths[:-1]:  # the last one may be cut by the limit
            judged = min(length, drafter.config.block_size)  # W - 1 of the drafts from all W rows are judged
            assert counts[place] + 1 == judged
            place += length
        assert len(set(lengths)) > 1


def test_what_a_markov_head_adds_to_the_true_token_before_is_judged():
    target = make_target("llama", tie_word_embeddings=False)
    drafter = make_drafter(target, sample_from_anchor=True, markov_rank=4)
    own, ids = Convention.of(drafter), torch.arange(3, 23)
    judge = Judge(target, drafter, record(target, [Answered(ids, 7)]))
    batch = judge.batch(own, judge.recorded[0], [9])
    rows = judge.rows(drafter, own, batch)
    added = drafter.markov_head(ids[9:10])
    for words in (None, torch.arange(40, 60)):
        said = judge.read(drafter, own, batch, rows, words)[0, 0, 0]
        chosen = slice(None) if words is None else words
        plain = drafter.logits(rows, target.get_output_embeddings())[0, 0, 0]
        torch.testing.assert_close(said, (plain + added[0])[chosen])


def test_a_head_and_an_embedding_of_its_own_draft_as_the_targets_do():
    """DeepSpec's drafters hold copies of head and embedding."""
    target = make_target("llama", tie_word_embeddings=False)
    drafter, own = make_drafter(target), make_drafter(target, own_embedding=True, own_head=True)
    own.load_state_dict(drafter.state_dict(), strict=False)
    own.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    own.lm_head.weight.data.copy_(target.get_output_embeddings().weight)
    texts = [Answered(torch.arange(3, 23), 7)]
    drafted = [Judge(target, one, record(target, texts))(Convention.of(one)) for one in (drafter, own)]
    assert torch.equal(*(one.likelihood for one in drafted))
    own.lm_head.weight.data.neg_()
    own.embed_tokens.weight.data.neg_()
    other = Judge(target, own, record(target, texts))(Convention.of(own))
    assert not torch.allclose(other.likelihood, drafted[0].likelihood)
    assert "tied" not in {one.kind for one in changes(target, own, 100)}
    check_judged(target, own)
    own.config.draft_vocab_size = 40
    with refuses(ValueError, "own_embedding=True of the drafter: the doctor does not know"):
        check_judged(target, own)


class FromTheAnchor(td.DFlashDraftModel):  # the anchor's row gives the first draft
    def block(self, noise, context, position, memory, blocks=1):
        rows = super().block(noise, context, position, memory, blocks)
        return rows.unflatten(1, (blocks, -1)).roll(-1, dims=2).flatten(1, 2)


@pytest.mark.parametrize("flag", [True, False])
def test_the_row_that_says_the_first_draft_is_named_either_way(flag):
    target, drafter, tokenizer = td.load_demo_pair()
    if not flag:
        drafter.__class__ = FromTheAnchor
    drafter.config.sample_from_anchor = flag
    asked = answers.encoded(tokenizer, ["How many minutes are there in three hours?"], {})
    texts = answers.answer(target, asked, 28)
    judge, own = Judge(target, drafter, record(target, texts)), Convention.of(drafter)
    (row,) = [one for one in changes(target, drafter, 100) if one.kind == "row"]
    base, other = Tried((), judge(own)), Tried((row,), judge(row.apply(own)))
    assert other.beats(base) and not base.beats(other), (base.length, other.length)
    assert row.fields == {"sample_from_anchor": not flag} and "sample_from_anchor" in row.fix


def test_a_selector_chains_the_drafts_that_are_counted():
    target = make_target("llama")
    drafter = make_drafter(target, selector_rank=8, selector_top_k=6, conv_group_size=4)
    drafter.candidate_selector.successor_codebook.data.mul_(30)
    own, ids = Convention.of(drafter), torch.arange(3, 23)
    judge = Judge(target, drafter, record(target, [Answered(ids, 7)]))
    hidden = judge.rows(drafter, own, judge.batch(own, judge.recorded[0], [9]))[0]
    drafts = drafter.choose(hidden, ids[9:10], target.get_output_embeddings())[0]
    likeliest = drafter.logits(hidden, target.get_output_embeddings())[0].argmax(dim=-1)
    assert not torch.equal(drafts[1:], likeliest[1:].int())
    ids[10 : 10 + len(drafts)] = drafts  # behind the anchor: no block at the anchor sees them
    judge = Judge(target, drafter, record(target, [Answered(ids, 7)]))
    assert judge(own).accepted[judge.places.index((0, 9))] == len(drafts)


def test_states_are_those_that_taps_read():
    target = make_target("llama")
    seen = []
    note = lambda module, inputs, output: seen.append(output)  # noqa: E731
    hooks = [layer.register_forward_hook(note) for layer in target.model.layers]
    (one,) = record(target, [Answered(torch.arange(3, 15), 4)])
    for hook in hooks:
        hook.remove()
    assert len(one.states) == len(seen) + 1
    for state, output in zip(one.states[1:], seen, strict=True):
        assert torch.equal(state, (output[0] if isinstance(output, tuple) else output)[0].view_as(state))


def test_every_change_is_another_convention_and_its_fields_say_it():
    target = make_target("gpt_oss", tie_word_embeddings=False)
    windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
    rope, chained = (
        {"rope_type": "default", "rope_theta": 9.0},
        {"sample_from_anchor": True, "markov_rank": 4},
    )
    for more in ({}, windows, {"is_causal": True}, chained, {"rope_parameters": rope}):
        drafter = make_drafter(target, **more)
        own = Convention.of(drafter)
        every = changes(target, drafter, 100, [1, 2])
        kinds = {change.kind for change in every}
        assert {"taps", "normed", "causal", "mask", "scale", "tied", "row", "hidden_norm", "norm"} < kinds
        for change in every:
            other = change.apply(own)
            assert other != own, change.name
            if change.fields is None:
                continue
            config = drafter.config.to_dict() | {"dflash_config": None} | change.fields
            again = type(drafter)(type(drafter.config)(**config))
            anchors = again.config.sample_from_anchor, drafter.config.sample_from_anchor
            assert change.kind != "row" or anchors[0] != anchors[1]
            assert Convention.of(again) == other, (change.name, more)


def test_scores():
    old = torch.tensor([0, 1, 2, 3] * 16)
    assert standard_score(old, old) == 0 and standard_score(old + 1, old) > 4
    assert standard_score(old - 1, old) < -4
    noise = torch.randint(-1, 2, (64,), generator=torch.Generator().manual_seed(0))
    assert abs(standard_score(old + noise, old)) < 3


def test_how_sure_a_drafter_is_of_everything_is_no_merit():
    target = make_target("llama")
    drafter = make_drafter(target)
    text = Answered(torch.randint(0, 90, (60,), generator=torch.Generator().manual_seed(0)), 5)
    judge = Judge(target, drafter, record(target, [text]))
    nats = [float(judge(Convention.of(drafter)).nats.mean())]
    drafter.config.output_multiplier = 0.25
    nats.append(float(judge(Convention.of(drafter)).nats.mean()))
    assert nats[0] == pytest.approx(nats[1], abs=0.02), nats
    torch.nn.init.constant_(drafter.norm.weight, torch.nan)
    said = judge(Convention.of(drafter)).nats
    assert float(said.min()) == pytest.approx(-5 * math.log(len(text.ids.unique())), rel=1e-4)


def test_a_change_counts_where_each_is_better_than_all_it_is_made_of():
    target = make_target("llama")
    one, two, three = changes(target, make_drafter(target), 100, [1])[:3]
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))

    def tried(*made, nats=0.0, accepted=1):
        said = (nats + 0.01 * noise * len(made))[:, None]
        return Tried(made, Drafted(torch.arange(64) % 3 + accepted, said))

    base, single = tried(), [tried(one, nats=1.0), tried(two, nats=0.9), tried(three, nats=0.01)]
    assert _best(base, single, []) is single[0]
    assert _best(base, single[2:], []) is base  # certain, and without effect
    assert _best(base, [tried(one, nats=1.0, accepted=0), single[1]], []) is single[1]
    unsure = Tried((one,), Drafted(base.drafted.accepted, (noise - noise.mean() + 0.3)[:, None]))
    assert _best(base, [unsure], []) is base
    weak = tried(accepted=-1)
    assert _best(weak, [tried(one, nats=0.2, accepted=-1)], []) is weak
    assert _best(weak, [faint := tried(one, nats=0.3, accepted=-1)], []) is faint
    both, worse = tried(one, two, nats=2.0), tried(two, three, nats=0.9)
    assert _best(single[0], [both], [base, *single]) is both
    assert _best(single[0], [tried(one, three, nats=1.001)], [base, *single]) is single[0]
    assert _best(base, [worse], [base, *single]) is base


@pytest.fixture(scope="module")
def pair_of_scores():
    """``make(blocks, score)``: the pair as it is, and a change of that score with a standard error of 0.1."""
    target = make_target("llama")
    change = changes(target, make_drafter(target), 100, [1])[0]

    def make(blocks, score, made=(change,), accepted=2):
        noise = torch.randn(blocks, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = (noise - noise.mean()) / noise.std() * blocks**0.5 * 0.1
        base = Tried((), Drafted(torch.arange(blocks) % 3 + 2, torch.zeros(blocks, 1).double() - 9))
        drafted = Drafted(torch.arange(blocks) % 3 + accepted, (noise + score / 10)[:, None] - 9)
        return base, Tried(made, drafted)

    return make


def test_few_blocks_neither_name_a_change_nor_rule_it_out(pair_of_scores):
    def said(blocks, score, **more):
        base, one = pair_of_scores(blocks, score, **more)
        found = weigh(base, [one], blocks, 3)
        assert found.doubts in ((), (one.name,)) and (found.blocks, found.answers) == (blocks, 3)
        return "named" if one.beats(base) else "open" if found.doubts else "ruled out"

    for blocks, low, high in ((64, 0.4, 4.9), (128, 1.35, 4.1), (250, 3.2, 3.5)):
        scores = (low - 0.1, low + 0.1, high - 0.1, high + 0.1)
        assert [said(blocks, one) for one in scores] == ["ruled out", "open", "open", "named"], blocks
    for blocks in (ENOUGH, 2 * ENOUGH):  # the setting of the figures
        assert [said(blocks, one) for one in (SURE - 0.01, SURE + 0.01)] == ["ruled out", "named"]
    assert [said(FEW - 1, one) for one in (-50, 50)] == ["open", "open"]
    assert said(64, 3, accepted=0) == "ruled out"  # fewer drafts are accepted
    assert surely(64) > surely(128) > surely(ENOUGH) == surely(1000) == SURE


def test_what_is_left_open_is_said_with_what_to_do(pair_of_scores):
    base, one = pair_of_scores(64, 3.24)
    assert weigh(base, [one], 64, 3).gain == pytest.approx(0.324 + 2 * 0.1)
    two = pair_of_scores(64, 4, made=one.changes * 2)[1]
    better = pair_of_scores(64, 3.5, made=one.changes)[1]
    found = weigh(base, [two, one, better], 64, 3)
    assert found.doubts == (better.name, one.name, two.name) and found.gain == pytest.approx(0.35 + 0.2)
    for most, texts, words in (
        (64, 3, "give 12 prompts or more, or have longer answers"),
        (100, 1, "give 3 prompts or more, or have longer answers, and draft 256 blocks or more"),
        (300, 3, "draft 256 blocks or more"),
    ):
        assert weigh(base, [one], most, texts).advice == words
    sure = pair_of_scores(ENOUGH, 1)
    assert weigh(*sure[:1], sure[1:], ENOUGH, 3).gain == pytest.approx(0.1 + 0.2)
    assert weigh(*sure[:1], [pair_of_scores(ENOUGH, -5)[1]], ENOUGH, 3).gain == 0
    assert str(weigh(base, [], 64, 1)) == "64 blocks of 1 answer"


def test_a_pair_of_which_little_was_drafted_is_neither_broken_nor_sound(judged):
    case = judged.make_case("llama", 10, ("taps", "mask"), 100)
    found = judge_texts(case.target, case.drafter, case.texts, masks=case.masks, blocks=FEW - 1)
    assert found.verdict == "unsure" and not found.changes and len(found.evidence.doubts) > 20
    said = str(found)
    assert f"not enough to tell: {FEW - 1} blocks of 8 answers, on which {found.evidence.doubts[0]}" in said
    assert said.endswith("draft 256 blocks or more.")


def test_odd_fields_are_noted():
    target = make_target("llama", num_hidden_layers=8)
    drafter = make_drafter(target, target_layer_ids=[2, 6], num_target_layers=None)
    target.generation_config.eos_token_id = [3, drafter.config.mask_token_id]
    drafter.half()
    said = "\n".join(map(str, findings(target, drafter)))
    for words in ("one more than the usual [1, 5]", "num_target_layers=None", "float16", "is a stop id"):
        assert words in said, said
    target.generation_config.eos_token_id = None
    assert "twice" in str(findings(target, make_drafter(target, target_layer_ids=[3, 3]))[0])
    assert not findings(target, make_drafter(target, rope_parameters=dict(target.config.rope_parameters)))


def test_a_repair_says_it_in_both_places_and_keeps_the_old_one(tmp_path):
    drafter = make_drafter(make_target("llama"))
    drafter.save_pretrained(tmp_path)
    old = (tmp_path / "config.json").read_text()
    copy = repair(tmp_path, {"target_layer_ids": [1, 3], "is_causal": True})
    assert copy.read_text() == old
    again = td.DFlashDraftModel.from_pretrained(tmp_path)
    assert again.config.target_layer_ids == [1, 3] and again.config.is_causal is True
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [1, 3]
    with pytest.raises(FileExistsError, match="move it away"):
        repair(tmp_path, {"is_causal": False})


@pytest.mark.parametrize("block", ["dflash_config", "dspark_config"])
def test_a_repair_is_read_again_where_the_field_stands_within_another(tmp_path, block):
    publish(tmp_path, "specforge_dspark", expected("specforge_dspark"))
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {block: fields.pop("dflash_config") | {"sample_from_anchor": True}}))
    repair(tmp_path, {"sample_from_anchor": False, "target_layer_ids": [1, 3]})
    again = td.load_drafter(tmp_path).config
    assert again.sample_from_anchor is False and again.target_layer_ids == [1, 3]


def test_what_could_not_be_repaired_is_told_before_the_work(monkeypatch, capsys, tmp_path):
    make_drafter(make_target("llama")).save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "load_named", lambda *names, **options: pytest.fail("the pair was loaded"))
    line = ["doctor", "--target", "demo", "--drafter", str(tmp_path), "--fix"]
    (tmp_path / "config.json.before").write_text("{}")
    assert main(line) == 2 and "move it away" in capsys.readouterr().err
    (tmp_path / "config.json.before").unlink()

    def read_only(*given, **options):
        raise OSError(30, "Read-only file system", str(tmp_path))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert main(line) == 2 and "Read-only file system" in capsys.readouterr().err


@pytest.fixture
def shell(judged, tmp_path, monkeypatch):
    """A directory with a drafter whose config is wrong, and the command's words for its pair."""
    case = judged.make_case("llama", 10, ("taps", "mask"), 100)
    case.drafter.save_pretrained(tmp_path / "drafter")
    pair = Loaded(case.target, byte_tokenizer(TEMPLATE), case.drafter)
    monkeypatch.setattr(loading, "load_named", lambda *names, **more: pair)
    monkeypatch.setattr(answers, "answer", lambda *call: case.texts)
    monkeypatch.setattr(answers, "likely_masks", lambda *call: case.masks)
    return case, ["doctor", "--target", "demo", "--drafter", str(tmp_path / "drafter")]


def test_the_command_writes_what_it_found_and_mends_it(shell, tmp_path, capsys):
    case, line = shell
    files = ["--json", str(tmp_path / "it.json"), "--png", str(tmp_path / "it.png")]
    assert main([*line, "--fix", *files]) == 1
    said = capsys.readouterr().out
    assert "the taps are off by one" in said and "the mask id is" in said and "fixed:" in said
    found = json.loads((tmp_path / "it.json").read_text())
    assert found["verdict"] == "broken" and {one["kind"] for one in found["changes"]} == {"taps", "mask"}
    assert found["with_changes"] > found["acceptance_length"] + 1 and len(found["tried"]) > 20
    assert found["evidence"]["blocks"] == 256 and "judged on 256 blocks of 8 answers." in said
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    mended = td.DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    assert judge_texts(case.target, mended, case.texts, masks=case.masks).verdict == "healthy"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--blocks", "0"], "Invalid value for '--blocks': 0 is not in the range"),
        (["--prompts", "/nonexistent.jsonl"], "--prompts /nonexistent.jsonl"),
        (["--png", "/nonexistent/x.png"], "--png /nonexistent/x.png: its folder does not exist"),
        (["--drafter", "demo", "--fix"], "only a directory's config.json can be corrected"),
        (["--drafter", "ngram"], "has no conventions to be judged"),
    ],
)
def test_the_command_refuses_in_one_line(more, words, monkeypatch, capsys):
    pair = Loaded(None, None, td.NGramProposer(4))
    monkeypatch.setattr(loading, "load_named", lambda *names, **options: pair)
    assert main(["doctor", "--target", "demo", "--drafter", "demo", *more]) == 2
    assert words in capsys.readouterr().err


ANSWERS = ["--answers", "answers.jsonl", "--out", "out"]
LINES = [["doctor"], ["train", "evaluate", "--prompts", "gsm8k.jsonl"]]
LINES += [["train", "vocabulary", *ANSWERS], ["train", "fit", *ANSWERS]]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[1] if len(line) > 1 else line[0])
def test_a_drafter_that_is_not_there_is_offered_what_is_taken(line, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(loading.TARGETS, "demo", lambda dtype: (make_target("llama"), None))
    Path("gsm8k.jsonl").write_text('{"prompt": "x"}\n')
    answer = {"messages": [{"role": "user", "content": "x"}], "response": "y", "response_ids": [1, 2]}
    Path("answers.jsonl").write_text(json.dumps(answer) + "\n")
    name = "--start-from" if "fit" in line else "--drafter"
    assert main([*line, "--target", "demo", name, "/nowhere"]) == 2
    said = capsys.readouterr().err
    assert "no such directory; pass a directory, a hub id, or one of demo." in said


@pytest.mark.parametrize(
    ("learned", "kinds"),
    [
        pytest.param((False,), (), id="without", marks=pytest.mark.heavy),
        pytest.param((True,), (), id="with", marks=pytest.mark.heavy),
        pytest.param((False,), ("taps",), id="without, and taps"),
        pytest.param((True, False), (), id="both"),
    ],
)
def test_a_drafter_of_answers_without_thinking_is_told_so(judged, learned, kinds):
    target = make_target("llama", vocab_size=260, max_position_embeddings=512)
    tokenizer = byte_tokenizer(TEMPLATE.replace("{% if terse %}", "{% if enable_thinking %}"))
    drafter = make_drafter(target, mask_token_id=258, rope_parameters=dict(target.config.rope_parameters))
    prompts = ["alpha", "beta", "gamma", "delta"]
    made = [one for one in changes(target, drafter, 60, []) if one.kind in kinds][:1]
    convention = Convention.of(drafter)
    for change in made:
        convention = change.apply(convention)
    texts = []
    for thinking in learned:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        ids = [answers.encode_conversation(tokenizer, turn, {"enable_thinking": thinking}) for turn in turns]
        texts += answers.answer(target, ids, 32)
    judged._teach(target, drafter, texts, convention, 120, torch.Generator().manual_seed(1))
    how = {"template_options": {"enable_thinking": True}, "max_new_tokens": 32, "blocks": 64}
    found = td.diagnose(target, drafter.eval(), tokenizer, prompts, **how)
    wanted = [one.name for one in made] + ["enable_thinking=False"] * (learned == (False,))
    assert sorted(one.name for one in found.changes) == sorted(wanted), str(found)
    assert found.verdict == ("broken" if wanted else "healthy"), str(found)
    assert "enable_thinking=False" in str(found) and found.better >= found.length


def test_the_other_way_of_asking_is_one_that_changes_prompts():
    for condition, then, options, other in (
        ("enable_thinking is not defined or enable_thinking", "!", {}, {"enable_thinking": False}),
        ("enable_thinking", "!", {}, {"enable_thinking": True}),
        ("thinking", "!", {"thinking": True}, {"thinking": False}),
        ("false", "", {}, {}),
        ("enable_thinking is defined", "{{ raise_exception('never') }}", {}, {}),
    ):
        template = "{{ messages[0].content }}{% if " + condition + " %}" + then + "{% endif %}"
        tokenizer = byte_tokenizer(template)

        def ask(options, tokenizer=tokenizer):
            return answers.encoded(tokenizer, ["a"], options)

        assert other_way(ask, options) == other


def test_from_prompts_to_a_diagnosis():
    target = make_target("llama", vocab_size=260, max_position_embeddings=512)
    tokenizer = byte_tokenizer(TEMPLATE.replace("{% if terse %}", "{% if enable_thinking or terse %}"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|mask|>"]})
    drafter = make_drafter(target, mask_token_id=258)
    found = td.diagnose(target, drafter, tokenizer, ["alpha", "beta"], max_new_tokens=24, blocks=32)
    assert found.verdict == "weak" and "enable_thinking" in str(found)
    assert answers.likely_masks(target, tokenizer, []) == [257, 258, 259, 0]
    assert answers.likely_masks(target, tokenizer, [Answered(torch.tensor([0, 258]), 1)]) == [257, 259]
    with refuses(ValueError, "texts: no answer of two tokens"):
        td.diagnose(target, drafter, tokenizer, ["alpha"], max_new_tokens=1)
    with refuses(ValueError, "hidden_size=16 of the drafter"):
        td.diagnose(target, make_drafter(target, hidden_size=16), tokenizer)
    given = (prompt for prompt in ["alpha"])
    with refuses(ValueError, "the tokenizer cannot make ids of them"):  # the doctor asked the tokenizer
        td.diagnose(target, drafter, object(), given)
    for prompts in ("alpha", [], [3], 3):
        with refuses(TypeError, f"prompts={prompts!r}: pass a list of questions"):
            td.diagnose(target, drafter, tokenizer, prompts)
    for other in (None, td.NGramProposer(4)):
        with refuses(TypeError, f"drafter={type(other).__name__}: has no conventions", "DFlashDraftModel"):
            td.diagnose(target, other, tokenizer)
    with refuses(ValueError, "prompts: the tokenizer cannot make ids of them (never)"):
        td.diagnose(target, drafter, byte_tokenizer("{{ raise_exception('never') }}"), ["alpha"])
    target.generation_config.stop_strings = ["\x00" * 40]
    assert answers.answer(target, [[5, 6]], 4, tokenizer)[0].start == 2
