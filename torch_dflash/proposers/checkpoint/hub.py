"""Pushes a drafter to the hub with a model card; ``from_pretrained`` loads it again."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData

from torch_dflash.proposers.checkpoint.extras import extras_of

CARD = "README.md"


class OnHub:
    """Mixin: a drafter's own ``push_to_hub`` and ``save_pretrained``."""

    config: Any

    def push_to_hub(
        self,
        repo_id: str,
        *,
        target: str | None = None,
        license: str | None = None,
        acceptance: dict[str, float] | None = None,
        card: ModelCard | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> Any:
        """Commit config, weights and model card to the hub; as ``PreTrainedModel.push_to_hub``.

        An existing card of the repository stays, unless this call gives something for the card.

        Args:
            repo_id: "owner/name"; created if missing.
            target: hub id of the target; license: the hub's name for it, as "apache-2.0"; acceptance: mean
                acceptance length by set of prompts. All for the card.
            card: your own card instead.
            commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: as
                in transformers.

        Returns:
            huggingface_hub's ``CommitInfo``.

        Raises:
            ValueError: `save_pretrained` or the card refuses, before any request to the hub.
            huggingface_hub.errors.HfHubHTTPError: the hub refuses.
        """
        facts: Any = {"target": target, "license": license, "acceptance": acceptance, "tags": tags}
        keeps = card is None and not any(facts.values())
        with tempfile.TemporaryDirectory() as folder:
            # Both may refuse: before the repository is created.
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            hub_card(self, repo_id, **facts)
            api = HfApi(token=token, library_name="torch-dflash")
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id  # with its owner
            if revision is not None and not revision.startswith("refs/pr") and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            if not (keeps and api.file_exists(repo_id, CARD, revision=revision)):
                (card or hub_card(self, repo_id, **facts)).save(Path(folder, CARD))
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                create_pr=create_pr,
                commit_message=commit_message or "Upload DFlash drafter",
                commit_description=commit_description,
            )

    def save_pretrained(self, save_directory: Any, *args: Any, push_to_hub: bool = False, **kwargs: Any):
        """Write ``config.json`` and safetensors; as ``PreTrainedModel.save_pretrained``.

        Raises:
            ValueError: ``push_to_hub=True``, which would write transformers' empty card; or the drafter's
                layout does not state ``vocab_size``.
        """
        if push_to_hub:
            raise ValueError("push_to_hub=True in save_pretrained: call drafter.push_to_hub(repo_id).")
        parent: Any = super()
        if not self.config.vocab_size:
            raise ValueError("vocab_size=0: set drafter.config.vocab_size to the target's number of ids.")
        parent.save_pretrained(save_directory, *args, **kwargs)


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
    """The card: target, fields, loading code and acceptance lengths; missing facts are named as unknown.

    Args:
        drafter: a `DFlashDraftModel`. repo_id: where the card will lie.
        target, license, acceptance: as in `OnHub.push_to_hub`. tags: besides `TAGS`.
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
    own = extras_of(config)
    if not own:
        return "It has no embedding and no head: both are the target's."
    shown = ", ".join(f"`{name}={value}`" for name, value in own.items())
    return f"It has parts that only torch-dflash reads from these files: {shown}."
