"""The partition of each weight of a pair: transformers' plans where they are right, ours where none is.

Two things of its plans are left out: norms that they copy only for gradients, and cuts inside of experts, for
which each chip would have to sum every expert's outputs. Experts are whole, each on one chip.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh, PartitionSpec
from torch import nn

from jax_bridge.mesh.current import Slice
from jax_bridge.mesh.cut import COLUMN, EXPERTS, GATHER, HEADS, ROW, Partition
from jax_bridge.mesh.mixers import blocks_of, mixer_partition
from jax_bridge.mesh.shape import ALL, KV, Heads, are_cut
from torch_dflash.ops.latents import Widths
from torch_dflash.targets.latents import weights_of

P = PartitionSpec
OURS = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
"""The plan of models without one: GPT-OSS has none for its layers, drafters have none at all."""
_STYLES = {"colwise": "colwise", "rowwise": "rowwise", "colwise_gather_output": "gather"}
"""Of transformers' plans. MiniMax-M2 normalises queries and keys over all heads, so they are gathered."""
_GROUPED = re.compile(r"\.(k_proj|v_proj)\.")
_ATTENTION = re.compile(r"\.self_attn\.")
_MIXER = re.compile(r"\.linear_attn\.(.*)")


def heads_of(config: Any) -> Heads:
    """The heads in a model's config."""
    text = config.get_text_config()
    queries = text.num_attention_heads
    return Heads(queries, getattr(text, "num_key_value_heads", None) or queries)


def partitions_of_target(
    model: Any, mesh: Mesh, latents: dict[str, Widths] | None = None
) -> dict[str, Partition]:
    """Partitions of all parameters and buffers of a causal LM by name; tied ones once.

    ``latents``: widths of the weights of layers that attend to latents, by name.
    """
    config, decoder = model.config.get_text_config(), model.get_decoder()
    prefix = next(f"{name}." for name, module in model.named_modules() if module is decoder)
    plan = OURS | _understood(getattr(config, "base_model_tp_plan", None))
    experts = set(getattr(config, "base_model_ep_plan", None) or {})
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    partitions = _partitions(model, prefix, plan, experts, tables, heads_of(config), mesh)
    blocks = blocks_of(config, mesh)
    for name, widths in (latents or {}).items():
        cut = are_cut(heads_of(config), mesh)
        partitions[name] = Partition(mesh, P(ALL), HEADS, widths=widths) if cut else Partition(mesh)
    for name in partitions:
        if found := _MIXER.search(name):
            partitions[name] = mixer_partition(found[1], mesh, blocks) if blocks else Partition(mesh)
    return partitions


def partitions_of_drafter(drafter: Any, mesh: Mesh) -> dict[str, Partition]:
    """Partitions of all parameters and buffers of a DFlash drafter by name."""
    tables = set()
    for module in drafter.modules():
        tables |= {id(getattr(module, name)) for name in getattr(module, "lookups", ())}
        tables |= {id(module.weight)} if isinstance(module, nn.Embedding) else set()
    plan = OURS | {"fc": "gather"}
    return _partitions(drafter, "", plan, set(), tables, heads_of(drafter.config), mesh)


def partitions_of(pair: Any, mesh: Mesh) -> dict[str, Partition]:
    """Partitions of all weights of a pair by name."""
    target = pair.target
    found = partitions_of_target(target.model, mesh, weights_of(target.latents))
    found = _prefixed("target.model.", found)
    drafter = getattr(pair.proposer, "drafter", None)
    if drafter is not None:
        path = next(name for name, module in pair.named_modules() if module is drafter)
        found |= _prefixed(f"{path}.", partitions_of_drafter(drafter, mesh))
    rest = [*pair.named_parameters(), *pair.named_buffers()]
    return {name: Partition(mesh) for name, _ in rest} | found


def slice_of(pair: Any, mesh: Mesh) -> Slice:
    """The slice of a pair on the mesh."""
    drafter = getattr(pair.proposer, "drafter", None)
    configs = [pair.target.config, *([] if drafter is None else [drafter.config])]
    heads = [heads_of(config) for config in configs]
    whole = {own.groups for own in heads if not are_cut(own, mesh)}
    rows = {pair.target.model.get_output_embeddings().weight.shape[0]}
    return Slice(
        mesh,
        frozenset(own.groups for own in heads if own.groups not in whole),
        frozenset(size for size in rows if size % mesh.size == 0),
        blocks_of(pair.target.config, mesh),
        heads[0].queries if pair.target.latents and are_cut(heads[0], mesh) else 0,
    )


def _partitions(
    model: nn.Module,
    prefix: str,
    plan: dict[str, str],
    experts: set[str],
    tables: set[int],
    heads: Heads,
    mesh: Mesh,
) -> dict[str, Partition]:
    cut, size, found = are_cut(heads, mesh), mesh.size, {}
    for name, weight in model.named_parameters():
        inner = re.sub(r"\.\d+\.", ".*.", name.removeprefix(prefix))
        layer, _, last = inner.rpartition(".")
        style = plan.get(layer)
        first = P(KV) if _GROUPED.search(inner) else P(ALL)
        whole = bool(_ATTENTION.search(inner)) and not cut
        if id(weight) in tables:
            partition = Partition(mesh, P(ALL), COLUMN)
        elif whole:
            partition = Partition(mesh)
        elif inner in experts:
            partition = Partition(mesh, P(ALL), EXPERTS if weight.ndim == 3 else None)
        elif last == "sinks" or last == "attention_sink_bias":
            partition = Partition(mesh, P(ALL))
        elif style in ("colwise", "gather"):
            kind = GATHER if style == "gather" else COLUMN
            partition = Partition(mesh, first, kind if weight.ndim == 2 else None)
        elif style == "rowwise" and last == "weight":
            partition = Partition(mesh, P(None, ALL), ROW)
        else:
            partition = Partition(mesh)
        found[name] = partition if _divides(weight.shape, partition, size) else Partition(mesh)
    return found | {name: Partition(mesh) for name, _ in model.named_buffers()}


def _divides(shape: tuple[int, ...], partition: Partition, size: int) -> bool:
    """Whether the cut axis divides evenly; cut K/V heads always do."""
    return all(axes is None or axes == KV or length % size == 0 for length, axes in _axes(shape, partition))


def _axes(shape: tuple[int, ...], partition: Partition) -> Iterator[tuple[int, Any]]:
    return zip(shape, partition.spec, strict=False)


def _understood(plan: dict[str, str] | None) -> dict[str, str]:
    return {name: _STYLES[style] for name, style in (plan or {}).items() if style in _STYLES}


def _prefixed(prefix: str, partitions: dict[str, Partition]) -> dict[str, Partition]:
    return {prefix + name: partition for name, partition in partitions.items()}
