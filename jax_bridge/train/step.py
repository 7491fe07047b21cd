"""One training step as a pure JAX function: the torch student's loss, differentiated by JAX, over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from torch.overrides import TorchFunctionMode

import jax_bridge.ops  # noqa: F401 - registers the lowerings
from jax_bridge._torchax import call_torch
from torch_dflash.ops.control_flow import chunked
from torch_dflash.train.fit.blocks import AnchorBatch
from torch_dflash.train.fit.objective import Losses, LossVocabulary
from torch_dflash.train.fit.options import FitOptions
from torch_dflash.train.fit.student import Student, weightless

Arrays = dict[str, jax.Array]
AXIS = "data"


def optimizer(options: FitOptions, rate: Any) -> optax.GradientTransformation:
    """``clip_grad_norm_`` and ``torch.optim.AdamW`` with ``rate`` (may be traced).

    One difference: torch divides by the norm plus 1e-6 when it clips.
    """
    return optax.chain(
        optax.clip_by_global_norm(options.clip), optax.adamw(rate, weight_decay=options.weight_decay)
    )


def lower_losses(student: Student, options: FitOptions) -> Callable[..., Any]:
    """``(params, frozen, batch, vocabulary) -> Losses``: `Student.forward`, whatever its weights.

    ``params`` have the drafter's parameter names, ``frozen`` the student's. ``vocabulary.weight`` holds
    indices of head rows [C, 1]; the device picks the rows.
    """
    skeleton = weightless(student)

    def forward(tensors, batch, vocabulary):
        with Bfloat16Products() if options.mixed_precision == "bf16" else nullcontext():
            return torch.func.functional_call(skeleton, tensors, (batch, vocabulary))

    def losses(params: Arrays, frozen: Arrays, batch: AnchorBatch, vocabulary: LossVocabulary | None) -> Any:
        tensors = frozen | {f"drafter.{name}": array for name, array in params.items()}
        return call_torch(forward, tensors, batch, _picked(frozen, vocabulary))

    return losses


def _picked(frozen: Arrays, vocabulary: Any) -> Any:
    if vocabulary is None:
        return None
    rows, bias = vocabulary.weight[:, 0], frozen.get("head_bias")
    return replace(vocabulary, weight=frozen["head_weight"][rows], bias=None if bias is None else bias[rows])


def lower_validation(student: Student, options: FitOptions, mesh: Mesh) -> Callable[..., Losses]:
    """``(params, frozen, batch) -> Losses`` over the whole vocabulary, summed over the mesh."""
    losses = lower_losses(student, options)

    def local(params, frozen, batch):
        return jax.lax.psum(losses(params, frozen, batch, None), AXIS)

    return _over(mesh, local, P(AXIS), 2)


def lower_step(student: Student, options: FitOptions, mesh: Mesh) -> Callable[..., tuple]:
    """``(params, state, frozen, batches, vocabulary, rate) -> (params, state, losses, norm)``.

    ``batches`` is one `AnchorBatch` with a leading axis of micro-batches, its rows cut over the mesh; the
    rest is replicated. The loss is summed over rows, micro-batches and devices and divided by the step's
    number of blocks, so no cut changes the step. ``norm`` is the gradient's before clipping.
    """
    losses_of = lower_losses(student, options)

    def local(params, frozen, vocabulary, batches):
        blocks = jax.lax.psum(jnp.sum(batches.anchors >= 0), AXIS)
        share = 1 / jnp.maximum(blocks, 1).astype(jnp.float32)

        def loss(params, batch):
            losses = losses_of(params, frozen, batch, vocabulary)
            return losses.loss * share, losses

        def add_batch(sums, batch):
            gradient, losses = jax.grad(loss, has_aux=True)(params, batch)
            return jax.tree.map(jnp.add, sums, (gradient, losses)), None

        first = jax.tree.map(lambda rows: rows[0], batches)
        shapes = jax.eval_shape(jax.grad(loss, has_aux=True), params, first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.psum(jax.lax.scan(add_batch, zeros, batches)[0], AXIS)

    summed = _over(mesh, local, P(None, AXIS), 3)

    def train_step(params, state, frozen, batches, vocabulary, rate):
        gradient, losses = summed(params, frozen, vocabulary, batches)
        updates, state = optimizer(options, rate).update(gradient, state, params)
        return optax.apply_updates(params, updates), state, losses, optax.tree.norm(gradient)

    return train_step


def _over(mesh: Mesh, local: Callable, rows: P, replicated: int) -> Callable:
    """``local`` on every device of the mesh; its last argument is cut, those before are whole.

    The partitioner does not cut it: the loss scans over chunks of all rows, and in a scan over a cut axis
    every device would compute all of them.
    """
    specs = (*[P()] * replicated, rows)
    # Sums over the mesh are written out, so gradients must not be summed over it a second time.
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


# The operations that torch's autocast casts, as far as the drafter uses them. torchax's autocast knows only
# the operators that they decompose into, and never sees those.
PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.bmm,
}


class Bfloat16Products(TorchFunctionMode):
    """Casts float32 inputs of products to bfloat16, as ``torch.autocast`` does; results are bfloat16 too.

    Weights and their gradients stay float32 outside. Norms, the residual stream, softmaxes and losses are
    float32: they compute in it, or promote a product's bfloat16 result with a float32 operand.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func is chunked:
            # Its step runs later, when this mode is not on the stack.
            step, *rest = args
            args = (self._inside(step), *rest)
        elif func in PRODUCTS:
            args = tuple(map(_narrowed, args))
            kwargs = {name: _narrowed(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _inside(self, step):
        def run(*rows):
            with self:
                return step(*rows)

        return run


def _narrowed(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(torch.bfloat16) if floats else value
