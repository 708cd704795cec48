"""Shared-prefix training steps for Hugging Face transformers models.

:class:`SharedPrefix` computes a rollout group's prompt once per step instead of once per response.
It raises :class:`UnsupportedModelError` for architectures for which it would not be exact.
"""

from .shared_prefix import RanksReport, SharedPrefix, StepReport
from .support import UnsupportedModelError

__all__ = ["RanksReport", "SharedPrefix", "StepReport", "UnsupportedModelError"]
