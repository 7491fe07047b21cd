"""Code that is not transformers' own is seen in whatever dress it comes, and so is what it reads."""

from __future__ import annotations

import functools
import gc
import importlib
import operator
import sys
import time
import weakref
from array import array
from collections import ChainMap, OrderedDict, UserDict
from types import GenericAlias, MappingProxyType, MethodType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as hf
from support import tiny
from support.scripted import own_text, run
from support.tiny import BASE, make_target, randomise
from transformers.models.llama import modeling_llama

import torch_dflash as td
from torch_dflash.targets import code
from torch_dflash.targets.code import code_of
from torch_dflash.targets.describe import describe, is_plain
from torch_dflash.targets.origins import at_home, links
from torch_dflash.targets.tested import is_tested

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
WHOLE = modeling_llama.eager_attention_forward


class Sharp:
    def attend(self, *args, scaling=None, **more):
        return WHOLE(*args, scaling=(scaling or 1) * 3, **more)


class Dressed:
    """Gives the function as a descriptor does."""

    def __get__(self, instance, owner=None):
        return Sharp().attend


SHARP = Sharp()
PATCHES = {
    "bound": SHARP.attend,
    "a partial of it": functools.partial(SHARP.attend, dropout=0.0),
    "cached": functools.lru_cache(SHARP.attend),
    "a mock": mock.MagicMock(wraps=SHARP.attend),
    "a mock's side effect": mock.Mock(side_effect=SHARP.attend),
    "bound twice": MethodType(functools.partial(Sharp.attend), SHARP),
    "wrapped": functools.wraps(WHOLE)(functools.partial(SHARP.attend)),
}


def text(target, runtime="eager", new=12):
    ids = torch.tensor([PROMPT])
    return td.generate(target, None, ids, max_new_tokens=new, do_sample=False, runtime=runtime)[
        0, 8:
    ].tolist()


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_in_any_dress_is_seen(monkeypatch, name):
    target = make_target("llama")
    target.set_attn_implementation("eager")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", PATCHES[name])
    assert not is_tested(target)
    with pytest.raises(ValueError, match="tiny random twin"):
        text(target)


def test_a_patch_in_a_class_is_seen(monkeypatch):
    target = make_target("llama")
    for value in (Dressed(), functools.cached_property(lambda self: 3), operator.methodcaller("silu")):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama.LlamaAttention, "added", value, raising=False)
            assert not is_tested(target)
    assert is_tested(target)


def test_what_runs_nothing_is_no_patch():
    for value in (GenericAlias(list, (int,)), int, torch.mm, len, None, 3, "text", functools.lru_cache(len)):
        assert all(map(at_home, links(value)))


class Sly(type):
    """Its classes have no hash, and say that they are any other."""

    def __eq__(cls, other):
        return True

    __hash__ = None


class Alike(type):
    """Its classes pass for ``dict`` in a set or a table."""

    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return hash(dict)


def test_a_class_is_not_asked_what_it_is():
    def run(self, *args):
        return WHOLE(*args)

    for meta in (Sly, Alike):
        found = list(links(meta("Own", (), {"__call__": run})()))
        assert run in found and not all(map(at_home, found))


SHIFT = 0.3
TABLE = {"shift": [0.3]}
SPACE = SimpleNamespace(shift=0.3)


def shifted(embeds):
    return embeds + SHIFT


def tabled(embeds):
    return embeds + TABLE["shift"][0]


def spaced(embeds):
    return embeds + SPACE.shift


def defaulted(embeds, shift=0.3):
    return embeds + shift


def nested(embeds):
    return (lambda rows: shifted(rows))(embeds)


def make_model(helper):
    scope = {"helper": helper, "hf": hf, "__name__": "own"}
    exec(SOURCE, scope)
    return randomise(scope["Own"](hf.LlamaConfig(**BASE)), 0), scope


