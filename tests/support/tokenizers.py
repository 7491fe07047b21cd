"""A tokenizer of bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if terse %}!{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def byte_tokenizer(template=None):
    """One token per byte, so that characters beyond ASCII are cut anywhere; </s> stops."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0, **{letter: number for number, letter in enumerate(alphabet, 1)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = template
    return tokenizer
