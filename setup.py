"""The wheel: the Python package with libdormouse.so, libdormouse_preload.so and the program ``dormouse`` inside.

``pip install .`` builds them with cargo. ``DORMOUSE_BUILT`` names a folder that has them already.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from distutils.command.build_scripts import build_scripts  # isort: skip  (setuptools brings it)

ROOT = Path(__file__).resolve().parent
LIBRARIES = ("libdormouse.so", "libdormouse_preload.so")
PROGRAM = "dormouse"
CRATES = ("dormouse", "dormouse-preload", "dormouse-cli")
MACHINE = "x86_64"
# The oldest glibc that a manylinux tag names by its version.
GLIBC_MIN = (2, 17)
GLIBC_SYMBOL = re.compile(r"\bGLIBC_(\d+)\.(\d+)")


def version() -> str:
    """Returns the version of the workspace."""
    with (ROOT / "Cargo.toml").open("rb") as file:
        return tomllib.load(file)["workspace"]["package"]["version"]


def built() -> Path:
    """Returns the folder of the libraries and the program; builds them if no folder is named."""
    named = os.environ.get("DORMOUSE_BUILT")
    if named:
        return Path(named)
    command = [os.environ.get("CARGO", "cargo"), "build", "--release", "--locked"]
    command += [word for crate in CRATES for word in ("-p", crate)]
    command += ["--message-format", "json-render-diagnostics"]
    try:
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} was not found: install Rust 1.95 or newer (https://rustup.rs)") from None
    return folder_of(done.stdout)


def folder_of(told: str) -> Path:
    """Returns the folder of what a build has made, from cargo's messages: many settings move it."""
    messages = [json.loads(line) for line in told.splitlines()]
    files = [Path(file) for message in messages for file in message.get("filenames", ())]
    names = (*LIBRARIES, PROGRAM)
    folders = [{file.parent for file in files if file.name == name} for name in names]
    if len(folders[0]) != 1 or any(each != folders[0] for each in folders):
        raise SystemExit(f"cargo made {folders}; accepted: {', '.join(names)} in one folder")
    return folders[0].pop()


def put(source: Path, target: Path) -> None:
    """Copies a library or program without its symbols for debuggers."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    try:
        subprocess.run(["strip", "--strip-unneeded", target], check=True)
    except FileNotFoundError:
        raise SystemExit("strip was not found: install binutils") from None


def glibc_of(folder: Path) -> tuple[int, int]:
    """Returns the oldest glibc that has all symbols of the libraries and the program."""
    found = {GLIBC_MIN}
    for name in (*LIBRARIES, PROGRAM):
        command = ["readelf", "--version-info", "--wide", folder / name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found |= {(int(major), int(minor)) for major, minor in GLIBC_SYMBOL.findall(text)}
    return max(found)


class BuildPy(build_py):
    """Puts the libraries next to the package's modules, where it looks for them first."""

    def run(self) -> None:
        # What an earlier build left there may be gone from the package.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        folder = built()
        if self.editable_mode:
            # The checkout's package finds them in target/release.
            return
        for name in LIBRARIES:
            put(folder / name, Path(self.build_lib) / "dormouse" / name)


class BuildScripts(build_scripts):
    """Puts the program where scripts are put; it is no text."""

    def run(self) -> None:
        put(built() / PROGRAM, Path(self.build_dir) / PROGRAM)


class BdistWheel(bdist_wheel):
    """The wheel serves any Python 3, and systems with the glibc that its libraries need."""

    def get_tag(self) -> tuple[str, str, str]:
        major, minor = glibc_of(built())
        return "py3", "none", f"manylinux_{major}_{minor}_{MACHINE}"


class WithLibraries(Distribution):
    """A distribution that is not of Python alone."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    version=version(),
    options={"build": {"build_base": "target/wheel-build"}},
    scripts=[f"target/release/{PROGRAM}"],
    distclass=WithLibraries,
    cmdclass={"build_py": BuildPy, "build_scripts": BuildScripts, "bdist_wheel": BdistWheel},
)