SOURCE = """
class Own(hf.LlamaForCausalLM):
    gain = 1.0
    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = helper(self.get_input_embeddings()(input_ids) * self.gain)
        return super(Own, self).forward(inputs_embeds=embeds, position_ids=position_ids, **more)
"""


def close_over_object(held):
    def closed(embeds):
        return embeds + held.shift

    return closed


def close_over(shift):
    def closed(embeds):
        return embeds + shift

    return closed


class Scale:
    mixing = 1.0

    def __init__(self, shift):
        self.shift = shift

    def __call__(self, embeds):
        return embeds + self.shift * self.mixing

    @staticmethod
    def of(embeds):
        return embeds + 0.3


class Slotted:
    __slots__ = ("shift",)


def add(embeds, shift=0.3):
    return embeds + shift


PART = functools.partial(add, shift=0.3)
OBJECT, SLOTTED = Scale(0.3), Slotted()
SLOTTED.shift = 0.3
BY_NAME = {"add": add}
DEEP = SimpleNamespace(inner=SimpleNamespace(shift=0.3))
NUMBER, TENSOR = np.float32(0.3), torch.tensor(0.3)


def parted(embeds):
    return PART(embeds)


def called(embeds):
    return OBJECT(embeds)


def slotted(embeds):
    return embeds + SLOTTED.shift


def named(embeds):
    return BY_NAME["add"](embeds)


def deep(embeds):
    return embeds + DEEP.inner.shift


def made(embeds):
    return Scale(0.3)(embeds)


def static(embeds):
    return Scale.of(embeds)


def imported(embeds):
    from support.tiny import VOCAB

    return embeds + VOCAB / 100


def numbered(embeds):
    return embeds + NUMBER


def filled(embeds):
    return embeds + TENSOR


def beside(embeds, act=torch.tanh, shift=0.3):
    return embeds + shift


def here(name, value):
    return lambda scope, patch: patch.setitem(globals(), name, value)


class Table(dict):
    shift = 0.3


class Holder:
    def __init__(self):
        self.numbers, self.call = list(range(20_000)), shifted

    def bound(self, embeds):
        return self.inner(embeds)

    def inner(self, embeds):
        return embeds + 0.3


NEAR, ORDER, FLOATS = type("Near", (float,), {})(0.3), {"a": 0.3, "b": -0.3}, [0.3] * 12_000
HOLDER, ORDERED, TAB = Holder(), OrderedDict(call=shifted), Table()
HELD, OF_PART, ARRAY = (
    HOLDER.bound,
    functools.partial(lambda embeds, call: call(embeds), call=shifted),
    np.ones(3),
)


def near(embeds):
    return embeds + NEAR


def first(embeds):
    return embeds + next(iter(ORDER.values()))


def far(embeds):
    return embeds + FLOATS[11_000]


def held(embeds):
    return HELD(embeds)


def behind(embeds):
    return HOLDER.call(embeds)


def ordered(embeds):
    return ORDERED["call"](embeds)


def of_part(embeds):
    return OF_PART(embeds)


def tabbed(embeds):
    return embeds + TAB.shift


def filled_array(embeds):
    return embeds + ARRAY[0]


class Layered(np.ndarray):
    pass


TABLES = {"acts": {"x": shifted}, "sizes": {"a": 1, "b": 2, "c": 3}}
BELOW = {"shift": 0.3}
MUTABLE = {
    "a large array": (np.zeros(60_000), 5),
    "an array of a kind of its own": (np.zeros(3).view(Layered), 0),
    "bytes": (bytearray(b"abc"), 0),
    "an array of Python's": (array("f", [0.3]), 0),
    "an open dict": (UserDict(shift=0.3), "shift"),
    "a chain of dicts": (ChainMap({"shift": 0.3}), "shift"),
}
PROXY, WEIGHT, COMPLEX = MappingProxyType(BELOW), torch.zeros(3), complex(0.0)


