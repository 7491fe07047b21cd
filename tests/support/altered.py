"""Llamas that read changed embeddings."""

import transformers as hf

from support.tiny import BASE, randomise
from torch_dflash.cache.view import CACHE


def llama(name, init=None, **more):
    """A class named ``name``; ``init(model)`` adds parts to a new model."""

    def __init__(self, config):
        hf.LlamaForCausalLM.__init__(self, config)
        init(self)

    return type(name, (hf.LlamaForCausalLM,), more | ({"__init__": __init__} if init else {}))


def altered(name, change, init=None, **more):
    """A Llama that reads ``change(model, embeddings [B, L, D], ids, tokens in the cache)``.

    Without a cache the last argument is None.
    """

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        seen = kwargs[CACHE].get_seq_length() if kwargs.get(CACHE) is not None else None
        embeds = change(self, self.get_input_embeddings()(input_ids), input_ids, seen)
        return hf.LlamaForCausalLM.forward(self, inputs_embeds=embeds, position_ids=position_ids, **kwargs)

    return llama(name, init, forward=forward, **more)


def tiny(kind, **fields):
    return randomise(kind(hf.LlamaConfig(**BASE, **fields)), 0)
