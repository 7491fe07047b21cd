"""A pair's configs with fewer of the target's layers, for what does not depend on how many there are."""

from __future__ import annotations

from typing import Any


def keep_layers(target: Any, drafter: Any, layers: int) -> None:
    """Keep the first ``layers`` of a config; as many taps as before, at the same share of the depth.

    Args:
        target: a causal LM's config, of at least so many layers; changed in place, as ``drafter`` is.
        drafter: a DFlash drafter's config; anything else has no taps.
        layers: at least 1.
    """
    base = target.get_text_config()
    depth = base.num_hidden_layers
    for name, value in base.to_dict().items():
        if isinstance(value, list) and len(value) == depth:  # one entry per layer, such as layer_types
            setattr(base, name, value[:layers])
    base.num_hidden_layers = layers
    if hasattr(drafter, "target_layer_ids"):
        drafter.num_target_layers = layers
        drafter.target_layer_ids = [tap * layers // depth for tap in drafter.target_layer_ids]
