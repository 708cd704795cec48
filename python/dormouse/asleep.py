"""Why memory of a runtime cannot sleep, and the warning when nothing of a step did."""

from __future__ import annotations

import threading
import warnings

from .install import installed
from .runtime import Runtime

_told: set[str] = set()
_lock = threading.Lock()


def why_not_in_place(runtime: Runtime) -> str | None:
    """Returns why memory of the runtime's device cannot sleep in place, and what helps; or None."""
    if runtime.device.type == "cpu":
        if "preload" in runtime.info()["modes"]:
            return None
        return (
            "the process was not started under LD_PRELOAD=libdormouse_preload.so; start it by "
            "`python -m dormouse run SCRIPT`"
        )
    found = installed()
    if found is not None and found.runtime is runtime:
        if found.mode == "allocator":
            return None
        # Of every mode that was not selected, `why` has a sentence.
        cause = next(each for each in found.why if each.startswith("mode allocator "))
        return f"dormouse is installed in mode {found.mode!r}, not 'allocator'; {cause}"
    return (
        "dormouse is not torch's CUDA allocator; make dormouse.install() the first statement, "
        "before set_device, init_process_group or Accelerator(), and pass installed.runtime"
    )


def why_no_tier(runtime: Runtime) -> str | None:
    """Returns why there is no tier to sleep in, and what helps; or None."""
    info = runtime.info()
    if info["tiers"]:
        return None
    return (
        f"no tier is open ({info['unavailable_reason'] or 'none was requested'}); pass "
        "nvme_dir=, a directory on a local disk, to dormouse.Runtime or dormouse.install()"
    )


def warn_if_awake(report: dict, runtime: Runtime) -> None:
    """Warns if nothing of a prefix slept that was to sleep, once in a process for each reason.

    ``report``: that of the prefix. Thread-safe.
    """
    if report["asleep_bytes_peak"]:
        return
    reason = why_not_in_place(runtime) or why_no_tier(runtime) or report["declined"]
    with _lock:
        is_new = bool(reason) and reason not in _told
        _told.add(reason)
    if is_new:
        warnings.warn(f"dormouse: nothing slept: {reason}", RuntimeWarning, stacklevel=2)
