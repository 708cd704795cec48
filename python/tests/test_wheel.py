"""``pip install .``: the wheel has the libraries and the program, and works where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from test_program import SECONDS_MAX, STEP

import dormouse
from dormouse import _native as native

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = {"dormouse/libdormouse.so", "dormouse/libdormouse_preload.so"}
PROGRAM = f"dormouse-{dormouse.__version__}.data/scripts/dormouse"


def bare_environment(**changes: str) -> dict[str, str]:
    """The environment without what names libraries of this checkout."""
    ours = ("DORMOUSE_LIB", "LD_PRELOAD", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in ours} | changes


def succeed(*command: str | Path, **changes: str) -> str:
    """Runs a command far from the checkout; returns its output."""
    done = subprocess.run(
        command,
        cwd="/",
        env=bare_environment(**changes),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, **changes: str) -> None:
    """Runs pip without a network."""
    quiet = ["--disable-pip-version-check", "--quiet"]
    succeed(sys.executable, "-m", "pip", *quiet, *arguments, **changes)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, of the libraries that the tests use."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-build-isolation", "--no-deps", "--no-index"]
    pip("wheel", *offline, "-w", folder, ROOT, DORMOUSE_BUILT=str(native.library_path().parent))
    (found,) = folder.iterdir()
    return found


def test_the_libraries_are_where_cargo_says_it_made_them(tmp_path):
    # As a build for CARGO_BUILD_TARGET in the target-dir of a configuration.
    folder = tmp_path / "elsewhere/x86_64-unknown-linux-gnu/release"
    folder.mkdir(parents=True)
    names = ("libdormouse.so", "libdormouse_preload.so", "dormouse")
    for name in names:
        (folder / name).symlink_to("/bin/true")
    artifact = {"reason": "compiler-artifact"}
    made = [json.dumps({**artifact, "filenames": [str(folder / name)]}) for name in names]
    cargo = tmp_path / "cargo"
    build = [sys.executable, ROOT / "setup.py", "--quiet", "build_py"]
    build += ["--build-lib", tmp_path / "made"]

    def built(lines: list[str]) -> subprocess.CompletedProcess:
        text = "\n".join([*lines, '{"reason": "build-finished"}'])
        cargo.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        cargo.chmod(0o755)
        environment = bare_environment(CARGO=str(cargo), DORMOUSE_BUILT="")
        return subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)

    done = built(made)
    assert done.returncode == 0, done.stderr
    assert {f"dormouse/{name}" for name in names[:2]} <= {
        str(path.relative_to(tmp_path / "made")) for path in (tmp_path / "made/dormouse").iterdir()
    }
    # A library of an earlier build is not packed.
    done = built(made[1:])
    assert done.returncode != 0 and "accepted: libdormouse.so, " in done.stderr, done.stderr


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The programs of an environment that has the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    succeed(sys.executable, "-m", "venv", "--without-pip", folder)
    programs = folder / "bin"
    pip("--python", programs / "python", "install", "--no-deps", "--no-index", wheel)
    return programs


def test_it_serves_any_python_3_and_says_which_systems(wheel):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("dormouse", dormouse.__version__, "py3", "none")
    major, minor, machine = platform.removeprefix("manylinux_").split("_", 2)
    assert machine == "x86_64"
    needed = max(map(glibc_of, (native.library_path(), native.preload_path())))
    assert (int(major), int(minor)) >= needed


def test_auditwheel_says_the_same_systems(wheel):
    told = succeed(sys.executable, "-m", "auditwheel", "show", wheel)
    platform = wheel.stem.rpartition("-")[2]
    assert f'following platform tag: "{platform}"' in " ".join(told.split())


def glibc_of(library: Path) -> tuple[int, ...]:
    """The newest glibc symbol version that a library asks for."""
    words = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True)
    versions = {word.strip("()") for word in words.stdout.split() if "GLIBC_" in word}
    numbers = (tuple(map(int, v.partition("_")[2].split("."))) for v in versions)
    return max(number[:2] for number in numbers)


def test_it_has_stripped_libraries_and_the_program(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert names >= {*LIBRARIES, PROGRAM, "dormouse/hf/shared_prefix.py"}
        assert not any(name.startswith(("tests", "dormouse/tests")) for name in names)
        licenses = {Path(name).name for name in names if "licenses" in name}
        assert licenses == {"LICENSE-APACHE", "LICENSE-MIT", "NOTICE"}
        archive.extractall(tmp_path)
    for name in (*LIBRARIES, PROGRAM):
        assert "no symbols" in succeed("sh", "-c", f"nm '{tmp_path / name}' 2>&1 || true")


@pytest.mark.slow
def test_it_runs_where_there_is_no_checkout(installed, tmp_path):
    script = tmp_path / "step.py"
    script.write_text(STEP)
    shutil.copy(ROOT / "python" / "tests" / "models.py", tmp_path)
    # torch and transformers; a folder that is named this way does not bring the checkout's package.
    torch_of = sysconfig.get_path("purelib")
    python = installed / "python"
    where = succeed(python, "-m", "dormouse", "--lib", "--preload", PYTHONPATH=torch_of)
    assert all(path.startswith(str(installed.parent)) for path in where.split())
    told = succeed(python, "-m", "dormouse", "run", script, tmp_path, PYTHONPATH=torch_of)
    assert int(told) > 0
    version = succeed(installed / "dormouse", "--version")
    assert version == f"dormouse {dormouse.__version__}\n"
