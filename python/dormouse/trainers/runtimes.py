"""The runtime of an adapter that was given none."""

from __future__ import annotations

import torch

from ..runtime import Runtime
from .refusals import UnsupportedTrainerError

_of_process: list[Runtime] = []


def runtime_of(device: torch.device) -> Runtime:
    """Returns the process's own runtime of a CPU, with the settings of the environment.

    Raises :class:`UnsupportedTrainerError` for a model that is elsewhere.
    """
    if device.type != "cpu":
        raise UnsupportedTrainerError(
            f"the model is on {device} and share() has no runtime; accepted: "
            "runtime=dormouse.install().runtime, where dormouse.install() is the first statement, "
            "before set_device, init_process_group, Accelerator() or GRPOConfig(...)"
        )
    if not _of_process:
        _of_process.append(Runtime())
    return _of_process[0]
