"""`generate` keeps engines between calls: equal calls share one, and few are kept."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from support.scripted import own_text, pad
from support.tiny import VOCAB, make_target, small_pair
from transformers import LlamaForCausalLM

import torch_dflash as td
from torch_dflash import generation
from torch_dflash.engine import registry as engine_cache
from torch_dflash.requests.options import round_up

NEW = 6
PROMPT = [3, 1, 4, 1, 5, 9, 2]
DRAFTERS = ("dflash", "ngram", "plain")


@pytest.fixture(scope="module", params=["eager", "xla"])
def runtime(request):
    return request.param


@pytest.fixture(scope="module")
def pair():
    return small_pair("llama", agree=6.0)


@pytest.fixture
def used(monkeypatch):
    engines, whole = [], generation.cached_engine
    noted = lambda *a, **k: engines.append(whole(*a, **k)) or engines[-1]  # noqa: E731
    monkeypatch.setattr(generation, "cached_engine", noted)
    return engines


def proposer(kind, drafter):
    return {"dflash": drafter, "ngram": td.NGramProposer(6), "plain": None}[kind]


def say(target, drafter, prompts=(PROMPT,), new=NEW, **options):
    ids, mask = pad([list(prompt) for prompt in prompts])
    options = {"eos_token_id": None, "do_sample": False} | options
    return td.generate(target, drafter, ids, mask, max_new_tokens=new, **options)[:, ids.shape[1] :].tolist()


def test_batch_sizes_share_an_engine_on_xla_alone(pair, used, runtime):
    rows = [PROMPT[:n] for n in (7, 3, 5, 6)]
    own = [own_text(pair[0], row, NEW) for row in rows]
    compiled = []
    for count in (3, 4):
        ids, mask = pad(rows[:count])
        options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
        out = td.generate(*pair, ids, mask, runtime=runtime, eos_token_id=None, **options)
        assert out.sequences[:, ids.shape[1] :].tolist() == own[:count]
        compiled.append(out.stats.compilations)
    assert [engine.plan.batch_size for engine in used] == ([4, 4] if runtime == "xla" else [3, 4])
    assert (used[0] is used[1]) == (runtime == "xla")
    assert (compiled[0] > 0) == (runtime == "xla") and compiled[1] == 0


def test_near_lengths_share_an_engine(pair, used):
    target = pair[0]
    for length, new in ((1, 2), (40, 24), (100, 29), (200, 56), (201, 56)):
        prompt = [(7 * i + length) % VOCAB for i in range(length)]
        assert say(*pair, [prompt], new, runtime="eager") == [own_text(target, prompt, new)]
    assert [engine.plan.capacity for engine in used] == [256, 256, 256, 256, 512]
    assert len(set(map(id, used))) == 2


def test_a_growing_chat_doubles_its_engine():
    """Sizes double to 2,048 positions, then four sizes an octave follow, never past the model's context."""
    ends = range(1, 32769)
    rooms = [round_up(end, 32768) for end in ends]
    assert all(room >= end for end, room in zip(ends, rooms, strict=True))
    sizes = sorted(set(rooms))
    assert sizes[:8] == [256, 512, 1024, 2048, 2560, 3072, 3584, 4096] and sizes[-1] == 32768
    assert len(sizes) == 20 <= engine_cache.ENGINES_PER_PAIR  # a long chat drops none of its engines
    assert all(room <= end + end // 4 for end, room in zip(ends[2048:], rooms[2048:], strict=True))
    assert [round_up(end, 300) for end in (5, 257, 300)] == [256, 300, 300]
    assert [round_up(end, 3000) for end in (2049, 2561, 3000)] == [2560, 3000, 3000]


def test_the_third_turn_of_a_chat_compiles_nothing(pair):
    """Chats of 37, 90 and 138 positions share an engine; only a longer prompt's bucket compiles."""
    compiled = []
    for length in (37, 60, 90):
        ids = torch.arange(length)[None] % VOCAB
        options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
        compiled.append(td.generate(*pair, ids, eos_token_id=None, **options).stats.compilations)
    assert compiled[0] > 0 and compiled[1] == 0 and compiled[2] <= 1


def test_the_engine_used_longest_ago_goes(pair, used, monkeypatch):
    monkeypatch.setattr(engine_cache, "ENGINES_PER_PAIR", 2)
    calls = [(5, 1), (5, 2), (5, 1), (5, 3), (5, 1), (5, 2)]  # 3 rows take the place of 2, not of 1
    own = own_text(pair[0], PROMPT[:5], 3)
    for length, rows in calls:
        assert say(*pair, [PROMPT[:length]] * rows, 3, runtime="eager", block_size=4) == [own] * rows
    one, two, again, _, once_more, new_two = used
    assert one is again is once_more
    assert new_two is not two and new_two.plan == two.plan
    say(pair[0], td.NGramProposer(5), runtime="eager")  # another pair has its own
    say(*pair, [PROMPT[:5]], 3, runtime="eager", block_size=4)
    assert used[-1] is one


def test_proposers_without_weights_are_known_by_value(pair, used):
    target = pair[0]
    own = [own_text(target, PROMPT, NEW)]
    make = td.NGramProposer
    for drafter in (make(6), make(6), make(7), make(6, 2), None, make(6)):
        assert say(target, drafter, runtime="eager") == own
    assert used[0] is used[1] is used[5]
    assert len(set(map(id, used))) == 4
    assert [engine.plan.block_size for engine in used] == [6, 6, 7, 6, 1, 6]


class Keyed(td.Proposer):  # drafts the anchor again; ``token``, if any, is a buffer of its own
    name, width = "keyed", 4

    def __init__(self, key, token=None):
        super().__init__()
        self.key = key
        if token is not None:
            self.register_buffer("token", torch.tensor(token, dtype=torch.int32))

    def propose(self, pstate, anchor, length, embed, head):
        drafts = anchor if getattr(self, "token", None) is None else self.token.expand(len(anchor))
        return td.Draft(drafts[:, None].expand(-1, self.width - 1), length * 0 + self.width - 1), pstate


class Other(Keyed):
    width = 3


@pytest.mark.parametrize(
    "make", [Keyed, lambda at: td.NGramProposer(4 + at), lambda at: type("New", (Keyed,), {})(1)]
)
def test_engines_of_ever_new_keys_are_bounded(used, monkeypatch, make):
    monkeypatch.setattr(engine_cache, "ENGINES_PER_PAIR", 3)
    target = make_target("llama")
    for at in range(6):
        say(target, make(at), runtime="eager", new=1)
    say(target, None, runtime="eager", new=1)  # plain decoding has its own limit
    kept = [engine for entries in engine_cache._engines[target].values() for engine in entries.values()]
    assert kept == [*used[3:6], used[6]]
    known = weakref.ref(used[0])
    used.clear()
    gc.collect()
    assert known() is None


def test_proposers_of_equal_keys_share_engines_unless_they_hold_tensors(pair, used):
    target, own = pair[0], own_text(pair[0], PROMPT, NEW)

    def drafted(drafter):
        options = {"max_new_tokens": NEW, "runtime": "eager", "do_sample": False, "eos_token_id": None}
        out = td.generate(target, drafter, torch.tensor([PROMPT]), **options, return_dict_in_generate=True)
        assert out.sequences[0, len(PROMPT) :].tolist() == own
        return out.stats.acceptance_lengths

    drafted(Keyed("a")), drafted(Keyed("a")), drafted(Other("a"))
    assert used[0] is used[1] and used[2] is not used[0] and used[2].plan.block_size == 3
    first, second = Keyed("b", (own[0] + 1) % VOCAB), Keyed("b", own[1])
    assert drafted(first) != drafted(second)  # each drafts by its own buffer
    del first
    gc.collect()
    drafted(second)
    assert used[-1] is used[-2]


def test_a_row_that_ends_early_is_padded(pair, monkeypatch):
    target = pair[0]
    rows = [PROMPT, PROMPT[:4]]
    budgets = {"new": [2, NEW], "runtime": "eager"}
    own = [own_text(target, rows[0], 2), own_text(target, rows[1], NEW)]
    unused = next(i for i in range(1, VOCAB) if i not in own[0] + own[1])
    for pad_id, options in (
        (0, {}),
        (unused, {"eos_token_id": [unused, unused + 1]}),
        (unused, {"eos_token_id": unused}),
        (5, {"eos_token_id": unused, "pad_token_id": 5}),
        (0, {"eos_token_id": unused, "pad_token_id": 0}),
    ):
        first, second = say(target, None, rows, **(budgets | options))
        assert first == own[0] + [pad_id] * (NEW - 2) and second == own[1]
    monkeypatch.setattr(target.generation_config, "pad_token_id", 8)
    assert say(target, None, rows, **budgets)[0][2:] == [8] * (NEW - 2)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_grad_and_inference_mode_change_nothing(runtime, kind):
    """The engine is first built and compiled in inference mode, then used outside of it, and back."""
    target, drafter = small_pair("llama", agree=6.0)
    drafter = proposer(kind, drafter)
    own = own_text(target, PROMPT, NEW)
    for context in (torch.inference_mode, nullcontext, torch.no_grad, torch.inference_mode):
        with context():
            assert say(target, drafter, runtime=runtime) == [own]
    with torch.inference_mode():  # and a late program: another prompt bucket
        longer = [i % VOCAB for i in range(20)]
        assert say(target, drafter, [longer], runtime=runtime) == [own_text(target, longer, NEW)]


@pytest.mark.parametrize("kind", ["ngram", "plain"])
def test_a_resized_vocabulary_is_followed(runtime, kind):
    target = make_target("llama")
    drafter = proposer(kind, None)
    for size in (VOCAB, VOCAB + 6):
        target.resize_token_embeddings(size, mean_resizing=False)
        if size > VOCAB:
            with torch.no_grad():  # a new id is the target's next token
                target.get_output_embeddings().weight[VOCAB:] *= 40
        prompt = [size - 1, 1, 4, 2]
        own = own_text(target, prompt, NEW)
        assert say(target, drafter, [prompt], runtime=runtime) == [own]
        assert size <= VOCAB or max(own) >= VOCAB


def test_a_target_that_was_changed_is_followed():
    """``td.generate`` follows the change; `targets/test_live_model.py` has the kinds of changes."""
    target = make_target("llama", seed=3)
    own = [own_text(target, PROMPT, NEW)]
    assert say(target, None, runtime="eager") == own
    handle = target.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert say(target, None, runtime="eager") == [own_text(target, PROMPT, NEW)] != own
    handle.remove()
    assert say(target, None, runtime="eager") == own


def test_modules_speak_not_the_config_they_were_made_of():
    target = make_target("llama", seed=3)
    own = [own_text(target, PROMPT, NEW)]
    target.config.rms_norm_eps = 0.25
    assert say(target, None, runtime="eager") == own == [own_text(target, PROMPT, NEW)]


@pytest.mark.parametrize("tried", [False, True])
def test_a_dropped_target_leaves_nothing(tried):
    """Neither the engine nor the memory of its class or its skeleton keeps a model alive."""
    kind = type("Subclass", (LlamaForCausalLM,), {}) if tried else LlamaForCausalLM

    def models():
        gc.collect()
        return sum(issubclass(type(one), LlamaForCausalLM) for one in gc.get_objects())

    before = models()
    for _ in range(2):
        target = kind(make_target("llama").config).eval()
        say(target, None, runtime="eager")
        del target
    assert models() == before


@pytest.mark.parametrize("place", ["before", "within", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_swap_leaves_no_weight_in_the_skeleton(monkeypatch, place, error):
    """The skeleton would keep the user's tensors alive after the model."""
    target = make_target("llama", seed=5)
    engine = td.compile(target, None, runtime="eager", max_length=32)
    own, bound = own_text(target, PROMPT, 2), engine.pair._bound
    count, interrupted = iter(range(999)), []

    class Store:
        """A module's tensors, of which the sixth cannot be written the first time."""

        def __init__(self, store):
            self.store = store

        def __setitem__(self, key, tensor):
            self.write(lambda: self.store.__setitem__(key, tensor))

        def __getitem__(self, key):
            return self.store[key]

        def update(self, own):
            self.write(lambda: self.store.update(own))

        def write(self, write):
            if next(count) == 5:
                interrupted.append(place)
                raise error
            write()

    with monkeypatch.context() as patch, pytest.raises(error):
        if place == "before":
            shown = {n: [(Store(s), key) for s, key in places] for n, places in bound._places.items()}
            patch.setattr(bound, "_places", shown)
        elif place == "after":
            patch.setattr(bound, "_own", [(Store(store), own) for store, own in bound._own])
        else:
            interrupted.append(place)
            patch.setattr(type(engine.pair), "forward", lambda *args: (_ for _ in ()).throw(error()))
        engine.generate(torch.tensor([PROMPT]), max_new_tokens=2)
    assert interrupted
    left = [*engine.pair.parameters(), *engine.pair.buffers()]
    live = {leaf.data_ptr() for leaf in engine.tensors().values()}
    assert left and not {leaf.data_ptr() for leaf in left if leaf.device.type != "meta"} & live
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    assert engine.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist() == own
