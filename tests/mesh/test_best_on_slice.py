"""The best of logits in parts is the best of the whole: of equal entries the first, NaN above all."""

import pytest
from support.slices import run_on_four

BEST = """
import types, torch
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
    names += ["likeliest"] if unlikely() else []
    return names
def unlikely():
    "Whether the likeliest are others than those of the whole."
    from torch_dflash.ops.likeliest import likeliest
    logits, scale = rows.copy(), np.asarray([1.0, 0.7, 2.5, 1e-30] * 16, np.float32)[:, None]
    logits[1, 0], logits[4, 10:] = 1.0, -np.inf  # on three chips no other entry
    logits[5, 3] = 3e38
    found = jax.jit(lambda x, s: best.likeliest_on_slice(own, x, s, 12))(logits, scale)
    wanted = likeliest.plain(*map(torch.from_numpy, (logits, scale)), 12)
    same = [np.allclose(found[at], wanted[at].numpy(), atol=1e-6) for at in (0, 2)]
    return not all(same) or not np.array_equal(found[1], jax.lax.top_k(logits, 12)[1])  # torch's ties differ
assert wrong() == [], wrong()
def exchange(argmax):
    best.jnp = types.SimpleNamespace(**vars(jnp) | {"argmax": argmax})
    return wrong()
last = lambda x, **options: x.shape[-1] - 1 - jnp.argmax(x[..., ::-1], **options)
assert "argmax 2" in (found := exchange(last)) and "argmax 1" in found, found
number = lambda x, **options: jnp.argmax(jnp.where(jnp.isnan(x), -jnp.inf, x), **options)
assert (found := exchange(number)) == ["argmax 4", "argmax 5"], found
assert exchange(jnp.argmax) == []
finite, best._finite = best._finite, lambda top: top  # a chip with no entry but -inf
assert (found := wrong()) == ["likeliest"], found
best._finite = finite
gathered = best._of_all_chips
best._of_all_chips = lambda *parts: [one[..., ::-1] for one in gathered(*parts)]  # in another order
assert {"argmax 2", "places of 25"} <= set(found := wrong()) and "values of 25" not in found, found
print("checked")
"""


@pytest.mark.heavy
def test_parts_have_the_best_of_the_whole_and_another_order_is_seen():
    assert run_on_four(["-c", BEST]).strip().endswith("checked")