def beside_tables(embeds):
    return TABLES["acts"]["x"](embeds)


def proxied(embeds):
    return embeds + PROXY["shift"]


def weighed(embeds):
    return embeds + WEIGHT[0]


def turned(embeds):
    return embeds + COMPLEX.real


CHANGES = {
    "a table beside another": (beside_tables, here("SHIFT", -0.3)),
    "behind a proxy": (proxied, lambda scope, patch: patch.setitem(BELOW, "shift", -0.3)),
    "the data of a tensor": (weighed, lambda scope, patch: WEIGHT.data.fill_(3)),
    "a sign": (turned, here("COMPLEX", complex(-0.0, 0.0))),
    "a number of a kind of its own": (near, here("NEAR", type(NEAR)(-0.3))),
    "an order": (first, here("ORDER", {"b": -0.3, "a": 0.3})),
    "far in a list": (far, lambda scope, patch: FLOATS.__setitem__(11_000, -0.3)),
    "a method beside a bound one": (held, lambda scope, patch: patch.setattr(Holder, "inner", torch.neg)),
    "behind an object": (behind, here("SHIFT", -0.3)),
    "behind an ordered table": (ordered, here("SHIFT", -0.3)),
    "behind a partial's argument": (of_part, here("SHIFT", -0.3)),
    "beside a table": (tabbed, lambda scope, patch: patch.setattr(TAB, "shift", -0.3)),
    "an array in place": (filled_array, lambda scope, patch: ARRAY.__setitem__(0, -0.3)),
    "a partial": (parted, here("PART", functools.partial(add, shift=-0.3))),
    "of an object that is called": (called, lambda scope, patch: patch.setattr(OBJECT, "shift", -0.3)),
    "of its class": (called, lambda scope, patch: patch.setattr(Scale, "mixing", -1.0)),
    "a slot": (slotted, lambda scope, patch: patch.setattr(SLOTTED, "shift", -0.3)),
    "a function in a table": (named, lambda scope, patch: patch.setitem(BY_NAME, "add", torch.neg)),
    "an attribute of an attribute": (deep, lambda scope, patch: patch.setattr(DEEP.inner, "shift", -0.3)),
    "a class written anew": (made, here("Scale", type("Scale", (Scale,), {}))),
    "a static method": (static, lambda scope, patch: patch.setattr(Scale, "of", staticmethod(torch.neg))),
    "an import of its own": (imported, lambda scope, patch: patch.setattr(tiny, "VOCAB", 7)),
    "numpy's number": (numbered, here("NUMBER", np.float32(-0.3))),
    "a tensor": (filled, here("TENSOR", torch.tensor(-0.3))),
    "a tensor in place": (filled, lambda scope, patch: TENSOR.add_(1)),
    "a default beside a function": (
        beside,
        lambda scope, patch: patch.setattr(beside, "__defaults__", (torch.tanh, -0.3)),
    ),
    "an object in a cell": (
        close_over_object(OBJECT),
        lambda scope, patch: patch.setattr(OBJECT, "shift", -0.3),
    ),
    "a function": (shifted, lambda scope, patch: scope.update(helper=lambda embeds: embeds - 0.3)),
    "a number": (shifted, lambda scope, patch: patch.setitem(globals(), "SHIFT", -0.3)),
    "a number behind two": (nested, lambda scope, patch: patch.setitem(globals(), "SHIFT", -0.3)),
    "in a table": (tabled, lambda scope, patch: patch.setitem(TABLE, "shift", [-0.3])),
    "an attribute": (spaced, lambda scope, patch: patch.setattr(SPACE, "shift", -0.3)),
    "a default": (defaulted, lambda scope, patch: patch.setattr(defaulted, "__defaults__", (-0.3,))),
    "of the class": (shifted, lambda scope, patch: patch.setattr(scope["Own"], "gain", -1.0)),
    "a cell": (close_over(0.3), lambda scope, patch: set_cell(scope["helper"], -0.3)),
}


