"""The ways from transformers into block decoding, each a function of a pair, its inputs and its options."""

from typing import Any

import torch
from transformers import pipeline

import torch_dflash as td
from support import ROOT
from support.families import MORE
from support.tiny import BASE, FAMILIES, correlate, make_drafter, make_pair, randomise
from support.tokenizers import letters
from torch_dflash.requests.rules import KINDS

FOLDER = str(ROOT / "examples" / "in_a_repository")


def pair_of(family: str) -> tuple[Any, Any]:
    """A target of ``family``, and a drafter with about half the drafts right."""
    if family in FAMILIES:
        return make_pair(family, agree=2.5)
    cls, config, extra = MORE[family]
    torch.manual_seed(0)
    target = randomise(cls(config(**(BASE | extra))), 0)
    drafter = make_drafter(target)
    correlate(target, drafter, 2.5)
    if getattr(target.config, "attn_logit_softcapping", None):
        target.set_attn_implementation("eager")  # sdpa drops the cap in older versions of transformers
    return target, drafter


def generate(pair, inputs, **options):
    return td.generate(*pair, **inputs, **({"runtime": "eager"} | options))


def custom_generate(pair, inputs, runtime="eager", **options):
    return pair[0].generate(**inputs, **options, custom_generate=td.dflash(pair[1], runtime=runtime))


def folder(pair, inputs, **options):
    """``target.generate(custom_generate="a repository")`` with a repository that holds our folder."""
    asked = {"custom_generate": FOLDER, "trust_remote_code": True, "runtime": "eager"} | options
    return pair[0].generate(**inputs, **asked, assistant_model=pair[1])


def compiled(pair, inputs, runtime="eager", **options):
    rules = tuple(name for name in options if name in KINDS)
    told = tuple(name for name in ("output_scores", "output_logits") if options.get(name))
    shape = {"max_length": 64, "batch_size": len(inputs["input_ids"])}
    engine = td.compile(*pair, runtime=runtime, **shape, processors=rules or None, outputs=told)
    return engine.generate(**inputs, **options)


def native(pair, inputs, **options):
    """transformers' own loop: ``assistant_model=drafter, speculation_type="dflash"``; one row."""
    asked = {"assistant_model": pair[1], "speculation_type": "dflash"} | options
    return pair[0].generate(**inputs, **asked)


def spec_generate(pair, inputs, max_new_tokens, eos_token_id=None, **options):
    asked = {"runtime": "eager"} | {name: value for name, value in options.items() if name != "do_sample"}
    return pair[1].spec_generate(pair[0], inputs["input_ids"], max_new_tokens, eos_token_id, **asked)


def through_pipeline(pair, inputs, **options):
    """``pipeline("text-generation")(..., custom_generate=td.dflash(drafter))``: ids of one row."""
    words, _ = letters()
    pipe = pipeline("text-generation", model=pair[0], tokenizer=words, device="cpu")
    prompt = words.decode(inputs["input_ids"][0])
    asked = {"return_tensors": True, "custom_generate": td.dflash(pair[1], runtime="eager")} | options
    return torch.tensor([pipe(prompt, **asked)[0]["generated_token_ids"]])


OF_ROWS = {"generate": generate, "custom_generate": custom_generate, "folder": folder, "compiled": compiled}
"""Doors of ragged batches and of transformers' options."""
OF_ONE = {"native": native, "spec_generate": spec_generate, "pipeline": through_pipeline}
"""Doors of one row without padding."""
DOORS = OF_ROWS | OF_ONE
