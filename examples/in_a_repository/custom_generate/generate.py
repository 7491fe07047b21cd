"""Put this folder into a model's repository, and its ``generate`` decodes in blocks.

    target.generate(**inputs, custom_generate="you/model", trust_remote_code=True, assistant_model=drafter)

A model that is loaded from there with ``trust_remote_code=True`` needs no ``custom_generate``. All arguments
arrive: streamer, tokenizer and stop strings too. Without ``assistant_model`` the drafter is the one in the
subfolder ``drafter/`` of the model's own folder or repository, so that ``transformers serve FOLDER
--trust-remote-code`` finds it; without one decoding is plain.
"""

import os
from pathlib import Path
from weakref import WeakKeyDictionary

from transformers.utils.hub import has_file

import torch_dflash as td

_DRAFTERS = WeakKeyDictionary()


def generate(model, inputs=None, input_ids=None, assistant_model=None, **arguments):
    """`torch_dflash.generate`, by transformers' contract of custom generate functions."""
    asked = {name: value for name, value in arguments.items() if value is not None}
    if assistant_model is None:
        if model not in _DRAFTERS:
            _DRAFTERS[model] = _drafter_of(model)
        assistant_model = _DRAFTERS[model]
    return td.generate(model, assistant_model, inputs if input_ids is None else input_ids, **asked)


def _drafter_of(model):
    """The drafter beside a model's weights; None: there is none. One that cannot be read is an error."""
    source, own = model.name_or_path, vars(model).get("generate")
    place = {"subfolder": "drafter"}
    if os.path.isdir(source):
        found = os.path.isdir(os.path.join(source, "drafter"))
    else:  # of the hub, whose commit transformers has in this file's path; another repository has others
        place["revision"] = Path(__file__).parents[1].name
        found = getattr(getattr(own, "func", None), "__module__", "") == __name__ and has_file(
            source, "drafter/config.json", revision=place["revision"]
        )
    return td.load_drafter(source, model, dtype=model.dtype, **place).to(model.device) if found else None
