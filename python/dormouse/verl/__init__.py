"""Shared prompts in verl's actor: :func:`share` and :func:`register`.

verl's losses, optimizer, clipping and metrics stay as they are; log-probabilities and entropies
come from :meth:`dormouse.hf.SharedPrefix.window_packed`. ``docs/trainers.md`` has the configuration.
"""

from __future__ import annotations

import logging
import os

from ..trainers import UnsupportedTrainerError
from ..trainers.options import Options
from ..trainers.sharing import Sharing
from .engine import SharedScores
from .refusals import check_class

_log = logging.getLogger(__name__)

# Strategies of verl for which :func:`register` puts an engine into its registry.
BACKENDS = frozenset({"fsdp", "fsdp2", "fsdp_turbo"})

__all__ = ["Sharing", "UnsupportedTrainerError", "register", "share"]


def share(engine_class: type, **options) -> type:
    """Returns a subclass of verl's ``FSDPEngineWithLMHead``, or of a subclass of it, that computes
    equal prompts once per batch that verl gives the engine.

    In an update that batch is a mini-batch: rows that share a prompt meet whatever micro-batches
    verl puts them in. The rows, losses and metrics of every micro-batch stay its own. The model
    runs forward and backward in the backward of the last micro-batch, or forward before the first.
    Values of prompts' tokens, which verl's losses do not read, are 0. Gradient checkpointing is
    suspended in these passes: the prompt sleeps instead.

    All weights of the model are gathered for the time of a batch, in the dtype of
    ``mixed_precision``, and the gradients are averaged over ranks once, at its end.

    The first batch in training mode, and the first in evaluation mode, compares verl's own
    log-probabilities and entropies of a few short rows with the shared ones, and raises
    :class:`UnsupportedTrainerError` if they differ. It is also raised for what is known not to be
    supported.

    ``options``: of :class:`dormouse.trainers.options.Options`. Without a ``runtime``, that of
    ``dormouse.install()``, called before the model is loaded; without ``microbatch_tokens``, those
    that verl allows for a micro-batch.

    ``engine.sharing`` counts what was shared: :class:`Sharing`.
    """
    check_class(engine_class)
    attributes = {
        "__module__": engine_class.__module__,
        "__qualname__": engine_class.__qualname__,
        "__doc__": engine_class.__doc__,
        "sharing_options": Options.of(options),
    }
    return type(engine_class.__name__, (SharedScores, engine_class), attributes)


def register(**options) -> None:
    """Makes verl use shared prompts in every ``fsdp2`` engine of a language model that this process
    creates from now on, and refuse one of the strategies ``fsdp`` and ``fsdp_turbo``. Those of
    other strategies run as in verl, which is logged. ``options``: of :func:`share`.

    verl asks its registry for an engine of this device and vendor before one of the device alone,
    which is its own. ``VERL_ENGINE_DEVICE`` and ``VERL_ENGINE_VENDOR`` say which these are.
    """
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

    EngineRegistry.register(
        model_type="language_model",
        # Those of verl's own class and of one derived from it. An engine of another strategy than
        # fsdp2 is told why it cannot share.
        backend=list(BACKENDS),
        device=os.getenv("VERL_ENGINE_DEVICE") or get_device_name(),
        vendor=os.getenv("VERL_ENGINE_VENDOR") or get_vendor(),
    )(share(FSDPEngineWithLMHead, **options))
    others = sorted(EngineRegistry._engines["language_model"].keys() - BACKENDS)
    _log.warning(
        "verl's engines of the strategy fsdp2 share prompts, those of fsdp and fsdp_turbo are "
        "refused, and others (%s) run as in verl",
        ", ".join(others) or "none here",
    )
