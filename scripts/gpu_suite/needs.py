"""What parts need of a machine: by name, a sentence where a machine lacks it.

``place`` gathers the facts (:mod:`.place`), and before any other part starts, the suite says which
parts cannot run and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from . import facts as machine

GIB = 1 << 30
KERNELS_REPORT = Path("kernels") / "cuda" / "dormouse_kernels.json"
# In the name of a GPU without kernels, for tests.
STANDIN = "stand-in"
# Drivers by the CUDA version they bring: the first of each series.
SERIES = {(12, 0): 525, (12, 4): 550, (12, 8): 570, (13, 0): 580}
# Major versions.
PTX_BEHIND_CUDA = 4
HOST_BYTES_MIN = 8 * GIB
DEVICE_BYTES_MIN = 16 * GIB

# A fact is judged only where it was gathered: without `place` all parts are tried.
Lack = Callable[[dict], str | None]


def _gpu(facts: dict) -> str | None:
    return facts.get("driver", {}).get("why")


def _computes(facts: dict) -> str | None:
    is_standin = STANDIN in (facts.get("driver", {}).get("name") or "")
    return "the GPU is the stand-in, which computes nothing" if is_standin else None


def _package(name: str) -> Lack:
    def lack(facts: dict) -> str | None:
        versions = facts.get("packages")
        missing = versions is not None and versions.get(name) is None
        return f"this Python has no {name}" if missing else None

    return lack


def _torch_gpu(facts: dict) -> str | None:
    return facts.get("torch_gpu_why")


def _compiler(facts: dict) -> str | None:
    absent = "compiler" in facts and facts["compiler"] is None
    return "no C compiler (gcc, cc, clang or $CC), which Triton calls" if absent else None


def _sanitizer(facts: dict) -> str | None:
    absent = "sanitizer" in facts and facts["sanitizer"] is None
    return (
        "compute-sanitizer is neither in PATH nor in $CUDA_HOME/bin, $CUDA_PATH/bin, "
        "/usr/local/cuda/bin or a wheel of this Python"
    ) if absent else None  # fmt: skip


def _kernels(facts: dict) -> str | None:
    return facts.get("driver_too_old")


def _memory(facts: dict) -> str | None:
    for key, least, what in (
        ("gpu_free_bytes", DEVICE_BYTES_MIN, "of the GPU's memory"),
        ("host_free_bytes", HOST_BYTES_MIN, "of host memory"),
    ):
        seen = facts.get(key)
        if seen is not None and seen < least:
            return f"{seen / GIB:.1f} GiB {what} are free; accepted: at least {least / GIB:.0f}"
    return None


LACKS: dict[str, Lack] = {
    "gpu": _gpu,
    "computes": _computes,
    "kernels": _kernels,
    "torch": _package("torch"),
    "torch_gpu": _torch_gpu,
    "transformers": _package("transformers"),
    "triton": _package("triton"),
    "compiler": _compiler,
    "sanitizer": _sanitizer,
    "memory": _memory,
}


def why_not(needs: tuple[str, ...], facts: dict) -> str | None:
    """The first thing of ``needs`` that is missing, as a sentence."""
    return next((why for need in needs if (why := LACKS[need](facts))), None)


def older_driver(cuda: list[int] | None, root: Path) -> str | None:
    """A sentence if a driver is older than the toolkit of the kernels' machine code."""
    report = _kernels_report(root)
    if cuda is None or report is None:
        return None
    code, ptx = machine.major_minor(report["toolkit"]), report["ptx"]["version"]
    if cuda >= code:
        return None
    series = SERIES.get(tuple(code))
    newer = f"CUDA {machine.dotted(code)}" + (f" (driver {series})" if series else "")
    own = machine.dotted(cuda)
    seen = f"The driver supports CUDA {own}; dormouse's machine code is for {newer}"
    if cuda >= _first_cuda(ptx):
        return f"{seen} and newer, so its kernels run from PTX {ptx}, which the driver translates."
    least = machine.dotted(_first_cuda(ptx))
    return f"{seen} and its PTX for CUDA {least}: without an update of the driver no kernel runs."


def driver_too_old(cuda: list[int] | None, root: Path) -> str | None:
    """The sentence if a driver is older than the kernels' PTX too."""
    report = _kernels_report(root)
    if cuda is None or report is None or cuda >= _first_cuda(report["ptx"]["version"]):
        return None
    return older_driver(cuda, root)


def _kernels_report(root: Path) -> dict | None:
    report = root / KERNELS_REPORT
    return json.loads(report.read_text(encoding="utf-8")) if report.is_file() else None


def _first_cuda(ptx: str) -> list[int]:
    """The CUDA version that brought a version of PTX: 7.0 came with 11.0."""
    major, minor = machine.major_minor(ptx)
    return [major + PTX_BEHIND_CUDA, minor]
