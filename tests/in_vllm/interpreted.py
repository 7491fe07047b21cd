"""Pallas' interpreter for TPU kernels that read a part of a buffer as another type or shape.

The interpreter of jax 0.11.2 knows indices alone. Other parts are views of the whole buffer here, for types
of one width.
"""

from contextlib import contextmanager
from unittest.mock import patch

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import utils
from jax._src.state.types import BitcastTransform, ReshapeTransform
from jax.experimental.pallas import tpu as pltpu

GET, SWAP, STORE = (one.__wrapped__ for one in (interpreter.get, interpreter.swap, interpreter.store))


@contextmanager
def on_cpu():
    """Runs kernels for TPUs that are traced within in the interpreter."""
    with (
        patch.object(interpreter, "get", unless_indexed(GET, read)),
        patch.object(interpreter, "swap", unless_indexed(SWAP, swap)),
        patch.object(interpreter, "store", unless_indexed(STORE, store)),
        pltpu.force_tpu_interpret_mode(),
    ):
        yield


def unless_indexed(own, instead):
    """``own`` where all transforms are indices, else ``instead``."""

    def call(token, device, core, space, buffer, transforms, *rest, **options):
        place = (token, device, core, space, buffer)
        if all(hasattr(transform, "indices") for transform in transforms):
            return own(*place, transforms, *rest, **options)
        return instead(place, jax.tree.map(int, transforms), *rest, **options)

    return interpreter.fail_on_exception(call)


def read(place, transforms, **options):
    token, whole = GET(*place, (), **options)
    return token, view(np.array(whole), transforms).copy()


def swap(place, transforms, value, mask, **options):
    _, whole = GET(*place, ())
    whole = np.array(whole)
    seen = view(whole, transforms)
    before = seen.copy()
    seen[...] = np.where(True if mask is None else mask, value, before)
    token, _ = SWAP(*place, (), whole, None, **options)
    return token, before


def store(place, transforms, value, **options):
    _, whole = GET(*place, ())
    whole = np.array(whole)
    view(whole, transforms)[...] = value
    return STORE(*place, (), whole, **options)


def view(buffer, transforms):
    """The part of a buffer that transforms name, in the buffer's memory."""
    seen = buffer
    for transform in transforms:
        if isinstance(transform, BitcastTransform):
            assert np.dtype(transform.dtype).itemsize == seen.dtype.itemsize
            seen = seen.view(transform.dtype)
        elif isinstance(transform, ReshapeTransform):
            seen = seen.reshape(transform.shape)
        else:
            seen = seen[tuple(utils._transform_slice_or_index(one) for one in transform.indices)]
    assert np.shares_memory(seen, buffer)
    return seen