def set_cell(function, value):
    function.__closure__[0].cell_contents = value


@pytest.mark.parametrize("runtime", ["eager", "xla"])
@pytest.mark.parametrize("name", ["a function", "a number", "of the class"])
def test_the_text_follows_what_a_helper_reads(monkeypatch, name, runtime):
    helper, change = CHANGES[name]
    target, scope = make_model(helper)
    before = text(target, runtime)
    assert before == own_text(target, PROMPT, 12)
    change(scope, monkeypatch)
    assert text(target, runtime) == own_text(target, PROMPT, 12) != before


@pytest.mark.parametrize("name", CHANGES)
def test_a_verdict_is_of_all_that_the_code_reads(monkeypatch, name):
    helper, change = CHANGES[name]
    target, scope = make_model(helper)
    before = code_of(target)
    assert code_of(target) == before
    change(scope, monkeypatch)
    assert code_of(target) != before


@pytest.mark.parametrize("name", MUTABLE)
def test_a_verdict_is_of_what_lies_in_memory(monkeypatch, name):
    target, _ = make_model(ignoring)
    value, place = MUTABLE[name]
    monkeypatch.setitem(globals(), "THING", value)
    before = code_of(target)
    assert code_of(target) == before
    value[place] = 7
    assert code_of(target) != before


@pytest.mark.parametrize("size", [70_000, 151_936])
def test_a_table_of_a_vocabulary_is_looked_at_whole(monkeypatch, size):
    table = {f"word {i}": i for i in range(size)}
    assert describe(table) == describe(dict(table)) == describe(table)
    assert describe(table) != describe(table | {f"word {size - 1}": -1})
    spaces = [SimpleNamespace(a=1, b=(i,)) for i in range(size)]
    assert describe(spaces) == describe(spaces)
    target, _ = make_model(ignoring)
    monkeypatch.setitem(globals(), "THING", table)
    engine = td.compile(target, None, runtime="eager", max_length=64)
    engine.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)


def test_a_value_larger_than_what_is_looked_at_stays_the_same_one(monkeypatch):
    monkeypatch.setattr("torch_dflash.targets.describe.MOST", 10)
    for value in ({"a": dict.fromkeys(range(4)), "b": dict.fromkeys(range(40))}, [SPACE, {1: {2: CHANGES}}]):
        assert describe(value) == describe(value)


def test_a_value_that_many_name_is_described_once(monkeypatch):
    source = "TABLE = {i: i for i in range(99)}\n"
    source += "".join(f"def f{i}(embeds):\n    TABLE\n    return embeds\n" for i in range(10))
    scope = {"__name__": "own"}
    exec(source + f"def helper(embeds):\n    {[f'f{i}' for i in range(10)]}\n".replace("'", ""), scope)
    target, _ = make_model(scope["helper"])
    seen = []
    monkeypatch.setattr(code, "describe", lambda value, *more: seen.append(value) or describe(value, *more))
    assert code_of(target) == code_of(target)
    assert sum(value is scope["TABLE"] for value in seen) == 2


class OwnConfig(hf.LlamaConfig):
    model_type = "own_gain"
    gain = 1.0

    @property
    def bend(self):
        return SHIFT


class Mixing:
    by = 1.0


class Holding(hf.LlamaForCausalLM):
    mixing = Mixing()


