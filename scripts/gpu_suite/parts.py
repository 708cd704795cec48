"""Which parts there are, cheap and telling ones first, and the command of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import checks, paths
from .result import Read


class CannotRun(Exception):
    """A part lacks something; says what."""


@dataclass(frozen=True)
class Setting:
    """What the command line says. ``details``: of the part, after its name's colon."""

    paths: paths.Paths
    tiny: bool
    device: str
    nvme_dir: Path | None
    nvme_gib: int
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """``seconds``: its limit. ``command``: of a setting and the seconds it really has."""

    name: str
    what: str
    seconds: int
    command: Callable[[Setting, float], list[str]]
    read: Read | None = None
    takes_details: bool = False


# So much before its limit a part that can plan ends by itself.
MARGIN_SECONDS = 15.0
MARGIN_SHARE = 0.2


def _gpu_check(name: str, tiny: str = "", full: str = ""):
    def command(setting: Setting, seconds: float) -> list[str]:
        options = tiny if setting.tiny else full
        return [_check_binary(setting), name, *options.split()]

    return command


def _check_binary(setting: Setting) -> str:
    if setting.paths.gpu_check is None:
        raise CannotRun(f"no gpu-check in {setting.paths.root}; --gpu-check names one")
    return str(setting.paths.gpu_check)


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _modes(setting: Setting, seconds: float) -> list[str]:
    _check_library(setting)
    return _module("gpu_suite.modes")


def _tests(setting: Setting, seconds: float) -> list[str]:
    _check_library(setting)
    folder = setting.paths.root / "python" / "tests_gpu"
    if not folder.is_dir():
        raise CannotRun(f"{folder} is not there")
    return _module("gpu_suite.tests", str(folder), str(setting.paths.vendor))


def _memcheck(setting: Setting, seconds: float) -> list[str]:
    binary, sanitizer = _check_binary(setting), paths.compute_sanitizer()
    if sanitizer is None:
        raise CannotRun(
            "compute-sanitizer is neither in PATH nor in $CUDA_HOME/bin, $CUDA_PATH/bin, "
            "/usr/local/cuda/bin or a wheel of this Python"
        )
    return _module("gpu_suite.memcheck", str(sanitizer), binary)


def _headline(command: str):
    def build(setting: Setting, seconds: float) -> list[str]:
        _check_library(setting)
        own = seconds - min(MARGIN_SECONDS, MARGIN_SHARE * seconds)
        options = ["--device", setting.device, "--seconds", f"{own:.0f}"]
        if setting.tiny:
            options += ["--tiny", "--host-bytes", str(1 << 28)]
        if setting.details:
            options += ["--cells", ",".join(setting.details)]
        if setting.nvme_dir is not None and command == "frontier":
            options += ["--nvme-dir", str(setting.nvme_dir)]
            options += ["--nvme-bytes", str(setting.nvme_gib << 30)]
        return _module("dormouse.headline", command, *options)

    return build


def _check_library(setting: Setting) -> None:
    if setting.paths.library is None:
        raise CannotRun(f"no {paths.LIBRARY} in {setting.paths.root}; --lib names one")


PARTS = (
    Part("conformance", "the device's contract, case by case", 60, _gpu_check("conformance"),
         checks.conformance),
    Part("modes", "GPU modes of install(): bytes, addresses, memory given back", 120, _modes),
    Part("sleep", "gigabytes asleep and awake, every byte compared", 150,
         _gpu_check("sleep", "mib=256", "mib=8192"), checks.sleep),
    Part("kernels", "kernels against their CPU twins", 60, _gpu_check("kernels"), checks.kernels),
    Part("copies", "pinned copies against plain ones, 64 KiB to 1 GiB", 150,
         _gpu_check("copies", "most_mib=4"), checks.copies),
    Part("mapping", "what mapping costs per GiB", 90, _gpu_check("mapping", "bytes_mib=64"),
         checks.mapping),
    Part("demo", "the demo's group: gradients against FP64, asleep equals awake", 180,
         _headline("small")),
    Part("memcheck", "compute-sanitizer over gpu-check", 180, _memcheck),
    Part("tests", "the tests of every mode", 240, _tests),
    Part("headline", "the published grid; headline:10k/2k:32:eager is one cell of it", 590,
         _headline("grid"), takes_details=True),
    Part("frontier", "the longest prompt that trains", 590, _headline("frontier")),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}


def choose(only: list[str], skip: list[str]) -> list[tuple[Part, tuple[str, ...]]]:
    """Parts with their details, in their own order; all unless ``only`` names some.

    Raises :class:`ValueError` for a name that is none.
    """
    wanted: dict[str, list[str]] = {}
    for text in only:
        name, _, detail = text.partition(":")
        part = _named(name)
        if detail and not part.takes_details:
            raise ValueError(f"{text!r}: part {name!r} is one piece; accepted: {name}")
        wanted.setdefault(name, []).extend([detail] if detail else [])
    left_out = {_named(name).name for name in skip}
    return [
        (part, tuple(wanted.get(part.name, ())))
        for part in PARTS
        if part.name not in left_out and (not only or part.name in wanted)
    ]


def _named(name: str) -> Part:
    if name not in BY_NAME:
        raise ValueError(f"no part {name!r}; accepted: {', '.join(BY_NAME)}")
    return BY_NAME[name]
