"""Options that are wrong in a way that shows late: out of a machine's range, without effect, or unbound."""

import copy

import numpy as np
import pytest
import torch
from support import refusals, tiny
from support.refusals import IDS, no_step_runs  # noqa: F401 - an autouse fixture
from transformers import GenerationConfig

import torch_dflash as td


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair()


def refuses(*words, error=ValueError):
    return refusals.refuses(error, *words)


def generate(target, drafter, ids=IDS, mask=None, **options):
    return td.generate(target, drafter, ids, mask, **({"max_new_tokens": 2, "runtime": "eager"} | options))


def test_the_guard_itself_fails_a_good_call(pair):
    with pytest.raises(pytest.fail.Exception, match="a step ran"):
        generate(*pair)


RANGES = [
    ({"eos_token_id": 2**40}, [f"eos_token_id holds {2**40}", "int32", "None to never stop"]),
    ({"eos_token_id": [1, 2**31]}, [f"eos_token_id holds {2**31}", str(2**31 - 1), "None to never stop"]),
    ({"eos_token_id": [[1, 2**31]]}, [f"eos_token_id holds {2**31}", "int32"]),
    ({"eos_token_id": [[1, [2]]]}, ["eos_token_id holds [2]", "None or []"]),
    ({"top_k": 2**40, "do_sample": True}, [f"top_k={2**40}", "int32", "pass 0"]),
    ({"top_k": [2**31], "do_sample": True}, [f"top_k={2**31}", str(2**31 - 1)]),
    ({"seed": 2**64}, [f"seed={2**64}", "[-2**63, 2**64)", "modulo"]),
    ({"seed": -(2**63) - 1}, [f"seed={-(2**63) - 1}", "[-2**63, 2**64)"]),
    ({"seed": [2**200]}, [f"seed={2**200}", "[-2**63, 2**64)"]),
    ({"seed": True}, ["seed=True", "integer"]),
    ({"seed": torch.tensor(1.5)}, ["seed=1.5", "integer"]),
    ({"seed": np.array([1, 2])}, ["seed has 2 entries", "one per row"]),
    ({"seed": [np.float64(1)]}, ["seed=np.float64(1.0)", "integer"]),
]


@pytest.mark.parametrize(("given", "words"), RANGES, ids=lambda value: None)
def test_numbers_beyond_their_range(pair, given, words):
    with refuses(*words):
        generate(*pair, **given)


def test_a_model_that_torch_compile_wrapped(pair):
    wrapped = torch.compile(pair[0], backend="eager")
    for entry in (generate, td.compile):
        with refuses("target=", "torch.compile", "original module", "target._orig_mod", error=TypeError):
            entry(wrapped, pair[1], runtime="eager")


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_a_model_in_a_wrapper_is_asked_for(pair, wrap):
    wrapped = wrap(pair[0])
    for entry in (generate, td.compile):
        with refuses(f"target={wrap.__name__}", "target.module", error=TypeError):
            entry(wrapped, pair[1], runtime="eager")
    td.compile(wrapped.module, None, runtime="eager", max_length=64)


def test_max_length_below_the_prompt(pair):
    target = copy.deepcopy(pair[0])
    words = ["max_length=3", "prompt's 4 columns", "max_new_tokens", "at least 5"]
    with refuses(*words):
        generate(*pair, max_new_tokens=None, max_length=3)
    with refuses(*words):
        generate(*pair, max_new_tokens=None, generation_config=GenerationConfig(max_length=3))
    with refuses("max_length='9'", "integer"):
        generate(*pair, max_new_tokens=None, max_length="9")
    target.generation_config.max_length = 3
    with refuses(*words):
        generate(target, pair[1], max_new_tokens=None)
    # transformers checks first where it is the door; a caller of its own is answered by us.
    with refuses(*words):
        td.dflash(pair[1], runtime="eager")(target, IDS, generation_config=target.generation_config)


def test_the_pad_token_inside_a_prompt(pair):
    words = ["row 0", "pad_token_id=5", "inside its prompt", "pass attention_mask explicitly"]
    with refuses(*words):
        generate(*pair, pad_token_id=5)
    with refuses(*words):  # transformers makes the mask
        block = td.dflash(pair[1], runtime="eager")
        pair[0].generate(IDS, pad_token_id=5, max_new_tokens=2, custom_generate=block)
    with refuses("row 0", "pad_token_id=5", "empty prompt", "pass attention_mask explicitly"):
        generate(*pair, torch.full_like(IDS, 5), pad_token_id=5)
    with refuses("attention_mask of row 0 has a gap"):  # not only the pad token: the mask is wrong
        generate(*pair, IDS, torch.tensor([[1, 0, 0, 1]]), pad_token_id=5)
    with pytest.raises(pytest.fail.Exception, match="a step ran"):  # what the message advises
        generate(*pair, IDS, torch.ones_like(IDS), pad_token_id=5)


def test_dflash_refuses_what_it_binds_when_it_is_made(pair):
    for bound, words in {
        ("runtime", "xlaa"): ["runtime='xlaa'", "'xla', 'eager'"],
        ("block_size", 2.5): ["block_size=2.5", "integer"],
        ("verify_width", 0): ["verify_width=0", "at least 1"],
        ("rounds_per_chunk", 0): ["rounds_per_chunk=0", "at least 1"],
        ("cache", "page"): ["cache='page'", "'static', 'paged'"],
    }.items():
        with refuses(*words):
            td.dflash(pair[1], **dict([bound]))


@pytest.mark.parametrize(("name", "verb"), [("block_size", "draft"), ("verify_width", "verify")])
def test_widths_without_a_drafter(pair, name, verb):
    words = [f"{name}=2 without a drafter", f"nothing to {verb}", f"leave {name} unset"]
    for entry in (generate, td.compile):
        with refuses(*words):
            entry(pair[0], None, runtime="eager", **{name: 2})
    with refuses(*words):
        td.dflash(None, **{name: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 10**9}, "batch_size=1000000000"),
        ({"stop_slots": 10**10}, "stop_slots=10000000000"),
        ({"cache": "paged", "pool_pages": 10**12}, "pool_pages=1000000000000"),
        ({"cache": "paged", "page_size": 16 * 10**12}, "page_size=16000000000000"),
        ({"filters": "no"}, "filters='no'"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(options, words):
    with pytest.raises(ValueError, match=words):
        td.compile(tiny.make_pair()[0], None, runtime="eager", max_length=64, **options)


def test_an_option_that_compile_does_not_know_is_named():
    with pytest.raises(TypeError, match="unknown option 'foo'"):
        td.compile(tiny.make_pair()[0], None, foo=1)


@pytest.mark.parametrize("given", [(2.5,), ("4",), (4, "x"), (4, 10**9), (1,), (10**9,), (True,)])
def test_lookup_of_absurd_sizes_is_refused(given):
    with pytest.raises(ValueError, match="must be an integer from"):
        td.NGramProposer(*given)


def test_an_engine_without_a_length_has_the_targets_context():
    target = tiny.make_target("llama", num_hidden_layers=1, max_position_embeddings=96)
    for context, length in ((96, 96), (4096, 1024)):
        target.config.max_position_embeddings = context
        assert td.compile(target, None, runtime="eager").plan.capacity == length
