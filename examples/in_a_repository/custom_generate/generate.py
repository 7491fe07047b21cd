"""Put this folder into a model's repository, and its ``generate`` decodes in blocks.

    target.generate(**inputs, custom_generate="you/model", trust_remote_code=True, assistant_model=drafter)

A model that is loaded from there with ``trust_remote_code=True`` needs no ``custom_generate``. All arguments
arrive: streamer, tokenizer and stop strings too. Without ``assistant_model`` decoding is plain.
"""

import torch_dflash as td


def generate(model, inputs=None, input_ids=None, assistant_model=None, **arguments):
    """`torch_dflash.generate`, by transformers' contract of custom generate functions."""
    asked = {name: value for name, value in arguments.items() if value is not None}
    return td.generate(model, assistant_model, inputs if input_ids is None else input_ids, **asked)
