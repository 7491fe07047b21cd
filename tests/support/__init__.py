"""Shared parts of the tests: tiny models, scripted drafters, the authors' own code, refusals."""

from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""XLA's flags for programs that run once; the Makefile asks this file for them."""
# Later ones end on a flag that they do not know.
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"

if __name__ == "__main__":
    print(COMPILE_FAST)
