"""``torch-dflash selftest`` passes on a sound package, and names the check that a broken one fails."""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import jax
import pytest
import torch

import torch_dflash.decode
import torch_dflash.proposers.dflash.proposer as dflash
from jax_bridge.runtime import XlaRuntime
from jax_bridge.selftest import XlaBackend, reference_hidden
from torch_dflash.cli import main
from torch_dflash.eager import EagerRuntime
from torch_dflash.ops import block_attention
from torch_dflash.runtime import Rounds
from torch_dflash.selftest import losslessness as texts
from torch_dflash.selftest import timing
from torch_dflash.selftest.backend import Case, EagerBackend
from torch_dflash.selftest.costs import hidden_costs
from torch_dflash.selftest.parity import parity
from torch_dflash.selftest.report import FAIL, NOT_APPLICABLE, NOT_RUN, PASS, Report, within


def statuses(checks):
    return {check.name: check.status for check in checks}


def selftest(*options):
    return main(["selftest", *options])


@pytest.fixture(scope="module")
def on_xla(tmp_path_factory):
    """One run on XLA: exit status, stdout, stderr, the written JSON, and the pair with compiled programs."""
    file, cases = tmp_path_factory.mktemp("xla") / "found.json", []

    def kept(backend, family):
        cases.append(Case(backend, family))
        return cases[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr("torch_dflash.selftest.backend.Case", kept)
        with redirect_stderr(StringIO()) as err:
            status = selftest("--quick", "--json", str(file))
    (case,) = cases
    return status, out.getvalue(), err.getvalue(), json.loads(file.read_text()), case


@pytest.mark.slow
def test_xla_passes_and_says_where_it_ran(on_xla):
    status, out, err, found, _ = on_xla
    assert status == 0
    assert found["passed"] and found["runtime"] == "xla" and found["timings"] == []
    seen = {check["name"]: check for check in found["checks"]}
    assert {check["status"] for check in found["checks"]} == {PASS, NOT_APPLICABLE}
    assert [name for name, check in seen.items() if check["status"] == NOT_APPLICABLE] == ["timings"]
    assert seen["no compilation after warm-up"]["figures"] == {"compilations": 0}
    assert "bytes aliased" in seen["donated buffers are reused"]["detail"]
    agreeing = seen["qwen3, greedy = target.generate: agreeing drafter, 3 ragged rows"]
    assert 1 < agreeing["figures"]["acceptance_length"] < 6
    for name, check in seen.items():
        assert name in out and check["detail"] in out
    assert found["device"] in out and found["provenance"]["packages"]["jax"] in out
    assert err == ""


@pytest.mark.slow
def test_eager_passes_with_timings(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "REPEATS", 2)
    file = tmp_path / "found.json"
    assert selftest("--runtime", "eager", "--size", "tiny", "--json", str(file)) == 0
    out = capsys.readouterr().out
    found = json.loads(file.read_text())
    names = {check["name"] for check in found["checks"]}
    assert "qwen3, sampled = plain: n-gram, batch 1" in names and len(names) == len(found["checks"])
    passes = [row["pass"] for row in found["timings"]]
    verified = [*(f"verify, M={rows}" for rows in (2, 4, 8, 16)), "verify, M=16, paged"]
    assert passes == ["plain step, M=1", *verified, "draft, W=16", "whole round, W=M=16"]
    for row in found["timings"]:
        assert 0 < row["fastest_ms"] <= row["ms"] <= row["slowest_ms"] and row["pass"] in out
        assert row["gb_per_s"] == pytest.approx(row["bytes_read"] / row["ms"] / 1e6)
    plain, *_, draft, whole = found["timings"]
    assert plain["plain_steps"] == 1 and whole["bytes_read"] == plain["bytes_read"] + draft["bytes_read"]


def test_a_broken_acceptance_rule_fails_by_name(capsys, monkeypatch):
    honest = torch_dflash.decode.accept_chain

    def generous(draft, target):
        target = target.clone()
        target[:, :-1][:, :1] = draft.tokens[:, : target.shape[1] - 1][:, :1]
        return honest(draft, target)

    monkeypatch.setattr(torch_dflash.decode, "accept_chain", generous)
    assert selftest("--quick", "--runtime", "eager") == 1
    verdict = next(line for line in capsys.readouterr().out.splitlines() if "checks passed" in line)
    assert "qwen3, greedy = target.generate: random drafter, 3 ragged rows" in verdict
    assert "generate: plain" not in verdict and "after prefill" not in verdict  # both are right


@pytest.fixture(scope="module")
def eager():
    return Case(EagerBackend(), "qwen3")


def test_a_broken_mask_fails_parity_alone(eager, monkeypatch):
    visible = block_attention.visible

    def causal(block, other, window, _):
        return visible(block, other, window, True)

    monkeypatch.setattr(block_attention, "visible", causal)
    found = statuses(parity(eager, eager.backend, reference_hidden))
    for when in ("prefill", "rounds"):
        assert found[f"target logits, qwen3, after {when}"] == PASS
        assert found[f"drafter hidden states, qwen3, after {when}"] == FAIL
        assert found[f"drafter hidden states, qwen3, after {when}, pure JAX"] == FAIL
    assert set(statuses(texts.lossless(eager, single=False)).values()) == {PASS}  # it costs speed, not text


def test_a_drafter_that_is_never_accepted_shows_nothing(eager, monkeypatch):
    monkeypatch.setattr(dflash.DFlashProposer, "propose", _silent)
    found = {check.name: check for check in texts.lossless(eager, single=False)}
    check = found["qwen3, greedy = target.generate: agreeing drafter, 3 ragged rows"]
    assert check.status == FAIL and "acceptance never varied" in check.detail


def _silent(self, pstate, anchor, length, embed, head, asked, propose=dflash.DFlashProposer.propose):
    draft, pstate = propose(self, pstate, anchor, length, embed, head, asked)
    return type(draft)(draft.tokens, draft.valid * 0), pstate


def test_a_round_too_few_per_read_fails(eager, monkeypatch):
    assert statuses(hidden_costs(eager, eager.backend))["one host read a chunk"] == PASS
    advance = EagerRuntime.advance

    def hasty(self, params, state, turn):
        return advance(self, params, state, Rounds(turn.width, 1))

    monkeypatch.setattr(EagerRuntime, "advance", hasty)
    assert statuses(hidden_costs(eager, eager.backend))["one host read a chunk"] == FAIL


@pytest.mark.slow
def test_a_second_read_a_recompilation_and_a_copied_buffer_fail_on_xla(on_xla, monkeypatch):
    case = on_xla[-1]
    backend, engine = case.backend, case.engine("agreeing", 3)
    read, chunk, advance = XlaRuntime.read, XlaRuntime._chunk, XlaRuntime.advance

    def twice(self, *args):
        read(self, *args)
        return read(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(XlaRuntime, "read", twice)
        assert statuses(hidden_costs(case, backend))["one host read a chunk"] == FAIL

    def kept(self, *args):
        return *chunk(self, *args)[:3], ()  # the output reveals nothing

    def compiling(self, params, state, turn=None):
        jax.jit(lambda array: array * 3)(state.length)  # another function every time
        return advance(self, params, state, turn)

    with monkeypatch.context() as patch:
        programs = engine.runtime._programs
        key = next(key for key in programs._compiled if key[0] == "rounds")
        del programs._compiled[key], programs._started[key]
        patch.setattr(XlaRuntime, "_chunk", kept)
        found = statuses(hidden_costs(case, backend))
        assert found["donated buffers are reused"] == FAIL and found["one host read a chunk"] == PASS
    with monkeypatch.context() as patch:
        patch.setattr(XlaRuntime, "advance", compiling)
        patch.setattr("torch_dflash.selftest.costs.REQUESTS", [([1], {"max_new_tokens": 3})])
        assert statuses(hidden_costs(case, backend))["no compilation after warm-up"] == FAIL


def test_what_cannot_run_says_why_and_fails(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_bridge.selftest", None)
    monkeypatch.setattr(texts, "lossless", lambda *args: 1 / 0)
    assert selftest("--quick", "--runtime", "eager") == 1
    lines = capsys.readouterr().out.splitlines()
    assert (
        [line for line in lines if line.startswith(NOT_RUN)][0].split("JAX: ")[1].startswith("ModuleNotFound")
    )
    broken = next(line for line in lines if line.startswith(FAIL))
    assert "texts, qwen3" in broken and "ZeroDivisionError" in broken
    assert any(
        line.startswith(PASS) and "one host read a chunk" in line for line in lines
    )  # the other checks run
    assert selftest("--quick") == 2  # no JAX at all
    assert "--runtime xla" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, words",
    [
        (["--runtime", "eager", "--device", "nowhere"], ["--device nowhere"]),
        (["--device", "cuda"], ["--device cuda", "--runtime eager"]),
        (["--quick", "--size", "tiny"], ["--size tiny with --quick", "leave one"]),
        (["--json", "/no/such/folder/x.json"], ["--json /no/such/folder/x.json", "make it first"]),
    ],
)
def test_wrong_usage_is_one_line(capsys, options, words):
    assert selftest(*options) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert all(word in err for word in words)


def test_a_report_passes_only_when_everything_ran():
    lines = []
    report = Report(lines.append)
    report.attempt("fine", lambda: [within("fine", 1e-6, 1e-5)])
    assert report.passed and lines[0].startswith(PASS)
    report.add(within("not a number", float("nan"), 1e-5))
    assert not report.passed and report.failures() == ["not a number"]


def test_only_a_tie_excuses_another_token(eager, monkeypatch):
    prompt, wanted = texts.prompts()[0], texts.own_texts(eager)["greedy"][0]
    other = wanted[:4] + [(wanted[4] + 1) % 96] + wanted[5:]
    assert texts._difference(eager, prompt, wanted, list(wanted), None) == (None, None)
    for seed in (None, 5):
        assert texts._difference(eager, prompt, wanted, other, seed) == (4, None)
    assert texts._difference(eager, prompt, wanted, wanted[:-1], None) == (len(wanted) - 1, None)
    monkeypatch.setattr(texts, "TOLERANCE", 10.0)
    at, gap = texts._difference(eager, prompt, wanted, other, None)
    assert at == 4 and gap > 0


def test_a_timed_round_does_what_its_name_says():
    """A verify round commits one token; a draft pass advances the drafter, and never the target's cache."""
    backend = EagerBackend()
    size = timing.SIZES["tiny"]
    target = timing.make_target("qwen3", **size.target)
    drafter = timing.make_drafter(target, **size.drafter)
    prompt, options = torch.ones(1, 9, dtype=torch.long), {"max_new_tokens": 20, "eos_token_id": None}
    for drafts, step in ((timing.Unaccepted(8), timing.decode_round), (drafter, timing.draft_pass)):
        engine = timing._engine(backend, target, drafts, size)
        state = engine.start(prompt, do_sample=False, **options)
        before = [layer.key.clone() for layer in state.cache]
        state = backend.repeat(engine, step, 5)(engine.tensors(), state)
        assert state.length.tolist() == [14]
        moved = [not torch.equal(old, layer.key) for old, layer in zip(before, state.cache, strict=True)]
        assert set(moved) == {step is timing.decode_round}
        if step is timing.draft_pass:
            assert state.proposer.committed.tolist() == [14]


def test_where_flatness_ends():
    costs = {2: 1.0, 4: 1.05, 8: 1.3, 16: 1.0}
    rows = [{"pass": f"verify, M={width}", "plain_steps": cost} for width, cost in costs.items()]
    wide = [row | {"arithmetic": "bfloat16"} for row in rows]
    dear = [row | {"arithmetic": "float32", "plain_steps": 2.0} for row in rows]
    assert timing.flat_rows(dear + wide) == {"float32": 1, "bfloat16": 4}


@pytest.mark.slow
def test_narrow_products_have_lines_of_their_own(monkeypatch):
    monkeypatch.setattr(timing, "REPEATS", 1)
    monkeypatch.setattr(timing, "VERIFY_WIDTHS", (2,))
    rows = list(timing.measure(XlaBackend(), "tiny"))
    passes = [
        (row["arithmetic"], row["pass"]) for row in rows if row["pass"] in ("verify, M=2", "draft, W=16")
    ]
    assert passes == [
        ("float32", "verify, M=2"),
        ("float32", "draft, W=16"),
        ("bfloat16", "verify, M=2"),
        ("int8", "verify, M=2"),
    ]
    exact, half, quarter = (row for row in rows if row["pass"] == "verify, M=2")
    weights = 2 * (exact["bytes_read"] - half["bytes_read"])
    assert exact["bytes_read"] - quarter["bytes_read"] == weights * 3 // 4 > 0
