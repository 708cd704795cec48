"""Shared-prefix training steps for Hugging Face transformers models.

:class:`SharedPrefix` computes a rollout group's prompt once per step instead of once per response.
Models for which that would not be exact raise :class:`UnsupportedModelError`: see :mod:`.check`.
"""

from .check import Checked
from .filter.choice import top_share
from .filter.graph import FilterReport
from .filter.model import TokenFilter, token_filter
from .likelihood import entropies, log_probabilities
from .measured import attention_choices
from .outputs import Output
from .score import GroupScores
from .shared_prefix import RanksReport, SharedPrefix
from .step_report import StepReport
from .support import UnsupportedModelError, Way

__all__ = [
    "Checked",
    "FilterReport",
    "GroupScores",
    "Output",
    "RanksReport",
    "SharedPrefix",
    "StepReport",
    "TokenFilter",
    "UnsupportedModelError",
    "Way",
    "attention_choices",
    "entropies",
    "log_probabilities",
    "token_filter",
    "top_share",
]
