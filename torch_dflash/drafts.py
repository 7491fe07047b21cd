"""What a proposer hands back, held to what a round can verify."""

from __future__ import annotations
