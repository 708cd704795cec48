"""How each part's command is made from what the command line says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import paths

GIB_SHIFT = 30
# So much before its limit a part that can plan ends by itself.
MARGIN_SECONDS = 15.0
MARGIN_SHARE = 0.2
TINY_HOST_BYTES = 1 << 28


class CannotRun(Exception):
    """A part lacks something; says what."""


@dataclass(frozen=True)
class Setting:
    """What the command line says. ``host_gib``: None lets the benchmark measure what is free.
    ``details``: of the part, after its name's colon. ``layers``, ``microbatch_tokens``: of the
    headline's model, None: its own."""

    paths: paths.Paths
    tiny: bool
    device: str
    out: Path
    host_gib: float | None = None
    nvme_dir: Path | None = None
    nvme_gib: int = 0
    details: tuple[str, ...] = ()
    layers: int | None = None
    microbatch_tokens: int | None = None


# Of a setting, and the seconds that the part really has.
Command = Callable[[Setting, float], list[str]]


def place(setting: Setting, seconds: float) -> list[str]:
    """The disks that count: of results, of temporary files, of the file tier."""
    folders = {"results": setting.out, "temporary": Path("/tmp"), "file tier": setting.nvme_dir}
    named = [f"{name}={folder}" for name, folder in folders.items() if folder is not None]
    return module("gpu_suite.place", str(setting.paths.root), *named)


def gpu_check(name: str, tiny: str = "", full: str = "") -> Command:
    """A part of the program ``gpu-check``, with its options."""

    def command(setting: Setting, seconds: float) -> list[str]:
        options = tiny if setting.tiny else full
        return [check_binary(setting), name, *options.split()]

    return command


def python_part(name: str) -> Command:
    """A module of this package that needs the library."""

    def command(setting: Setting, seconds: float) -> list[str]:
        check_library(setting)
        return module(name, *(["--tiny"] if setting.tiny else []))

    return command


def tests(setting: Setting, seconds: float) -> list[str]:
    """The tests of every mode."""
    check_library(setting)
    folder = setting.paths.root / "python" / "tests_gpu"
    if not folder.is_dir():
        raise CannotRun(f"{folder} is not there")
    return module("gpu_suite.tests", str(folder), str(setting.paths.vendor))


def memcheck(setting: Setting, seconds: float) -> list[str]:
    """compute-sanitizer over gpu-check."""
    binary, sanitizer = check_binary(setting), paths.compute_sanitizer()
    if sanitizer is None:
        raise CannotRun("compute-sanitizer is not there")
    return module("gpu_suite.memcheck", str(sanitizer), binary)


def headline(command: str) -> Command:
    """A command of ``python -m dormouse.headline``."""

    def build(setting: Setting, seconds: float) -> list[str]:
        check_library(setting)
        own = seconds - min(MARGIN_SECONDS, MARGIN_SHARE * seconds)
        options = ["--device", setting.device, "--seconds", f"{own:.0f}"]
        if setting.tiny:
            options += ["--tiny", "--host-bytes", str(TINY_HOST_BYTES)]
        elif setting.host_gib is not None:
            options += ["--host-bytes", str(int(setting.host_gib * (1 << GIB_SHIFT)))]
        for option, value in (
            ("--layers", setting.layers),
            ("--microbatch-tokens", setting.microbatch_tokens),
        ):
            options += [option, str(value)] if value is not None else []
        if setting.details:
            options += ["--cells", ",".join(setting.details)]
        if setting.nvme_dir is not None and command == "frontier":
            options += ["--nvme-dir", str(setting.nvme_dir)]
            options += ["--nvme-bytes", str(setting.nvme_gib << GIB_SHIFT)]
        return module("dormouse.headline", command, *options)

    return build


def module(name: str, *arguments: str) -> list[str]:
    """A module, by this interpreter."""
    return [sys.executable, "-m", name, *arguments]


def check_binary(setting: Setting) -> str:
    """The program ``gpu-check``."""
    if setting.paths.gpu_check is None:
        raise CannotRun(f"no gpu-check in {setting.paths.root}; --gpu-check names one")
    return str(setting.paths.gpu_check)


def check_library(setting: Setting) -> None:
    """Refuses a setting without the library."""
    if setting.paths.library is None:
        raise CannotRun(f"no {paths.LIBRARY} in {setting.paths.root}; --lib names one")
