"""Each chip reads those of its own experts that some row hits; the sum is that of one device."""

import numpy as np
import pytest
from support.slices import run_on_four

from jax_bridge.kernels.hit_experts import expected_hits, fullest_hits, hits_of, name_of

MIXED = """
import jax, jax.numpy as jnp, numpy as np, torch
import jax_bridge as jb
from jax_bridge._torchax import call_torch
from jax_bridge.mesh import experts as on_slice
from jax_bridge.mesh.cut import EXPERTS, Partition
from jax_bridge.mesh.current import P, Slice
from jax_bridge.mesh.put import place
from jax_bridge.mesh.shape import ALL, Heads, slice_mesh
from jax_bridge.programs.lower import tracing
from jax_bridge.weights.formats import bound
from support.experts import COUNT, FLAGS, Experts, routed
from torch.func import functional_call
from torch_dflash.targets.experts import mix_experts

own = Slice(slice_mesh(jax.devices(), Heads(4, 4)), frozenset(), frozenset())

def put(tensor, cut=True):
    kind = EXPERTS if tensor.ndim == 3 else None
    way = Partition(own.mesh, P(ALL), kind) if cut and tensor.ndim > 1 else Partition(own.mesh)
    return place(tensor.detach().__getitem__, tuple(tensor.shape), way)

def mixed(module, given, cut=True):
    weights = {name: put(weight, cut) for name, weight in module.named_parameters()}
    def mix(weights, *given):
        with own.traced(), bound(weights) as arrays:
            return call_torch(lambda held, *given: functional_call(module, held, given), arrays, *given)
    with tracing("highest"):
        traced = jax.jit(mix).lower(weights, *(put(one, False) for one in given))
        program = traced.compile()
        assert f"hit_experts_{len(given[0])}x4of20by{4 if cut else 1}" in program.as_text()
        return jb.to_torch(program(weights, *(put(one, False) for one in given)))

def given(rows, first=0, count=COUNT):
    states, index, weights = routed(rows)
    return states, (first + index % count).int(), weights

torch.manual_seed(1)
for flags in FLAGS:
    flags = getattr(flags, "values", [flags])[0]
    module = Experts(*flags)
    for rows, *experts in ((1,), (5,), (6, 5, 4)):  # of the last, all choose those of one chip
        asked = given(rows, *experts)
        with torch.no_grad():
            wanted = mix_experts.plain(*asked, module)
        torch.testing.assert_close(mixed(module, asked), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mixed(module, asked, cut=False), wanted, atol=1e-5, rtol=1e-5)

halves, wide = Experts(True, False, False, False).bfloat16(), given(64)
wide = wide[0].bfloat16(), *wide[1:]
one, four = (mixed(halves, wide, cut) for cut in (False, True))
assert (one != four).float().mean() < 0.01  # of sums over chips that are rounded before, more differ
module, asked = Experts(True, False, False, False), given(3)
right = mixed(module, asked)
hit = set(asked[1].ravel().tolist())
with torch.no_grad():
    for expert in set(range(COUNT)) - hit:
        module.down_proj[expert] = float("nan")
assert len(hit) < COUNT and torch.equal(mixed(module, asked), right)  # what no row hits is not read
real = on_slice.own_numbers
on_slice.own_numbers = lambda index, share: index % share  # each chip adds other chips' rows
assert not torch.allclose(mixed(module, asked), right, equal_nan=False)
on_slice.own_numbers = lambda index, share: real(index, share) + (real(index, share) < share)  # the next one
assert not torch.allclose(mixed(module, asked), right, equal_nan=False)
print("checked")
"""


def test_each_chip_adds_its_own_experts():
    assert run_on_four(["-c", MIXED]).strip().endswith("checked")


@pytest.mark.parametrize(("rows", "chips"), [(1, 4), (16, 4), (16, 8), (4, 1)])
def test_the_fullest_chip_of_a_uniform_router(rows, chips):
    experts, chosen = 128, 8
    rng = np.random.default_rng(0)
    most = []
    for _ in range(500):
        index = np.argsort(rng.random((rows, experts)))[:, :chosen]
        hit = np.unique(index) * chips // experts
        most.append(np.bincount(hit).max())
    assert fullest_hits(rows, chosen, experts, chips) == pytest.approx(np.mean(most), rel=0.05)
    name = name_of(rows, chosen, experts // chips, chips)
    assert hits_of(f"{name}.3") == (fullest_hits(rows, chosen, experts, chips), experts // chips)
    assert fullest_hits(rows, chosen, experts, 1) == pytest.approx(expected_hits(rows, chosen, experts))
