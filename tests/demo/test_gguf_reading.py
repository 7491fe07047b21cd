"""transformers makes the same model of a GGUF file that is parsed once."""

import threading
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from torch_dflash.demo.target import MADE, parsed_once

HIDDEN, INNER, VOCAB = 32, 64, 8


@pytest.fixture
def folder(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    square, tall, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    layer = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square)
    layer |= {"ffn_gate": tall, "ffn_up": tall, "ffn_down": wide}
    layer |= dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,))
    random = np.random.default_rng(0)
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in layer.items()}).items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf", dtype=torch.float32)


def test_the_model_is_the_same_and_the_file_is_parsed_once(folder, monkeypatch):
    calls = dict.fromkeys(MADE, 0)

    def counted(name, make, *args):
        calls[name] += 1
        return make(*args)

    for name in MADE:
        monkeypatch.setattr(gguf, name, partial(counted, name, getattr(gguf, name)))
    wanted = load(folder).state_dict()
    assert all(count > 1 for count in calls.values()), calls  # otherwise this room is not needed any more
    calls.update(dict.fromkeys(MADE, 0))
    with parsed_once():
        found = load(folder).state_dict()
    assert calls == dict.fromkeys(MADE, 1)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert wanted["model.layers.0.mlp.down_proj.weight"].abs().sum() > 0


def test_a_second_thread_waits_for_the_first():
    own, within, inside = gguf.GGUFReader, threading.Event(), []

    def second():
        within.set()
        with parsed_once():
            inside.append(gguf.GGUFReader)

    thread = threading.Thread(target=second, daemon=True)
    with parsed_once():
        first = gguf.GGUFReader
        thread.start()
        assert within.wait(20)
        thread.join(0.2)
        assert thread.is_alive() and gguf.GGUFReader is first
    thread.join(20)
    assert len(inside) == 1 and inside[0].__wrapped__ is own and gguf.GGUFReader is own


def test_gguf_is_as_before_after_an_error():
    own = {name: getattr(gguf, name) for name in MADE}
    with pytest.raises(OSError, match="full"), parsed_once():
        assert all(getattr(gguf, name) is not own[name] for name in MADE)
        raise OSError("full")
    assert {name: getattr(gguf, name) for name in MADE} == own
