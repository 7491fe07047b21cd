"""A pair that cannot fit is refused before anything is put on a device; the message has the bytes."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from support.refusals import refuses
from support.tiny import make_pair

import jax_bridge as jb
import torch_dflash as td
from jax_bridge import device_memory as room
from jax_bridge.checkpoints import load
from jax_bridge.device_memory import bytes_of, check_memory, memory_limit, memory_of
from jax_bridge.devices import on_mesh as places
from jax_bridge.devices import weights
from jax_bridge.weights import layout


@pytest.fixture
def mesh_of(monkeypatch):
    for module in (load, places):
        monkeypatch.setattr(module, "check_distinct", lambda devices: None)
    return lambda count: Mesh(np.array(jax.devices()[:1] * count), ("model",))


@pytest.fixture
def small(monkeypatch):
    """A device with so little memory; nothing may be put there."""

    def of(limit: int) -> None:
        monkeypatch.setattr(room, "memory_limit", lambda device: limit)
        for module, name in ((weights, "place"), (weights, "keep"), (load, "place"), (load, "keep")):
            monkeypatch.setattr(module, name, lambda *args, **more: pytest.fail("put before it was refused"))

    return of


def sizes(pair, **options) -> tuple[int, int]:
    engine = td.compile(*pair, max_length=64, batch_size=2, **options)
    held = sum(tensor.nbytes for tensor in {id(one): one for one in engine.tensors().values()}.values())
    return held, bytes_of(engine.runtime.begin(engine._params(), _idle(engine)))


def _idle(engine):
    from torch_dflash.rows import RowRequests

    return RowRequests.idle(engine.plan)


@pytest.mark.parametrize("cache", [pytest.param("static", marks=pytest.mark.heavy), "paged"])
def test_an_engine_that_cannot_fit_is_refused_to_the_byte(small, cache):
    pair = make_pair()
    options = {"max_length": 64, "batch_size": 2, "cache": cache}
    held, state = sizes(pair, cache=cache)
    small(held + state)
    td.compile(*pair, **options)
    small(held + state - 1)
    words = [f"{held:,} bytes of weights and {state:,} bytes of state, {held + state:,} bytes in all"]
    words += [f"has {held + state - 1:,} bytes: 1 bytes too few", "mesh", "max_length", "batch_size"]
    words += ["pool_pages"] if cache == "paged" else []
    with refuses(ValueError, *words):
        td.compile(*pair, **options)
    with refuses(ValueError, "too few"):
        td.generate(*pair, pair[0].dummy_inputs["input_ids"], max_new_tokens=2, runtime="xla")


def test_on_a_mesh_only_parts_count(small, mesh_of):
    pair = make_pair()
    held, state = sizes(pair)
    small(3 * (held + state) // 4)
    with refuses(ValueError, "too few"):
        td.compile(*pair, max_length=64, batch_size=2)
    td.compile(*pair, max_length=64, batch_size=2, mesh=mesh_of(2))
    small(held // 4)
    with refuses(ValueError, "of weights", "too few", "mesh"):
        td.compile(*pair, max_length=64, batch_size=2, mesh=mesh_of(2))


def test_codes_count_as_they_are_held(monkeypatch, tmp_path):
    monkeypatch.setitem(layout.ARITHMETIC, "cpu", layout.ARITHMETIC["tpu"])
    target, _ = make_pair()
    target.save_pretrained(tmp_path)
    options = {"max_length": 64, "quantize": "int8"}
    for model in (target, jb.load(tmp_path, quantize="int8")):
        engine = td.compile(model, None, **options)
        params = engine._params()
        held = bytes_of(params)
        room_for = held + bytes_of(engine.runtime.begin(params, _idle(engine)))
        assert held < 0.6 * sum(weight.nbytes for weight in target.parameters())
        monkeypatch.setattr(room, "memory_limit", lambda device, most=room_for: most)
        td.compile(model, None, **options)
        monkeypatch.setattr(room, "memory_limit", lambda device, most=room_for - 1: most)
        with refuses(ValueError, f"{held:,} bytes of weights", "1 bytes too few"):
            td.compile(model, None, **options)
        monkeypatch.setattr(room, "memory_limit", lambda device: None)


def test_weights_are_not_read_where_they_cannot_fit(small, mesh_of, tmp_path):
    target, _ = make_pair()
    target.save_pretrained(tmp_path)
    held = sum(weight.nbytes for weight in [*target.parameters(), *target.buffers()])
    small(held - 1)
    with refuses(ValueError, f"would hold {held:,} bytes of weights", "1 bytes too few", "several devices"):
        jb.load(tmp_path)
    small(held // 4)
    with refuses(ValueError, "bytes of weights", "a larger mesh"):
        jb.load(tmp_path, mesh=mesh_of(2))


def test_a_device_that_tells_nothing_refuses_nothing():
    assert memory_limit(jax.devices()[0]) is None and memory_of(jax.devices()) is None
    check_memory({"weights": 10**15}, None, "")
    with refuses(ValueError, "18.00 GB of weights and has 16.00 GB: 2.00 GB too few; lower it."):
        check_memory({"weights": 18 * 10**9}, 16 * 10**9, "lower it")
