"""Logits rules: penalties, bans, forced ids, filters, grammars, and rules of users."""

from torch_dflash.processors.custom import BlockProcessor as BlockProcessor
from torch_dflash.processors.custom import HostProcessor as HostProcessor
from torch_dflash.processors.endings import ForcedTokens as ForcedTokens
from torch_dflash.processors.endings import LengthDecay as LengthDecay
from torch_dflash.processors.grammars import GrammarMatcher as GrammarMatcher
from torch_dflash.processors.grammars import GrammarTable as GrammarTable
from torch_dflash.processors.interface import Processor as Processor
from torch_dflash.processors.interface import Text as Text
from torch_dflash.processors.ngrams import NoRepeatNgram as NoRepeatNgram
from torch_dflash.processors.penalties import OccurrencePenalty as OccurrencePenalty
from torch_dflash.processors.penalties import RepetitionPenalty as RepetitionPenalty
from torch_dflash.processors.sequences import Bans as Bans
from torch_dflash.processors.sequences import SequenceBias as SequenceBias
from torch_dflash.processors.warpers import EpsilonCutoff as EpsilonCutoff
from torch_dflash.processors.warpers import EtaCutoff as EtaCutoff
from torch_dflash.processors.warpers import TypicalP as TypicalP
