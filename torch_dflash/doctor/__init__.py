"""Explains low acceptance: checks the fields of a pair, then judges the pair under other conventions."""

from torch_dflash.doctor.answers import diagnose as diagnose
from torch_dflash.doctor.diagnosis import Diagnosis as Diagnosis
from torch_dflash.doctor.diagnosis import judge_texts as judge_texts
