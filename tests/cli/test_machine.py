"""Figures name the processor that they were measured on."""

import pytest
import torch

from torch_dflash.cli import outputs
from torch_dflash.storage import machine


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("fma avx2", "1 x AMD EPYC, avx2"),
        ("avx2 avx512f", "1 x AMD EPYC, avx512f"),
        ("avx2 avx512f avx512_vnni avx512_bf16", "1 x AMD EPYC, avx512_bf16 avx512_vnni"),
        ("asimd", "1 x AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_what_they_multiply_with(monkeypatch, flags, said):
    values = {"model name": ["AMD EPYC"], "flags": [flags]}
    monkeypatch.setattr(machine, "_values", values.__getitem__)
    assert machine.processor.__wrapped__() == said


def test_figures_name_the_gpu_that_torch_runs_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert outputs.hardware().startswith("CPU: ")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert outputs.hardware().startswith("NVIDIA H200; CPU: ")
