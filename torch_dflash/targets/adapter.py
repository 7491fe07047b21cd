"""Any Hugging Face causal LM as a target: taps, raw embedding, logits, cached forward."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import has_torch_function
from transformers import PreTrainedModel

from torch_dflash.cache.allocate import allocate
from torch_dflash.cache.recurrent import model_dtype_leaves
from torch_dflash.cache.view import CACHE, CacheView
from torch_dflash.checks import check_dtype, check_static_rope, check_target, is_count
from torch_dflash.ops.trees import Tree, rows_at
from torch_dflash.ops.windows import take_row
from torch_dflash.plan import DecodePlan
from torch_dflash.targets.blocks import check_tappable, tapped
from torch_dflash.targets.guard import attributes_of, written_in
from torch_dflash.targets.hooks import restoring_hooks
from torch_dflash.targets.latents import absorbing, find_latents
from torch_dflash.targets.scans import find_scans, scanning
from torch_dflash.targets.skeleton import build_skeleton, using_cache
from torch_dflash.targets.tested import check_implementations, check_instance
from torch_dflash.targets.trace import trace_layers

_ABSENT = object()


@dataclass(frozen=True)
class TargetOutput:
    """``logits`` [B, M or 1, V], ``features`` [B, M, n*H] (None without taps), ``cache`` per-layer states."""

    logits: Tensor
    features: Tensor | None
    cache: tuple


class Target(nn.Module):
    """The target's structure without weights. Methods run inside a functional call that binds them.

    Args:
        model: a live causal LM; `build_skeleton` copies it without its weights.

    Attributes:
        written: (module's path, attribute) of attributes that a forward writes.
        latents: the attention modules that hand latents to the cache, by path.

    Raises:
        TypeError: not a transformers causal LM. ValueError: an unsupported part, by name.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        check_target(model)
        check_static_rope(model.config)
        check_implementations(model)
        check_instance(model)
        self.model: Any = build_skeleton(model)
        runs = model.device.type != "meta"
        own = model.config.get_text_config()._attn_implementation
        tried = build_skeleton(model)  # a forward may write meta tensors into its copy
        before = attributes_of(tried)
        with restoring_hooks(tried):
            found = trace_layers(tried, own if runs else None, find_latents(model))
        self.specs, self.blocks, self.latents = found
        self.written = written_in(tried, before)
        self._scans = find_scans(self.model)
        owns = [(vars(self.model.get_submodule(path)), key) for path, key in self.written]
        self._first = [(own, key, own.get(key, _ABSENT)) for own, key in owns]
        self._windows = tuple(spec.window for spec in self.specs)
        self._indexed = next((at for at, spec in enumerate(self.specs) if spec.index), None)
        self.reported_length = 0  # the cache's answer to `get_seq_length`; verification sets nonsense

    def forget(self) -> None:
        """Restore attributes that earlier forwards wrote, which may contain weights."""
        for own, key, value in self._first:
            if value is _ABSENT:
                own.pop(key, None)
            else:
                own[key] = value

    @property
    def config(self):
        """The skeleton's (copied) config."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding: the number of ids of a prompt."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states."""
        return self.model.get_input_embeddings().weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, and so of the cache; that of the bound weights during a call."""
        return self.model.get_input_embeddings().weight.dtype

    @property
    def recurrent(self) -> bool:
        """Whether some layer has a state that cannot be rewound."""
        return any(spec.scan or spec.conv for spec in self.specs)

    def check_taps(self, taps: Any) -> None:
        """Raise ``ValueError`` unless the layers ``taps`` exist and can be tapped."""
        layers = len(self.specs)
        if not isinstance(taps, Iterable):
            raise ValueError(f"taps={taps!r}: must be a tuple of layers, 0 to {layers - 1}; () for none.")
        odd = [tap for tap in taps if not is_count(tap) or not 0 <= tap < layers]
        if odd:
            raise ValueError(
                f"taps={taps!r}: {odd} are no layers of the target, which has 0 to {layers - 1}."
            )
        if taps:
            check_tappable(self.model, self.blocks)

    def start(self, plan: DecodePlan) -> tuple:
        """Empty cache for ``plan``, on the weights' device and in their dtype."""
        weight = self.model.get_input_embeddings().weight
        return tuple(allocate(spec, plan, weight.dtype, weight.device) for spec in self.specs)

    def embed(self, ids: Int[Tensor, "B W"]) -> Float[Tensor, "B W H"]:
        """Rows of the embedding weight, unscaled for drafters: Gemma's module scales in its forward."""
        return F.embedding(ids, self.model.get_input_embeddings().weight)

    def head(self, hidden: Float[Tensor, "B N H"]) -> Float[Tensor, "B N V"]:
        """The output head, which drafters share."""
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))  # the drafter may be of another dtype

    def forward(
        self,
        ids: Int[Tensor, "B M"],
        start: Int[Tensor, " B"],
        cache: tuple,
        taps: tuple[int, ...] = (),
        page_table: Int[Tensor, "B row_pages"] | None = None,
        count: Int[Tensor, " B"] | None = None,
        tree: Tree | None = None,
    ) -> TargetOutput:
        """One cached forward of M rows per sequence at positions ``start[b] .. start[b]+M-1``.

        Args:
            ids: tokens; rows that are not committed later are harmless.
            start: first position of each sequence's rows.
            cache: per-layer states, consumed.
            taps: layers whose outputs (`Blocks`) are joined into ``features``.
            page_table: page numbers, where the cache is paged.
            count: real rows [B] of a prompt chunk; only their K/V are kept, and only the last gets logits.
            tree: the tree of the rows: the rows that each sees, and its depth. Layers then need ``commit``.
        """
        kept = next(iter(model_dtype_leaves(cache)), None)
        if kept is not None and not has_torch_function((kept,)):  # a lowered cache may be wider
            check_dtype("target", kept.dtype, self.dtype)
        length, dtype = self.reported_length, self.dtype
        view = CacheView(cache, self._windows, start, page_table, count, length, dtype, tree)
        position = rows_at(start, ids.shape[1], tree)
        # Indexers read the mask, and would choose from stale slots by that of no positions.
        first = self._indexed
        mask = _no_mask(ids.device) if first is None else view.choosable(first, ids.shape[1])
        outputs: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            hooks.enter_context(tapped(self.model, self.blocks, taps, outputs))
            hooks.enter_context(using_cache(view))
            hooks.enter_context(scanning(self.model, self._scans))
            hooks.enter_context(absorbing(self.model, self.latents))
            if count is not None:
                row = (count - 1).clamp(min=0)
                head = self.model.get_output_embeddings()
                hook = head.register_forward_pre_hook(lambda _, args: (take_row(args[0], row),))
                hooks.callback(hook.remove)
            logits = self.model(
                input_ids=ids,
                position_ids=position,
                attention_mask=mask,
                use_cache=True,
                **{CACHE: view},
            ).logits
        features = torch.cat([outputs[tap] for tap in taps], dim=-1) if taps else None
        return TargetOutput(logits, features, tuple(view.states))


def _no_mask(device) -> Tensor:
    """A 4-D mask, which models pass on and nothing reads: transformers then makes none."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