def test_a_verdict_is_of_the_configs_class_and_of_objects_that_classes_hold(monkeypatch):
    target = Holding(OwnConfig(**BASE))
    before = code_of(target)
    for owner, name, value in (
        (OwnConfig, "gain", -1.0),
        (Mixing, "by", -1.0),
        (sys.modules[__name__], "SHIFT", 3),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert code_of(target) != before
    assert code_of(target) == before
    target.config.__class__ = hf.LlamaConfig
    assert code_of(target) != before


def test_a_base_that_was_made_without_a_name_is_looked_at(monkeypatch):
    scope = {"hf": hf}
    exec("class Base(hf.LlamaForCausalLM):\n    by = 1\nclass Own(Base):\n    pass", scope)
    target = scope["Own"](hf.LlamaConfig(**BASE))
    before = code_of(target)
    scope["Base"].by = 2
    assert code_of(target) != before


def write_package(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def helper_of(monkeypatch, folder, module, *others):
    """``helper`` of a module in ``folder``, imported anew; ``others``: what it is to import anew itself."""
    monkeypatch.syspath_prepend(str(folder))
    for name in (module, *others):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(module).helper


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("from . import near", "near.SHIFT"),
        ("from .near import SHIFT", "SHIFT"),
        ("from ..consts import SHIFT", "SHIFT"),
        ("from .. import consts", "consts.SHIFT"),
        ("import outer_pk.consts", "outer_pk.consts.SHIFT"),
    ],
)
def test_imports_inside_a_function_are_followed(monkeypatch, tmp_path, line, value):
    helper = f"def helper(embeds):\n    {line}\n    return embeds + {value}\n"
    files = dict.fromkeys(("outer_pk/__init__.py", "outer_pk/inner/__init__.py"), "")
    files |= dict.fromkeys(("outer_pk/consts.py", "outer_pk/inner/near.py"), "SHIFT = 0.3\n")
    write_package(tmp_path, files | {"outer_pk/inner/helpers.py": helper})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("outer_pk")]:
        monkeypatch.delitem(sys.modules, name)
    read = importlib.import_module("outer_pk.inner.near" if "near" in line else "outer_pk.consts")
    target, _ = make_model(importlib.import_module("outer_pk.inner.helpers").helper)
    before = code_of(target)
    read.SHIFT = -0.3
    assert code_of(target) != before


@pytest.mark.parametrize("line", ["from late_pk import SHIFT", "import late_pk"])
def test_what_the_first_forward_imports_is_looked_at_later(monkeypatch, tmp_path, line):
    value = "SHIFT" if "from" in line else "getattr(late_pk, 'SHIFT')"
    files = {
        "late_pk.py": "SHIFT = 0.3\n",
        "late_helpers.py": f"def helper(embeds):\n    {line}\n    return embeds + {value}\n",
    }
    write_package(tmp_path, files)
    target, _ = make_model(helper_of(monkeypatch, tmp_path, "late_helpers", "late_pk"))
    engine = td.compile(target, None, runtime="eager", max_length=64)
    sys.modules["late_pk"].SHIFT = -0.3
    with pytest.raises(ValueError, match="its code, or a value that its code reads, was changed"):
        run(engine, [PROMPT], max_new_tokens=4)


class Counts:
    """An object of which a helper's forward makes an attribute."""


COUNTS = Counts()


def noting_calls(embeds):
    COUNTS.calls = getattr(COUNTS, "calls", 0) + 1
    return embeds + 0.3


def test_a_name_that_the_first_forward_makes_is_its_own():
    vars(COUNTS).clear()
    target, _ = make_model(noting_calls)
    engine = td.compile(target, None, runtime="eager", max_length=64)
    texts = [run(engine, [PROMPT], max_new_tokens=4)[0] for _ in range(3)]
    assert texts == [[own_text(target, PROMPT, 4)]] * 3


LATE = {  # what a helper imports as it runs, what this holds, and what is changed there
    "function": ("late_pk.SHIFT", "SHIFT = 0.3\ndef shifted(e):\n    return e + SHIFT\n"),
    "table": ("late_pk.TABLE", "TABLE = {'a': 0.3}\ndef shifted(e):\n    return e + TABLE['a']\n"),
    "class": ("late_pk.Box.a", "class Box:\n    a = 0.3\ndef shifted(e):\n    return e + Box().a\n"),
}


