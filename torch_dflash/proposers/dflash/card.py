"""The model card of a drafter that goes to the hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from torch_dflash.proposers.dflash.extras import extras_of

TAGS = ["dflash", "speculative-decoding"]


def hub_card(
    drafter: Any,
    repo_id: str,
    *,
    target: str | None = None,
    license: str | None = None,
    acceptance: Mapping[str, float] | None = None,
    tags: list[str] | None = None,
) -> ModelCard:
    """What the drafter is for, what it reads, how it is loaded; what nobody said is said to be unknown.

    Args:
        drafter: a `DFlashDraftModel`.
        repo_id: where it will lie.
        target: hub id of the model that it drafts for.
        license: the hub's name of one, as "apache-2.0".
        acceptance: mean acceptance length by set of prompts.
        tags: besides `TAGS`.
    """
    config = drafter.config
    layers = config.num_target_layers
    data = ModelCardData(
        base_model=target, license=license, library_name="torch-dflash", tags=[*TAGS, *(tags or ())]
    )
    named = target or "a target that this card does not name"
    shown = target or "TARGET"
    sliding = config.sliding_window if "sliding_attention" in config.layer_types else None
    fields = {
        "target": named + (f" ({layers} layers)" if layers else ""),
        "licence": license or "not stated",
        "kind": drafter.kind,
        "block size": f"{config.block_size}, the anchor included",
        "taps": f"{config.target_layer_ids}, 0-based block indices",
        "mask id": config.mask_token_id,
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "window": sliding or "none",
        "weights": f"{sum(weight.numel() for weight in drafter.parameters()) / 1e6:.2f} M, {drafter.dtype}",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in fields.items())
    lengths = "\n".join(f"| {name} | {mean:.2f} |" for name, mean in (acceptance or {}).items())
    measured = f"| set | tokens per target pass |\n| --- | --- |\n{lengths}" if lengths else "Not measured."
    return ModelCard(f"""---
{data.to_yaml()}
---

# DFlash drafter for {named}

Drafts blocks of tokens for {named}, which checks them: the text of speculative decoding is the target's
own, up to ties in half precision.
{_tables(config)}

| | |
| --- | --- |
{rows}

## Use

```python
import torch_dflash as td
from transformers import AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{shown}", dtype="auto")
drafter = td.load_drafter("{repo_id}", dtype="auto")
ids = target.generate(**inputs, custom_generate=td.dflash(drafter), max_new_tokens=256)
```

`AutoModel` does not know drafters, and raises.

## Acceptance length

{measured}
""")


def _tables(config: Any) -> str:
    """What of the drafter is not z-lab's."""
    own = extras_of(config)
    if not own:
        return "It has no embedding and no head: both are the target's."
    said = ", ".join(f"`{name}={value}`" for name, value in own.items())
    return f"It has parts that only torch-dflash reads from these files: {said}."
