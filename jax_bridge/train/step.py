"""One training step as a pure JAX function: the torch student's loss, differentiated by JAX, over a mesh."""

from __future__ import annotations

import copy
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
from torch import nn

import jax_bridge.ops  # noqa: F401 - registers the lowerings
from jax_bridge._torchax import call_torch
from jax_bridge.train.autocast import Bfloat16Products
from torch_dflash.train.fit.blocks import AnchorBatch
from torch_dflash.train.fit.objective import Losses, LossVocabulary
from torch_dflash.train.fit.options import FitOptions
from torch_dflash.train.fit.student import Student

Arrays = dict[str, jax.Array]
AXIS = "data"


def weightless(module: nn.Module) -> nn.Module:
    """A copy of ``module`` on the meta device: no weight can get into a program but as an argument."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
    return copy.deepcopy(module, memo)


def optimizer(options: FitOptions, rate: Any) -> optax.GradientTransformation:
    """``clip_grad_norm_`` and ``torch.optim.AdamW`` with ``rate``, which may be traced.

    The one difference: torch divides by the norm plus 1e-6 when it clips.
    """
    return optax.chain(
        optax.clip_by_global_norm(options.clip), optax.adamw(rate, weight_decay=options.weight_decay)
    )


def lower_losses(student: Student, options: FitOptions) -> Callable[..., Any]:
    """``(params, frozen, batch, vocabulary) -> Losses``: `Student.forward`, whatever its weights.

    ``params`` go by the drafter's parameter names, ``frozen`` by the student's. ``vocabulary.weight`` holds
    numbers of head rows [C, 1] instead of the rows, which are picked on the device.
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
    """``local`` on every device of the mesh; its last argument is cut over it, those before are whole.

    Cut by hand, not by the partitioner: the loss scans over chunks of all rows, and a scan over an axis
    that is cut would make every device compute all of it.
    """
    specs = (*[P()] * replicated, rows)
    # Sums over the mesh are written out, so gradients must not be summed over it a second time.
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
