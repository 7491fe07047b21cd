"""`Vocabulary`: a tokenizer's ids with their bytes, for llguidance; and sets of ids as bits."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

_known: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()


def library(name: str) -> Any:
    """The optional library ``name``, which grammars need.

    Raises:
        ImportError: the library is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"a grammar needs {name} ({error}): pip install llguidance.") from error


class Vocabulary:
    """The ids of a fast ``tokenizer``; `of` caches one for each tokenizer, for making it takes a second.

    Attributes:
        tokenizer: llguidance's.
        size: number of ids. eos: llguidance's end ids; in this package a row's stop ids end a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        try:
            self.tokenizer = library("llguidance.hf").from_tokenizer(tokenizer)
        except ValueError as error:
            raise ValueError(
                f"tokenizer={type(tokenizer).__name__}: llguidance refuses it: {error}"
            ) from None
        self.size: int = self.tokenizer.vocab_size
        self.eos = frozenset(self.tokenizer.eos_tokens)

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The vocabulary of a transformers tokenizer.

        Raises:
            TypeError: no fast tokenizer. ValueError: llguidance cannot read it.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            fix = "a grammar needs the model's fast tokenizer (transformers' PreTrainedTokenizerFast)"
            raise TypeError(f"tokenizer={type(tokenizer).__name__}: {fix}.")
        found = _known.get(tokenizer)
        if found is None or found.size < len(tokenizer):  # a user added tokens
            found = _known[tokenizer] = cls(tokenizer)
        return found

    @cached_property
    def spelt(self) -> list[bytes]:
        """The bytes of each id; b"" for special ids."""
        special, decode = self.tokenizer.is_special_token, self.tokenizer.decode_bytes
        return [b"" if special(token) else decode([token]) for token in range(self.size)]


ALL = np.int32(-1)
"""The bits of 32 ids, all set."""


def words_of(vocab_size: int) -> int:
    """The number of int32 whose bits are a set of ``vocab_size`` ids."""
    return -(-vocab_size // 32)


def set_bits(bits: np.ndarray, ids: Iterable[int], value: bool) -> None:
    """Add ids to each set in ``bits`` [..., words], or remove them, in place."""
    for token in ids:
        if 0 <= token < 32 * bits.shape[-1]:
            bit = np.array(1 << token % 32, np.uint32).view(np.int32)
            word = bits[..., token // 32]
            bits[..., token // 32] = word | bit if value else word & ~bit


def holds(bits: np.ndarray, token: int) -> bool:
    """Whether ``token`` is in the set ``bits`` [words]."""
    return 0 <= token < 32 * len(bits) and bool(bits[token // 32] >> (token % 32) & 1)


def pack_bits(flags: np.ndarray) -> np.ndarray:
    """Bools [..., ids] as bits [..., words]."""
    spare = -flags.shape[-1] % 32
    whole = np.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, spare)])
    return np.ascontiguousarray(np.packbits(whole, axis=-1, bitorder="little")).view(np.int32)