@pytest.mark.parametrize("case", LATE)
def test_what_the_imported_code_reads_is_looked_at_later(monkeypatch, tmp_path, case):
    place, text = LATE[case]
    helper = "def helper(embeds):\n    from late_pk import shifted\n    return shifted(embeds)\n"
    write_package(tmp_path, {"late_pk.py": text, "late_helpers.py": helper})
    target, _ = make_model(helper_of(monkeypatch, tmp_path, "late_helpers", "late_pk"))
    engine = td.compile(target, None, runtime="eager", max_length=64)
    holder, name = sys.modules["late_pk"], place.split(".")[-1]
    setattr(holder.Box if case == "class" else holder, name, {"a": -0.3} if case == "table" else -0.3)
    with pytest.raises(ValueError, match="its code, or a value that its code reads, was changed"):
        run(engine, [PROMPT], max_new_tokens=4)
    td.compile(target, None, runtime="eager", max_length=64)


def test_an_alias_of_a_package_that_imports_its_parts_late_is_followed(monkeypatch, tmp_path):
    lazy = "import importlib\ndef __getattr__(name):\n    return importlib.import_module(f'lazy_pk.{name}')\n"
    helper = "import lazy_pk as p\ndef helper(embeds):\n    return embeds + p.consts.SHIFT\n"
    files = {"lazy_pk/__init__.py": lazy, "lazy_pk/consts.py": "SHIFT = 0.3\n", "lazy_helpers.py": helper}
    write_package(tmp_path, files)
    target, _ = make_model(helper_of(monkeypatch, tmp_path, "lazy_helpers", "lazy_pk", "lazy_pk.consts"))
    engine = td.compile(target, None, runtime="eager", max_length=64)
    sys.modules["lazy_pk.consts"].SHIFT = -0.3
    with pytest.raises(ValueError, match="its code, or a value that its code reads, was changed"):
        run(engine, [PROMPT], max_new_tokens=4)


def test_a_verdict_is_of_the_values_that_late_imports_read(monkeypatch, tmp_path):
    text = "MIX = 0.0\ndef shifted(e):\n    return e + MIX * e.mean(1, keepdim=True)\n"
    helper = "def helper(embeds):\n    from mix_pk import shifted\n    return shifted(embeds)\n"
    write_package(tmp_path, {"mix_pk.py": text, "mix_helpers.py": helper})
    target, _ = make_model(helper_of(monkeypatch, tmp_path, "mix_helpers", "mix_pk"))
    for _ in range(2):
        td.compile(target, None, runtime="eager", max_length=64)
    sys.modules["mix_pk"].MIX = 3.0
    with pytest.raises(ValueError, match="a tiny random twin of it is decoded otherwise"):
        td.compile(target, None, runtime="eager", max_length=64)


WRITING = {
    "count": "calls = 0\ndef shifted(e):\n    global calls\n    calls += 1\n    return e + 0.3\n",
    "cache": "seen = {}\ndef shifted(e):\n    seen[tuple(e.shape)] = 1\n    return e + 0.3\n",
    "class": "class S:\n    n = 0\ndef shifted(e):\n    S.n += 1\n    return e + 0.3\n",
    "empty": "class S:\n    pass\ndef shifted(e):\n    S.n = getattr(S, 'n', 0) + 1\n    return e + 0.3\n",
}


@pytest.mark.parametrize("case", WRITING)
def test_what_code_that_is_imported_late_writes_is_its_own(monkeypatch, tmp_path, case):
    helper = "def helper(embeds):\n    from late_pk import shifted\n    return shifted(embeds)\n"
    write_package(tmp_path, {"late_pk.py": WRITING[case], "late_helpers.py": helper})
    target, _ = make_model(helper_of(monkeypatch, tmp_path, "late_helpers", "late_pk"))
    engine = td.compile(target, None, runtime="eager", max_length=64)
    texts = [run(engine, [PROMPT], max_new_tokens=4)[0] for _ in range(3)]
    assert texts == [[own_text(target, PROMPT, 4)]] * 3


