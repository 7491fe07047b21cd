"""Replicas on devices of their own say what one engine says, and exchange nothing with each other."""

import pytest
from support.replicas import Case, run_cases
from support.slices import run_on_four

SHORT = Case("qwen3", "static", 2, 2, "sampled", "v1", rows=3, runtime="eager")
ONE_EACH = [
    Case("qwen3", "paged", 4, 4, "greedy", "v1", rows=6, compiled={"pool_pages": 2}),
    Case("llama", "static", 4, 4, "filters", "dflash2", rows=3),
    Case("gemma2", "static", 4, 4, "greedy", "plain", rows=7, room=2),
    Case("qwen3", "static", 4, 2, "sampled", "v1", room=2),
]
SLICES = [
    Case("gpt_oss", "static", 4, 2, "sampled", "v1", room=2),
    Case("qwen3_moe", "paged", 4, 2, "greedy", "dflash2", rows=7, room=2),
]


def same(case: Case) -> dict:
    (found,) = run_cases([case])
    assert found["replicas"] == [found["one"]] * 2, case
    assert found["threads"] == [found["one"][0]] * 3, case
    assert found["compiled"] == [0, 0]
    assert sum(found["shares"]) == case.rows and max(found["shares"]) < case.rows
    size = case.mesh // case.replicas
    places = [list(range(first, first + size)) for first in range(0, case.mesh, size)]
    assert found["weights"] == found["states"] == places
    assert bool(found["exchanged"]) == (size > 1)
    return found


@pytest.mark.heavy
def test_two_devices_share_rows():
    same(SHORT)


@pytest.mark.heavy
@pytest.mark.parametrize("case", ONE_EACH[:3], ids=lambda case: f"{case.family}-{case.cache}")
def test_devices_share_rows_of_any_family(case):
    """Families that are not decoded on slices, too, are on one device each. Steps are traced once for all."""
    found = same(case)
    assert found["traced"][1] == found["traced"][0] > 0


@pytest.mark.heavy
@pytest.mark.parametrize("case", [*SLICES, ONE_EACH[3]], ids=lambda case: f"{case.family}-{case.cache}")
def test_slices_share_rows(case):
    same(case)


@pytest.mark.heavy
def test_replicas_on_one_device_are_noticed():
    with pytest.raises(AssertionError):
        same(SHORT._replace(break_by="one device"))


LOADED = """
import torch, torch_dflash as td, jax, jax_bridge as jb
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("qwen3", "2x2", "v1")
target.save_pretrained("FOLDER")
options = {"max_length": 64, "prefill_chunk_size": 32, "rounds_per_chunk": 2, "filters": False}
asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
wanted = td.generate(target, drafter, *prompts(), runtime="eager", **asked)
for loaded_on, mesh, replicas in ((None, 2, 2), (2, 4, 2)):
    loaded = jb.load("FOLDER", mesh=loaded_on)
    front = td.compile(loaded, drafter, mesh=mesh, replicas=replicas, **options)
    assert torch.equal(front.generate(*prompts(), **asked), wanted), mesh
    first, second = (engine._params() for engine in front.engines)
    for name, leaf in loaded.arrays.items():
        assert first["target.model." + name] is leaf, name  # not copied
        copied = jax.tree.leaves(second["target.model." + name])
        devices = {one.id for part in copied for one in part.devices()}
        assert devices == set(range(mesh // 2, mesh)), (name, devices)
    again = front.engines[1]._params()
    assert all(again[name] is leaf for name, leaf in second.items())  # and once
try:
    td.compile(jb.load("FOLDER", mesh=4), drafter, mesh=4, replicas=2, **options)
except ValueError as error:
    assert "4 devices" in str(error) and "first replica" in str(error), error
    print("checked")
"""
STATES = """
import torch, torch_dflash as td
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("qwen3", "2x2", "v1")
fixed = {"max_length": 64, "batch_size": 3, "prefill_chunk_size": 32, "rounds_per_chunk": 2}
asked = {"max_new_tokens": 20, "do_sample": True, "seed": 3, "top_k": 0, "eos_token_id": None}
wanted = td.compile(target, drafter, **fixed).generate(*prompts(), **asked)
eager = td.compile(target, drafter, runtime="eager", **fixed)
front = td.compile(target, drafter, mesh=4, replicas=REPLICAS, **fixed)
def finish(engine, state):
    while not bool(torch.tensor(engine.runtime.fetch(state.done)).all()):
        state = engine.advance(state)
    return engine.runtime.fetch(state.tokens)
def check(tokens):
    for row, (ids, mask) in enumerate(zip(*prompts())):
        length = int(mask.sum()) + 20
        assert tokens[row, :length].tolist() == wanted[row, -length:].tolist(), row
where = []
for _ in range(2):
    state = front.start(*prompts(), **asked)
    where.append(state.tokens.devices())
    state = front.advance(state)
    assert state.tokens.devices() == where[-1]  # it goes on where it lies
    td.save_state(state, "FILE", front)
    check(finish(front, state))
assert not where[0] & where[1], where
check(finish(eager, td.load_state("FILE", eager)))
placed = [td.load_state("FILE", front) for _ in range(2)]
assert not placed[0].tokens.devices() & placed[1].tokens.devices()
check(finish(front, placed[1]))
check(finish(front.engines[0], front.engines[1].advance(placed[0])))  # from one replica to another
eager_state = eager.advance(eager.start(*prompts(), **asked))
td.save_state(eager_state, "FILE", eager)
check(finish(front, td.load_state("FILE", front)))
print("checked")
"""


