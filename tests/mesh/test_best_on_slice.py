"""The best of logits in parts is the best of the whole: of equal entries the first, NaN above all."""

from __future__ import annotations

import pytest
from support.slices import run_on_four

BEST = """
import jax, jax.numpy as jnp, numpy as np
from jax_bridge.mesh.best import argmax_on_slice, topk_on_slice
from jax_bridge.mesh.current import Slice
from jax_bridge.mesh.shape import Heads, slice_mesh
import jax_bridge.mesh.best as best
BREAK
own = Slice(slice_mesh(jax.devices(), Heads(4, 2)), frozenset(), frozenset({40}))
rows = np.random.default_rng(0).integers(0, 6, (64, 40)).astype(np.float32)  # many equal, on several chips
rows[1], rows[2], rows[3, 17:] = -np.inf, 0.0, 9.0
unordered = rows.copy()
unordered[4, [13, 31]], unordered[5, 39] = np.nan, np.nan
assert np.array_equal(jax.jit(lambda x: argmax_on_slice(own, x))(unordered), unordered.argmax(axis=-1))
kept = jax.jit(lambda x: argmax_on_slice(own, x, keepdim=True))(unordered)
assert np.array_equal(kept, unordered.argmax(axis=-1, keepdims=True))
for count in (1, 7, 25, 40):  # a chip has ten
    found, wanted = jax.jit(lambda x: topk_on_slice(own, x, count))(rows), jax.lax.top_k(rows, count)
    assert all(map(np.array_equal, found, wanted)), count
print("checked")
"""
BREAKS = {
    "the last of equal places": "largest = jnp.argmax\n"
    "class Last:\n"
    "    def __getattr__(self, name):\n"
    "        return getattr(jnp, name)\n"
    "    def argmax(self, rows, axis, keepdims):\n"
    "        return rows.shape[axis] - 1 - largest(rows[..., ::-1], axis=axis, keepdims=keepdims)\n"
    "best.jnp = Last()",
    "chips in another order": "gathered = best._of_all_chips\n"
    "best._of_all_chips = lambda part: gathered(part)[..., ::-1]",
}


@pytest.mark.heavy
def test_parts_have_the_best_of_the_whole():
    assert run_on_four(["-c", BEST.replace("BREAK", "")]).strip().endswith("checked")


@pytest.mark.heavy
@pytest.mark.parametrize("broken", BREAKS)
def test_another_order_of_equal_entries_is_noticed(broken):
    with pytest.raises(AssertionError):  # the process fails
        run_on_four(["-c", BEST.replace("BREAK", BREAKS[broken])])
