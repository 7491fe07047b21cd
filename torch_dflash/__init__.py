"""DFlash for PyTorch: block-diffusion speculative decoding, batched, static-shaped and lossless.

Shape alphabet, used in every signature: B batch, T prompt length, W block width (anchor included),
M verify rows, N drafted nodes, S capacity, L layers, H hidden, Q query heads, G kv heads, D head dim,
V vocabulary, P pages, n tapped layers, C prompt-chunk width, R rows of any other kind, E stop ids.

This package never imports JAX; ``runtime="xla"`` loads `jax_bridge` when it is first used.
"""

from torch_dflash.demo.pair import load_demo_pair as load_demo_pair
from torch_dflash.demo.target import load_demo_target as load_demo_target
from torch_dflash.engine.engine import Engine as Engine
from torch_dflash.engine.outputs import GenerateOutput as GenerateOutput
from torch_dflash.engine.state_file import load_state as load_state
from torch_dflash.engine.state_file import save_state as save_state
from torch_dflash.engine.stats import DecodeStats as DecodeStats
from torch_dflash.engine.text import TextStream as TextStream
from torch_dflash.generation import compile as compile
from torch_dflash.generation import generate as generate
from torch_dflash.integrations.transformers import dflash as dflash
from torch_dflash.plan import DecodePlan as DecodePlan
from torch_dflash.proposers.base import Proposer as Proposer
from torch_dflash.proposers.dflash.config import DFlashConfig as DFlashConfig
from torch_dflash.proposers.dflash.model import DFlashDraftModel as DFlashDraftModel
from torch_dflash.proposers.ngram import NGramProposer as NGramProposer
from torch_dflash.state import DecodeState as DecodeState
from torch_dflash.state import Draft as Draft
from torch_dflash.verification.agreement import Agreement as Agreement
from torch_dflash.verification.verify import check as check

__version__ = "0.1.0"
