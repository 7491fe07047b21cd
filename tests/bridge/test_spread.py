"""Values of a few ids, spread over a vocabulary: every form says the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_bridge.kernels.row_reductions import FEW_IDS, spread_by_comparing, spread_by_scatter, spread_jax
from torch_dflash.ops.spread import spread

SIZE = 50


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("form", [spread_by_comparing, spread_by_scatter])
def test_every_form_is_the_plain_one(form, dtype):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SIZE, (2, 3, 40), generator=generator, dtype=torch.int32)  # some twice
    values = torch.randint(-4, 5, ids.shape, generator=generator).to(dtype)
    if dtype == torch.float32:
        values[0, 0, 0] = -torch.inf
    want = spread(ids, values, SIZE)
    assert (want != 0).any() and want.shape == (2, 3, SIZE)
    found = form(jnp.asarray(ids.numpy()), jnp.asarray(values.numpy()), size=SIZE)
    assert found.dtype == want.numpy().dtype and np.array_equal(found, want)


@pytest.mark.parametrize("count, scatters", [(FEW_IDS, False), (FEW_IDS + 1, True)])
def test_few_ids_are_compared_on_a_tpu(count, scatters):
    ids, values = jnp.zeros((1, 2, count), jnp.int32), jnp.zeros((1, 2, count))
    traced = jax.jit(lambda *given: spread_jax(*given, size=SIZE)).trace(ids, values)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("stablehlo.scatter" in text) == scatters
