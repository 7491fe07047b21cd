"""Drafting methods: the `Proposer` base class and its implementations."""

from torch_dflash.proposers.base import Proposer as Proposer
from torch_dflash.proposers.dflash.proposer import DFlashProposer as DFlashProposer
from torch_dflash.proposers.ngram import NGramProposer as NGramProposer
from torch_dflash.proposers.plain import PlainProposer as PlainProposer
