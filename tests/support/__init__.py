"""What tests share: tiny models, scripted drafters, the authors' own code, refusals."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
