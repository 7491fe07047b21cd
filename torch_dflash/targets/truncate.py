"""A pair's configs with fewer target layers, for results that do not depend on their number."""

from __future__ import annotations

from typing import Any


def keep_layers(target: Any, drafter: Any, layers: int) -> None:
    """Keep the first ``layers`` of a config, with as many taps at the same relative depths.

    Args:
        target: a causal LM's config of at least ``layers`` layers; both configs are changed in place.
        drafter: a DFlash drafter's config; other values have no taps.
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