@pytest.mark.heavy
def test_what_was_loaded_is_copied_to_the_other_replicas(tmp_path):
    assert run_on_four(["-c", LOADED.replace("FOLDER", str(tmp_path))]).strip().endswith("checked")


@pytest.mark.heavy
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_state_goes_on_in_any_replica(tmp_path, replicas):
    code = STATES.replace("FILE", str(tmp_path / "state")).replace("REPLICAS", str(replicas))
    assert run_on_four(["-c", code]).strip().endswith("checked")


ARITHMETIC = """
import torch, torch_dflash as td
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("llama", "2x2", "v1")
target, drafter = target.DTYPE(), drafter.DTYPE()
options = {"max_length": 64, "batch_size": 2, "prefill_chunk_size": 32, "rounds_per_chunk": 2}
asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
front = td.compile(target, drafter, mesh=2, replicas=2, GIVEN, **options)
wanted = [engine.generate(*(part[:2] for part in prompts()), **asked) for engine in front.engines]
plain = td.compile(target, drafter, GIVEN, **options).generate(*(part[:2] for part in prompts()), **asked)
assert torch.equal(wanted[0], plain) and torch.equal(wanted[1], plain)
assert torch.equal(front.generate(*(part[:2] for part in prompts()), **asked), plain)
print("checked")
"""


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("dtype", "given"),
    [("float", "quantize='int8'"), ("bfloat16", "quantize='int8'"), ("float", "compute='bfloat16'")]
    + [("bfloat16", "compute='auto'")],
)
def test_every_arithmetic_is_the_one_of_the_first_device(dtype, given):
    code = ARITHMETIC.replace("DTYPE", dtype).replace("GIVEN", given)
    assert run_on_four(["-c", code]).strip().endswith("checked")


RULES = """
import torch, torch_dflash as td
from support.slices import prompts
from support.tiny import correlate, make_drafter, make_target
from support.tokenizers import byte_tokenizer
target = make_target("llama", vocab_size=288, max_position_embeddings=128, eos_token_id=0, pad_token_id=0)
drafter, tokenizer = make_drafter(target), byte_tokenizer()
correlate(target, drafter, 6.0)
def never(tokens, length, logits):
    return logits.index_fill(2, torch.tensor([7, 18, 200], device=logits.device), -torch.inf)
table = td.processors.GrammarTable(states=32, classes=32, vocab_size=288)
kinds = ("repetition_penalty", "suppress_tokens", "grammar", table, td.BlockProcessor(never))
fixed = {"max_length": 96, "prefill_chunk_size": 32, "rounds_per_chunk": 2, "processors": kinds}
eager = td.compile(target, drafter, runtime="eager", batch_size=3, **fixed)
front = td.compile(target, drafter, mesh=2, replicas=2, batch_size=2, **fixed)
numbers = td.Grammar.regex("([0-9]{1,3}|ab)(-([0-9]{1,3}|ab)){5,}", tokenizer)
date = td.Grammar.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}", tokenizer, device=True)
asked = {"max_new_tokens": 24, "do_sample": True, "temperature": 3.0, "top_k": 0, "seed": 5}
ruled = asked | {"repetition_penalty": 1.2, "grammar": [numbers, date, None]}
none_left = asked | {"grammar": [None, None, numbers], "suppress_tokens": tokenizer.encode("0123456789a")}
assert torch.equal(front.generate(*prompts(), **ruled), eager.generate(*prompts(), **ruled))
for engine in (eager, front):
    try:
        engine.generate(*prompts(), **none_left)
    except ValueError as error:
        assert "row 2: token" in str(error), error
    else:
        raise AssertionError("a row outside of its grammar")
assert torch.equal(front.generate(*prompts(), **ruled), eager.generate(*prompts(), **ruled))
print("checked")
"""


@pytest.mark.heavy
def test_grammars_penalties_and_processors_are_each_rows_own_on_any_replica():
    assert run_on_four(["-c", RULES]).strip().endswith("checked")


LINES = """
import json, sys, io, contextlib, pathlib
from support.tiny import make_drafter, make_target
from support.tokenizers import TEMPLATE, byte_tokenizer
from torch_dflash.cli import main
folder = pathlib.Path("FOLDER")
target = make_target("qwen3", vocab_size=257, max_position_embeddings=128, eos_token_id=0, pad_token_id=0)
target.save_pretrained(folder / "target")
byte_tokenizer(TEMPLATE).save_pretrained(folder / "target")
make_drafter(target).save_pretrained(folder / "drafter")
lines = [{"prompt": "x" * (1 + 3 * at % 7)} for at in range(7)]
(folder / "lines").write_text("".join(json.dumps(line) + chr(10) for line in lines))
pair = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
said = []
for more in (["--runtime", "eager"], ["--mesh", "4", "--replicas", "4"]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(
            ["generate", *pair, "--jsonl", "--file", str(folder / "lines"), "--batch-size", "1"]
            + ["--max-new-tokens", "9", "--temperature", "3", "--seed", "4", *more]
        ) == 0
    said.append([json.loads(line) for line in out.getvalue().splitlines()])
for line in [*said[0], *said[1]]:
    del line["seconds"]
assert said[0] == said[1] and len(said[0]) == 7, said
wrong = ["--jsonl", "--file", str(folder / "lines"), "--mesh", "4", "--replicas", "3"]
assert main(["generate", *pair, *wrong]) == 2
print("checked")
"""


@pytest.mark.heavy
def test_lines_are_shared_by_replicas(tmp_path):
    assert run_on_four(["-c", LINES.replace("FOLDER", str(tmp_path))]).strip().endswith("checked")
