"""The folder that makes ``custom_generate="repository"`` decode in blocks, with all its arguments."""

import torch
from support import ROOT

FOLDER = str(ROOT / "examples" / "in_a_repository")
NEW = 12


class Streamer:  # keeps what it is given
    def __init__(self):
        self.put_ids, self.ended = [], False

    def put(self, ids):
        self.put_ids += ids.flatten().tolist()

    def end(self):
        self.ended = True


def test_the_text_is_transformers_own(pair, batch):
    target, drafter = pair
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    block = {"custom_generate": FOLDER, "trust_remote_code": True, "runtime": "eager"}
    for options in ({}, {"repetition_penalty": 1.7}, {"eos_token_id": [10, 33], "min_new_tokens": 4}):
        want = target.generate(**batch, **asked, **options)
        for assistant in (drafter, None):
            found = target.generate(**batch, **asked, **options, **block, assistant_model=assistant)
            assert torch.equal(found, want)


def test_a_streamer_and_a_dict_arrive(pair, batch):
    target, drafter = pair
    row, streamer = {name: value[:1] for name, value in batch.items()}, Streamer()
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    block = {"custom_generate": FOLDER, "trust_remote_code": True, "runtime": "eager"}
    out = target.generate(**row, **asked, **block, assistant_model=drafter, streamer=streamer)
    assert streamer.ended and streamer.put_ids == out.sequences[0].tolist()
    assert out.stats.mean_acceptance_length > 1
