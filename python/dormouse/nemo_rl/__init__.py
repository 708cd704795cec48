"""Shared prompts in NeMo-RL's DTensor policy worker: :func:`share` and :func:`register`.

NeMo-RL's losses, optimizer, clipping and metrics stay as they are; log-probabilities come from
:meth:`dormouse.hf.SharedPrefix.score_packed`. Not run with NeMo-RL: ``docs/trainers.md``.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ..trainers import UnsupportedTrainerError
from ..trainers.late import when_imported
from ..trainers.options import Options
from ..trainers.runtimes import runtime_beside_ipc
from ..trainers.sharing import Sharing
from .forward import SharedForward
from .refusals import FUNCTION, check_module

__all__ = ["Sharing", "UnsupportedTrainerError", "register", "restore", "share"]

# Where NeMo-RL defines its forward of a micro-batch.
MODULE = "nemo_rl.models.automodel.train"
# What imports it from there.
WORKER = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2"


def share(module: ModuleType, **options) -> SharedForward:
    """Replaces ``forward_with_post_processing_fn`` in NeMo-RL's module :data:`MODULE` by one that
    computes equal prompts once per micro-batch, and returns it; :func:`restore` puts NeMo-RL's back.

    NeMo-RL's worker imports the function by name, so this comes before the worker's import. A row's
    prompt is its tokens before the first of ``token_mask``. Values of prompts' tokens, which
    NeMo-RL's losses mask, are 0. Calls for anything but log-probabilities of rows with a
    ``token_mask`` run NeMo-RL's function.

    The first call for a model in training mode, and the first in evaluation mode, compares NeMo-RL's
    log-probabilities of a few short rows with the shared ones, and raises
    :class:`UnsupportedTrainerError` if they differ. It is also raised for what is known not to be
    supported.

    ``options``: of :class:`dormouse.trainers.options.Options`. Without a ``runtime``, that of
    an earlier ``dormouse.install()``, or of one made here in a mode in which torch keeps its
    allocator, so that weights may travel by CUDA IPC. Prompts then stay awake on a GPU.

    The returned function's ``sharing`` counts what was shared: :class:`Sharing`. Not thread-safe.
    """
    check_module(module)
    own = getattr(module, FUNCTION)
    if isinstance(own, SharedForward):
        raise UnsupportedTrainerError(
            f"{module.__name__} shares prompts already; accepted: one share(), or restore() first"
        )
    # A worker whose import has only begun has no name for it yet: it gets the new one.
    if getattr(sys.modules.get(WORKER), FUNCTION, None) is own:
        raise UnsupportedTrainerError(
            f"{WORKER} was imported earlier and still refers to NeMo-RL's own function; accepted: "
            "share() before that import"
        )
    found = Options.of(options)
    shared = SharedForward(module, own, found.runtime or runtime_beside_ipc(), found)
    setattr(module, FUNCTION, shared)
    return shared


def restore(module: ModuleType) -> None:
    """Puts back the function that :func:`share` replaced. Does nothing for another module."""
    shared = getattr(module, FUNCTION, None)
    if isinstance(shared, SharedForward):
        setattr(module, FUNCTION, shared.own)


def register(**options) -> None:
    """Calls :func:`share` for NeMo-RL's module, now or as soon as this process imports it.
    ``options``: of :func:`share`."""
    when_imported(MODULE, lambda module: share(module, **options))
