"""What the adapters of other people's trainers have in common."""

from .refusals import UnsupportedTrainerError

__all__ = ["UnsupportedTrainerError"]
