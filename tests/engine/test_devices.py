"""A target on another device than XLA's: one line says what happens and what to pass."""

import pytest
import torch
from support.tiny import make_pair
from transformers import PreTrainedModel

import torch_dflash as td

IDS = torch.tensor([[5, 6, 7]])
WORDS = {
    "cuda:0": "Pass runtime='eager' to decode on the GPU.",
    "xla:0": "keep the target on the CPU (target.to('cpu')), or load it with jax_bridge.load",
}


def heard(caplog):
    """Without what another test's engine may still compile."""
    return [line for line in caplog.messages if "compiling" not in line]


@pytest.mark.parametrize("place", WORDS)
def test_the_line_names_the_device_and_the_way_out(place, monkeypatch, caplog):
    pair = make_pair("llama")
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda model: torch.device(place)))
    td.compile(*pair, runtime="eager", max_length=64, verify=False)
    assert not heard(caplog)
    td.compile(*pair, max_length=64, verify=False)  # a twin would be made there
    td.compile(*pair, max_length=128, verify=False)
    (line,) = heard(caplog)
    assert f"the target is on {place}; runtime='xla' copies its weights to JAX's default device" in line
    assert WORDS[place] in line


def test_nothing_is_said_of_the_cpu(caplog):
    td.compile(*make_pair("llama"), max_length=64)
    assert not heard(caplog)
