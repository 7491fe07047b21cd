"""The Medusa drafter: for each of the next positions a head on the target's last hidden state.

Source: Cai et al. 2024, arXiv 2401.10774, section 2.1, and FasterDecoding/Medusa's ``medusa_model.py``, whose
names of tensors these are. There a head reads the state after the target's final norm. Here the tap is the
last block's output, and ``norm`` stands for the target's norm.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from torch_dflash.checks import check_counts
from torch_dflash.proposers.checkpoint.files import refuse_weights
from torch_dflash.proposers.dflash.vocabulary import DraftVocabulary
from torch_dflash.proposers.pair import check_pair


class MedusaConfig(PreTrainedConfig):
    """Configuration of a Medusa drafter.

    Args:
        vocab_size, hidden_size, num_target_layers: of the target.
        medusa_num_heads: K; head k drafts the token k positions after the anchor, k = 1 .. K.
        medusa_num_layers: residual blocks of a head.
        target_layer_ids: the tapped layer, a list of one; unset: the last block.
        rms_norm_eps: of the norm before the heads.
        original_lm_head: whether the target's head stands for the heads' projections, as in vLLM's.
    """

    model_type = "medusa"

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_target_layers: int | None = None
    medusa_num_heads: int = 5
    medusa_num_layers: int = 1
    target_layer_ids: Any = None  # list[int]; None until the default is filled in
    rms_norm_eps: float = 1e-6
    original_lm_head: bool = False

    @property
    def own_head(self) -> bool:
        """Whether each head has a projection."""
        return not self.original_lm_head

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = [self.num_target_layers - 1]

    def check(self) -> None:
        """Raise ``ValueError`` for a field that no network can be built from."""
        sizes = "vocab_size", "hidden_size", "num_target_layers", "medusa_num_heads", "medusa_num_layers"
        for name in sizes:
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None: set the one the drafter was trained with.")
            check_counts(**{name: getattr(self, name)})
        if not isinstance(self.target_layer_ids, list) or len(self.target_layer_ids) != 1:
            raise ValueError(f"target_layer_ids={self.target_layer_ids!r}: Medusa taps one layer; give it.")


class ResBlock(nn.Module):
    """``x + SiLU(linear(x))``."""

    def __init__(self, size: int):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Float[Tensor, "*R H"]) -> Float[Tensor, "*R H"]:
        """The block's output."""
        return x + F.silu(self.linear(x))


class MedusaDraftModel(DraftVocabulary, PreTrainedModel):
    """A Medusa drafter: K heads, each residual blocks and, with ``own_head``, a projection."""

    config_class: Any = MedusaConfig
    config: Any
    kind = "Medusa"
    base_model_prefix = "model"
    d2t = markov_head = None

    def __init__(self, config: Any):
        config.check()
        super().__init__(config)
        hidden, self.blocks = config.hidden_size, config.medusa_num_layers
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)

        def head() -> nn.Sequential:
            own = [nn.Linear(hidden, config.vocab_size, bias=False)] if config.own_head else []
            return nn.Sequential(*(ResBlock(hidden) for _ in range(self.blocks)), *own)

        self.medusa_head = nn.ModuleList(head() for _ in range(config.medusa_num_heads))
        self.post_init()

    def _init_weights(self, module) -> None:
        super()._init_weights(module)
        if getattr(module, "bias", None) is not None:  # of residual blocks, which begin as nothing
            nn.init.zeros_(module.weight)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a drafter; as ``PreTrainedModel.from_pretrained``, from safetensors, and whole.

        ``target=`` checks the drafter against its target, as `torch_dflash.load_drafter` does.

        Raises:
            ValueError: weights missing or of another shape. OSError: no such checkpoint.
        """
        target = kwargs.pop("target", None)
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True}
        model, info = cast(Any, super().from_pretrained(*args, output_loading_info=True, **kwargs))
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if info.get(problem):
                refuse_weights(problem, info[problem], args[0] if args else "the checkpoint", cls.kind)
        if target is not None:
            check_pair(target, model)
        return model

    def states(self, features: Float[Tensor, "*R H"], heads: int) -> Float[Tensor, "*R N H"]:
        """The states of the first ``heads`` heads before their projections."""
        normed = self.norm(features)
        return torch.stack([self._head(at)[: self.blocks](normed) for at in range(heads)], dim=-2)

    def logits(self, hidden: Float[Tensor, "*R N H"], head: Any = None) -> Float[Tensor, "*R N V"]:
        """Each state's logits through its own head's projection, or through the target's ``head``."""
        if not self.config.own_head:
            return head(hidden)
        states = hidden.unbind(-2)
        return torch.stack([self._head(at)[-1](state) for at, state in enumerate(states)], dim=-2)

    def _head(self, at: int) -> nn.Sequential:
        return cast(nn.Sequential, self.medusa_head[at])
