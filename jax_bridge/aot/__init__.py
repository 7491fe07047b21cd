"""Programs compiled for absent TPUs: the bytes that they move, and their floors."""

from jax_bridge.aot.compile import AbstractPair as AbstractPair
from jax_bridge.aot.compile import CompiledStep as CompiledStep
from jax_bridge.aot.compile import abstract_pair as abstract_pair
from jax_bridge.aot.compile import compile_function as compile_function
from jax_bridge.aot.compile import compile_round as compile_round
from jax_bridge.aot.compile import compile_step as compile_step
from jax_bridge.aot.compile import export_round as export_round
from jax_bridge.aot.memory import fit_memory as fit_memory
from jax_bridge.aot.shapes import find_topology as find_topology
