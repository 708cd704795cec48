"""Shared prompts in TRL's trainers: :func:`share`.

The trainer's own loss, optimizer, clipping and logging stay as they are; its log-probabilities and
entropies come from :meth:`dormouse.hf.SharedPrefix.window`. ``docs/trainers.md`` has the script.
"""

from __future__ import annotations

from ..trainers import UnsupportedTrainerError
from ..trainers.options import Options
from .refusals import check_class
from .scores import Sharing
from .trainer import SharedScores

__all__ = ["Sharing", "UnsupportedTrainerError", "share"]


def share(trainer_class: type, **options) -> type:
    """Returns a subclass of TRL's ``GRPOTrainer`` or ``RLOOTrainer``, or of a subclass of either,
    that computes equal prompts once per accumulation window::

        trainer = dormouse.trl.share(GRPOTrainer)(model=..., args=..., ...)

    Rows that share a prompt meet whatever microbatches TRL's shuffle put them in. The rows, losses
    and metrics of every microbatch stay its own, so every loss type is exact. The model runs
    forward and backward in the backward of the window's last microbatch, or forward in its first.
    Gradient checkpointing is suspended in these passes: the prompt sleeps instead. A window in
    which no prompt is shared runs as in ``trainer_class``, and the first one is logged.

    The first call in each state of the model compares the trainer's own log-probabilities,
    entropies and gradients of a small padded batch with the shared ones, and raises
    :class:`UnsupportedTrainerError` if they differ. It is also raised, by the constructor, for what
    is known not to be supported.

    ``options``: of :class:`dormouse.trainers.options.Options`. Without a ``runtime``, on a CPU one
    of the process's own, with the settings of the environment; on a GPU pass
    ``dormouse.install().runtime``.

    ``trainer.sharing`` counts what was shared: :class:`Sharing`.
    """
    check_class(trainer_class)
    attributes = {
        "__module__": trainer_class.__module__,
        "__qualname__": trainer_class.__qualname__,
        "__doc__": trainer_class.__doc__,
        "sharing_options": Options.of(options),
    }
    return type(trainer_class.__name__, (SharedScores, trainer_class), attributes)
