"""transformers' own DFlash assistant: fields at the top, ``fc`` and its norm within ``encoder``.

No layer is causal within the block. A window reaches ``sliding_window`` positions besides a row's own, one
more than z-lab's. The config has no ``vocab_size``.

Source: transformers 5.24, ``models/muse_glimmer_assistant``.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, Layout, architectures, whole_fields, without
from torch_dflash.proposers.layouts.zlab import zlabs

KIND, CLASS = "muse_glimmer_assistant", "MuseGlimmerAssistantModel"
OWN = ("block_size", "mask_token_id", "target_layer_ids")


def _claims(config: Fields) -> bool:
    return str(config.get("model_type") or "").endswith("_assistant") or CLASS in architectures(config)


def _fields(config: Fields, where: Any) -> Fields:
    kind = config.get("model_type") or KIND
    if kind != KIND:
        raise ValueError(f"model_type={kind!r} in {where}: of assistants only {KIND} is a DFlash drafter.")
    whole = whole_fields(KIND, config, where)
    read = without(whole, OWN) | {"is_causal": False, "vocab_size": config.get("vocab_size", 0)}
    if "sliding_attention" in read["layer_types"]:
        read |= {"sliding_window": whole["sliding_window"] + 1}
    return zlabs(read, "DFlashDraftModel", **{name: whole[name] for name in OWN})


ASSISTANT = Layout(
    "transformers' assistant",
    claims=_claims,
    fields=_fields,
    classes=(CLASS,),
    top=("vocab_size",),
    kinds=(KIND,),
    whole=True,
    renamed=((r"^encoder\.fc\.", "fc."), (r"^encoder\.output_norm_enc\.", "hidden_norm.")),
)
