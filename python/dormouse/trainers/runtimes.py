"""The runtimes of adapters that were given none."""

from __future__ import annotations

import torch

from ..install import install, installed
from ..modes import pool
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


def runtime_beside_ipc() -> Runtime:
    """Returns the runtime of what is installed in this process. If nothing is, installs dormouse in
    a mode in which torch keeps its allocator: torch shares no memory of another by CUDA IPC, by
    which a trainer hands its weights to a rollout on the same GPU."""
    found = installed()
    if found is None:
        beside = "pool" if pool.unavailable_because() is None else "copy"
        found = install(mode=beside if torch.cuda.device_count() else None)
    return found.runtime