INSTALLED = """
import transformers as hf
from installed_pk import consts
class Options:
    kind = 1.0
    def __init__(self):
        self.shift = 0.3
OPTIONS = Options()
class Own(hf.LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, **more):
        embeds = self.get_input_embeddings()(input_ids) + consts.SHIFT + OPTIONS.shift * OPTIONS.kind
        return super().forward(inputs_embeds=embeds, position_ids=position_ids, **more)
"""


def test_values_of_an_installed_models_own_package_are_read(monkeypatch, tmp_path):
    folder = tmp_path / "site-packages"
    files = {"__init__.py": "", "consts.py": "SHIFT = 0.3\n", "modeling.py": INSTALLED}
    write_package(folder / "installed_pk", files)
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module("installed_pk.modeling")
    target = module.Own(hf.LlamaConfig(**BASE))
    before = code_of(target)
    for owner, name in ((module.consts, "SHIFT"), (module.OPTIONS, "shift"), (module.Options, "kind")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, -3.0)
            assert code_of(target) != before
    assert code_of(target) == before


def test_a_helper_that_comes_to_mix_tokens_is_refused():
    target, scope = make_model(shifted)
    text(target)
    scope["helper"] = lambda embeds: embeds - embeds.mean(1, keepdim=True)
    with pytest.raises(ValueError, match="tiny random twin"):
        text(target)


def test_other_names_of_a_file_are_not_read(monkeypatch):
    target, _ = make_model(shifted)
    before = code_of(target)
    monkeypatch.setitem(globals(), "UNREAD", 5)
    monkeypatch.setitem(TABLE, "other", 5)
    assert code_of(target) == before


