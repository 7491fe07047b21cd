"""The best of logits in parts is the best of the whole: of equal entries the first, NaN above all."""

from __future__ import annotations

import pytest
from support.slices import run_on_four

BEST = """
import types
import jax, jax.numpy as jnp, numpy as np
import jax_bridge.mesh.best as best
from jax_bridge.mesh.current import Slice
from jax_bridge.mesh.shape import Heads, slice_mesh
own = Slice(slice_mesh(jax.devices(), Heads(4, 2)), frozenset(), frozenset({40}))
rows = np.random.default_rng(0).integers(0, 6, (64, 40)).astype(np.float32)  # many equal, on several chips
rows[1], rows[2], rows[3, 17:] = -np.inf, 0.0, 9.0
unordered = rows.copy()
unordered[4, [13, 31]], unordered[5, 39] = np.nan, np.nan
def wrong():
    "What differs from the whole."
    one = np.asarray(jax.jit(lambda x: best.argmax_on_slice(own, x))(unordered))
    kept = np.asarray(jax.jit(lambda x: best.argmax_on_slice(own, x, keepdim=True))(unordered))
    names = [f"argmax {row}" for row in range(64) if one[row] != unordered[row].argmax()]
    names += [] if np.array_equal(kept[:, 0], one) else ["keepdim"]
    for count in (1, 25):  # a chip has ten
        found = jax.jit(lambda x: best.topk_on_slice(own, x, count))(rows)
        same = map(np.array_equal, found, jax.lax.top_k(rows, count))
        names += [f"{part} of {count}" for part, is_same in zip(("values", "places"), same) if not is_same]
    return names
assert wrong() == [], wrong()
def exchange(argmax):
    best.jnp = types.SimpleNamespace(take_along_axis=jnp.take_along_axis, argmax=argmax)
    return wrong()
last = lambda x, **options: x.shape[-1] - 1 - jnp.argmax(x[..., ::-1], **options)
assert "argmax 2" in (found := exchange(last)) and "argmax 1" in found, found
number = lambda x, **options: jnp.argmax(jnp.where(jnp.isnan(x), -jnp.inf, x), **options)
assert (found := exchange(number)) == ["argmax 4", "argmax 5"], found
assert exchange(jnp.argmax) == []
gathered = best._of_all_chips
best._of_all_chips = lambda part: gathered(part)[..., ::-1]  # chips in another order
assert {"argmax 2", "places of 25"} <= set(found := wrong()) and "values of 25" not in found, found
print("checked")
"""


@pytest.mark.heavy
def test_parts_have_the_best_of_the_whole_and_another_order_is_seen():
    assert run_on_four(["-c", BEST]).strip().endswith("checked")
