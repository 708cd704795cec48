"""Shared prompts in OpenRLHF's actor: :func:`share` and :func:`register`.

OpenRLHF's losses, optimizer, clipping and metrics stay as they are; log-probabilities and entropies
come from :meth:`dormouse.hf.SharedPrefix.score_packed`. ``docs/trainers.md`` has the command.
"""

from __future__ import annotations

from ..trainers import UnsupportedTrainerError
from ..trainers.late import when_imported
from ..trainers.options import Options
from ..trainers.sharing import Sharing
from .actor import replacements
from .refusals import check_class

__all__ = ["Sharing", "UnsupportedTrainerError", "register", "restore", "share"]

# Where a shared class keeps its own methods.
_OWN = "_dormouse_own_methods"

# Where OpenRLHF defines its actor.
MODULE = "openrlhf.models.actor"


def share(actor_class: type, **options) -> type:
    """Makes OpenRLHF's ``Actor`` compute equal prompts once per call, and returns the class.

    Its ``__init__`` and ``forward`` are replaced on the class itself, because OpenRLHF's workers
    import it by name; :func:`restore` puts them back. A row's prompt is its tokens before the first
    of ``action_mask``. Rows that share it must be in one micro-batch. Calls without ``action_mask``
    run the class's own forward.

    The ``output`` that a call returns beside log-probabilities has ``entropy``, ``[rows, columns -
    1]`` and 0 outside responses. Its other attributes raise :class:`UnsupportedTrainerError`.
    Gradient checkpointing is suspended in the shared passes: the prompt sleeps instead.

    The first call in training mode, and the first in evaluation mode, compares the class's own
    log-probabilities and entropies of a few short rows with the shared ones, and raises
    :class:`UnsupportedTrainerError` if they differ. It is also raised for what is known not to be
    supported.

    ``options``: of :class:`dormouse.trainers.options.Options`. Without a ``runtime``, that of
    ``dormouse.install()``, called before an actor loads its model.

    ``actor.sharing`` counts what was shared: :class:`Sharing`. Not thread-safe.
    """
    if _OWN in vars(actor_class):
        raise UnsupportedTrainerError(
            f"{actor_class.__name__} shares prompts already; accepted: one share(), or restore() "
            "first"
        )
    check_class(actor_class)
    methods = replacements(actor_class, Options.of(options))
    setattr(actor_class, _OWN, {name: vars(actor_class)[name] for name in methods})
    for name, method in methods.items():
        setattr(actor_class, name, method)
    return actor_class


def restore(actor_class: type) -> None:
    """Puts back the methods that :func:`share` replaced. Does nothing for another class."""
    for name, method in vars(actor_class).get(_OWN, {}).items():
        setattr(actor_class, name, method)
    if _OWN in vars(actor_class):
        delattr(actor_class, _OWN)


def register(**options) -> None:
    """Calls :func:`share` for OpenRLHF's ``Actor``, now or as soon as this process imports it.
    ``options``: of :func:`share`.

    It is a hook for Ray's workers: OpenRLHF itself is not imported by it.
    """
    when_imported(MODULE, lambda module: share(module.Actor, **options))