class Null:
    """Stands for a tracer that is not installed."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self


class Raising:
    def __getattribute__(self, name):
        raise RuntimeError(name)


class Unhashable:
    def __hash__(self):
        raise TypeError("no hash")

    def __eq__(self, other):
        raise RuntimeError("no equality")

    def __call__(self):
        return None


class Unprintable(dict):
    def __repr__(self):
        raise RuntimeError("no repr")


def itself():
    return None


itself.__wrapped__ = itself
CYCLE: list = [1]
CYCLE.append(CYCLE)
ODD = {
    "a null object": Null(),
    "a mock": mock.MagicMock(),
    "a call of a mock": mock.call,
    "what raises": Raising(),
    "what has no hash": Unhashable(),
    "what has no repr": Unprintable(a=1),
    "its own wrapper": itself,
    "a cycle": CYCLE,
    "a large table": dict.fromkeys(range(200_000)),
    "operators": torch.ops,
}
THING = None


def ignoring(embeds):
    THING  # noqa: B018 - its name is read, as a logger's is
    return embeds


@pytest.mark.parametrize("name", ODD)
def test_what_code_merely_names_may_be_anything(monkeypatch, name):
    target, _ = make_model(ignoring)
    monkeypatch.setitem(globals(), "THING", ODD[name])
    assert code_of(target) == code_of(target)
    assert text(target, new=3) == own_text(target, PROMPT, 3)


loss = 0.0
CACHE: dict = {}


def test_attributes_are_no_globals_of_that_name(monkeypatch):
    def named(embeds):
        return embeds.loss

    target, _ = make_model(named)
    before = code_of(target)
    monkeypatch.setitem(globals(), "loss", 1.0)
    monkeypatch.setitem(sys.modules, "loss", sys)
    assert code_of(target) == before


def counting(embeds):
    CACHE[len(CACHE)] = SHIFT
    return embeds + SHIFT


def caching(embeds):
    CACHE.setdefault(embeds.shape[1], SHIFT)
    return embeds + SHIFT


@pytest.mark.parametrize("helper", [counting, caching])
def test_what_code_writes_itself_is_no_change(monkeypatch, helper):
    monkeypatch.setitem(globals(), "CACHE", {})
    target, _ = make_model(helper)
    options = {"max_new_tokens": 2, "do_sample": False}
    ids, longer = torch.tensor([PROMPT]), torch.tensor([PROMPT * 4])
    engines = [
        td.compile(target, None, runtime="eager", max_length=64, verify=verify) for verify in (True, False)
    ]
    for engine in engines:
        engine.generate(ids, **options)
        target.generate(ids[:, :5], **options)
        engine.start(ids[:, :3], **options)
        open_stream = engine.stream(longer, **options)
        next(open_stream)
        engine.generate(ids[:, :4], **options)
    monkeypatch.setitem(globals(), "SHIFT", -0.3)
    for engine in engines:
        with pytest.raises(ValueError, match="was changed after this engine was built"):
            engine.generate(ids, **options)


def test_an_engine_for_code_that_writes_is_built_once(monkeypatch):
    monkeypatch.setitem(globals(), "CACHE", {})
    target, _ = make_model(counting)
    text(target, new=2)
    monkeypatch.setattr("torch_dflash.engine.registry.Engine", lambda *given: pytest.fail("built twice"))
    text(target, new=2)


@pytest.mark.parametrize("end", [lambda stream: stream.close(), list])
def test_a_change_while_a_stream_is_open_is_refused_after_it(monkeypatch, end):
    target, _ = make_model(shifted)
    engine = td.compile(target, None, runtime="eager", max_length=64)
    stream = engine.stream(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    next(stream)
    monkeypatch.setitem(globals(), "SHIFT", -0.3)
    end(stream)
    with pytest.raises(ValueError, match="was changed after this engine was built"):
        engine.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)


def test_what_transformers_notes_in_a_class_is_no_change():
    class Noted(hf.LlamaForCausalLM):
        pass

    target, other = (randomise(Noted(hf.LlamaConfig(**BASE)), 0) for _ in range(2))
    engine = td.compile(target, None, runtime="eager", max_length=64)
    ids, options = torch.tensor([PROMPT]), {"max_new_tokens": 2, "do_sample": False}
    engine.generate(ids, **options)
    other.set_attn_implementation("eager")
    target.set_attn_implementation("eager")
    target.set_attn_implementation("sdpa")
    target.set_experts_implementation("eager")
    Noted.register_for_auto_class()
    engine.generate(ids, **options)


def test_values_of_any_size_are_described_in_time(monkeypatch):
    monkeypatch.setattr("torch_dflash.targets.describe.MOST", 10_000)
    nested: list = [1]
    for _ in range(40):
        nested = [nested] * 3
    assert not is_plain(nested)
    for value in (nested, [[0] * 9_999] * 9_999, [[0.5] * 300] * 300, (1 << 20_000) - 1, {"a": nested}):
        started = time.perf_counter()
        assert describe(value) == describe(value)
        assert time.perf_counter() - started < 60  # it would be for ever


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_an_engine_in_use_refuses_changed_code(monkeypatch, runtime):
    target = make_target("llama")
    engine = td.compile(target, None, runtime=runtime, max_length=64)
    ids = torch.tensor([PROMPT])
    engine.generate(ids, max_new_tokens=2, do_sample=False)
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, rows: forward(self, rows) * 2)
    for ask in (engine.generate, engine.stream, engine.start):
        with pytest.raises(ValueError, match="LlamaForCausalLM: its code, .* was changed after"):
            ask(ids, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("make", [lambda model: model.get_input_embeddings, lambda model: lambda: model])
def test_a_model_is_freed_though_its_code_names_a_function_that_holds_it(monkeypatch, make):
    target, _ = make_model(ignoring)
    monkeypatch.setitem(globals(), "THING", make(target))
    text(target, new=2)
    gone = weakref.ref(target)
    monkeypatch.undo()
    del target, _
    gc.collect()
    assert gone() is None
