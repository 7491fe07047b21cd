"""What tests share: tiny models, scripted drafters, the authors' own code, refusals."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""XLA's flags for programs that run once, as in the Makefile."""
