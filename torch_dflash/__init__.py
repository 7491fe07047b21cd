"""DFlash for PyTorch: block-diffusion speculative decoding, batched, static-shaped and lossless.

docs/glossary.md has the letters of every shape annotation.

A public name is imported at its first use, for torch and transformers take seconds. This package never
imports JAX; ``runtime="xla"`` loads `jax_bridge` when it is first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch_dflash._version import __version__ as __version__

_PUBLIC = {
    "chat": "Chat",
    "demo.pair": "load_demo_pair",
    "demo.target": "load_demo_target",
    "doctor": "Diagnosis diagnose",
    "engine.engine": "Engine",
    "engine.outputs": "DecodeStats GenerateOutput Share",
    "engine.replicas": "Replicas",
    "engine.saved": "load_state save_state",
    "engine.slots": "Handle QueueFull Slots",
    "generation": "compile generate",
    "grammars.grammar": "Grammar",
    "integrations.spec_generate": "spec_generate",
    "integrations.transformers": "dflash",
    "pieces": "Piece TextStream stream",
    "plan": "DecodePlan",
    "processors.custom": "BlockProcessor HostProcessor",
    "proposers.base": "Proposer",
    "proposers.checkpoints": "load_drafter",
    "proposers.dflash.config": "DFlashConfig",
    "proposers.dflash.model": "DFlashDraftModel",
    "proposers.dflash2.model": "DFlash2Config DFlash2DraftModel",
    "proposers.eagle3.model": "Eagle3Config Eagle3DraftModel",
    "proposers.medusa.model": "MedusaConfig MedusaDraftModel",
    "proposers.narrow": "frequent_ids with_draft_vocabulary",
    "proposers.lookahead": "LookaheadProposer",
    "proposers.ngram": "NGramProposer",
    "proposers.trees.nodes": "Nodes",
    "proposers.trees.proposer": "TreeProposer",
    "proposers.union": "Union",
    "published.load": "load_pair",
    "published.rows": "Checkpoint checkpoints",
    "server.app": "asgi_app",
    "state": "DecodeState Draft",
    "verify.check": "check",
    "verify.result": "Agreement",
}
"""The public names by module. Type checkers cannot read this table; a test compares it with their imports."""
_MODULES = {name: f"torch_dflash.{module}" for module, names in _PUBLIC.items() for name in names.split()}
_ROOMS = ("processors",)
"""Packages whose own names docs and messages use, as in ``td.processors.GrammarTable``."""

__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_ROOMS})


if TYPE_CHECKING:
    from torch_dflash import processors as processors
    from torch_dflash.chat import Chat as Chat
    from torch_dflash.demo.pair import load_demo_pair as load_demo_pair
    from torch_dflash.demo.target import load_demo_target as load_demo_target
    from torch_dflash.doctor import Diagnosis as Diagnosis
    from torch_dflash.doctor import diagnose as diagnose
    from torch_dflash.engine.engine import Engine as Engine
    from torch_dflash.engine.outputs import DecodeStats as DecodeStats
    from torch_dflash.engine.outputs import GenerateOutput as GenerateOutput
    from torch_dflash.engine.outputs import Share as Share
    from torch_dflash.engine.replicas import Replicas as Replicas
    from torch_dflash.engine.saved import load_state as load_state
    from torch_dflash.engine.saved import save_state as save_state
    from torch_dflash.engine.slots import Handle as Handle
    from torch_dflash.engine.slots import QueueFull as QueueFull
    from torch_dflash.engine.slots import Slots as Slots
    from torch_dflash.generation import compile as compile
    from torch_dflash.generation import generate as generate
    from torch_dflash.grammars.grammar import Grammar as Grammar
    from torch_dflash.integrations.spec_generate import spec_generate as spec_generate
    from torch_dflash.integrations.transformers import dflash as dflash
    from torch_dflash.pieces import Piece as Piece
    from torch_dflash.pieces import TextStream as TextStream
    from torch_dflash.pieces import stream as stream
    from torch_dflash.plan import DecodePlan as DecodePlan
    from torch_dflash.processors.custom import BlockProcessor as BlockProcessor
    from torch_dflash.processors.custom import HostProcessor as HostProcessor
    from torch_dflash.proposers.base import Proposer as Proposer
    from torch_dflash.proposers.checkpoints import load_drafter as load_drafter
    from torch_dflash.proposers.dflash.config import DFlashConfig as DFlashConfig
    from torch_dflash.proposers.dflash.model import DFlashDraftModel as DFlashDraftModel
    from torch_dflash.proposers.dflash2.model import DFlash2Config as DFlash2Config
    from torch_dflash.proposers.dflash2.model import DFlash2DraftModel as DFlash2DraftModel
    from torch_dflash.proposers.eagle3.model import Eagle3Config as Eagle3Config
    from torch_dflash.proposers.eagle3.model import Eagle3DraftModel as Eagle3DraftModel
    from torch_dflash.proposers.lookahead import LookaheadProposer as LookaheadProposer
    from torch_dflash.proposers.medusa.model import MedusaConfig as MedusaConfig
    from torch_dflash.proposers.medusa.model import MedusaDraftModel as MedusaDraftModel
    from torch_dflash.proposers.narrow import frequent_ids as frequent_ids
    from torch_dflash.proposers.narrow import with_draft_vocabulary as with_draft_vocabulary
    from torch_dflash.proposers.ngram import NGramProposer as NGramProposer
    from torch_dflash.proposers.trees.nodes import Nodes as Nodes
    from torch_dflash.proposers.trees.proposer import TreeProposer as TreeProposer
    from torch_dflash.proposers.union import Union as Union
    from torch_dflash.published.load import load_pair as load_pair
    from torch_dflash.published.rows import Checkpoint as Checkpoint
    from torch_dflash.published.rows import checkpoints as checkpoints
    from torch_dflash.server.app import asgi_app as asgi_app
    from torch_dflash.state import DecodeState as DecodeState
    from torch_dflash.state import Draft as Draft
    from torch_dflash.verify.check import check as check
    from torch_dflash.verify.result import Agreement as Agreement
else:  # out of type checkers' sight, so that they report a mistyped name

    def __getattr__(name: str) -> Any:
        """Import the module of a public name, and keep the name here (PEP 562)."""
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        if "torch_dflash.proposers.dflash.model" in sys.modules:  # drafters get the method of that name
            import_module("torch_dflash.integrations.spec_generate")
        return value
