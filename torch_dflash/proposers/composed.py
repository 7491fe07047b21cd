"""Drafting methods made of others: what a user builds, and the recipe by which an engine builds it again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch_dflash.proposers.base import Proposer


@runtime_checkable
class Recipe(Hashable, Protocol):
    """How a proposer is made of another one: frozen, with a value, so that equal recipes share engines."""

    def build(self, inner: Proposer) -> Proposer:
        """The proposer that keeps ``inner`` under that name."""
        ...


@dataclass(frozen=True, eq=False)
class Composed:
    """A ``drafter`` of the user's, and what is made of it.

    Engines refer to the drafter alone, and weakly: one that is composed anew for each call finds its engine.
    """

    drafter: Any
    recipe: Recipe


def inner_of(drafter: Any) -> Any:
    """What holds the weights: the drafter in a `Composed`, any other as it is."""
    return drafter.drafter if isinstance(drafter, Composed) else drafter


def recipe_of(drafter: Any) -> Recipe | None:
    """How the proposer is made of `inner_of`; None: it is that one."""
    return drafter.recipe if isinstance(drafter, Composed) else None
