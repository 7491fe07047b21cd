"""What models call their cache: ``cache`` since transformers 5.24, ``past_key_values`` before."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE = "cache"
if all(field.name != CACHE for field in fields(BaseModelOutputWithPast)):
    CACHE = "past_key_values"
