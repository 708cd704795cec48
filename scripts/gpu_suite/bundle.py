"""``python scripts/gpu_suite/bundle.py``: target/gpu-bundle, which runs with torch and no network.

Takes what ``make lib`` and cargo built, and strips debug information. Brings pytest along, for a
machine that has none: it is Python alone.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "target"

BYTES_MAX = 50_000_000
# Where each of cargo's files goes.
BINARIES = {"libdormouse.so": "lib", "libdormouse_preload.so": "lib", "gpu-check": "bin"}
# Of the checkout; the GPU tests take small models and a table from the tests on the CPU.
SOURCES = (
    "scripts/gpu-suite",
    "scripts/gpu_suite",
    "python/dormouse",
    "python/tests_gpu",
    "python/tests/deadlock.py",
    "python/tests/models.py",
    "tests/deadlock/matrix.txt",
    "examples/rollouts",
    "docs/evidence/gpu.md",
    "kernels/cuda/dormouse_kernels.json",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "NOTICE",
)
PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
_WITHOUT = shutil.ignore_patterns("__pycache__", ".pytest_cache", "*.pyc")


class CannotPack(Exception):
    """Something is missing or too large; says what and what is accepted."""


def make(root: Path, builds: Path, folder: Path) -> Path:
    """Fills ``folder`` anew from the checkout and cargo's ``builds``; returns the archive of it."""
    missing = [name for name in BINARIES if not (builds / name).is_file()]
    if missing:
        raise CannotPack(f"no {', '.join(missing)} in {builds}; `make gpu-bundle` builds them")
    shutil.rmtree(folder, ignore_errors=True)
    for name, where in BINARIES.items():
        into = folder / where / name
        into.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "--strip-debug", "-o", into, builds / name], check=True)
        into.chmod(0o755)
    for name in SOURCES:
        _copy(root / name, folder / name)
    for package in PYTEST:
        _copy_package(package, folder / "vendor")
    archive = folder.with_suffix(".tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, arcname=folder.name)
    size = archive.stat().st_size
    if size >= BYTES_MAX:
        raise CannotPack(f"{archive} has {size:,} bytes; accepted: below {BYTES_MAX:,}")
    return archive


def _copy(source: Path, into: Path) -> None:
    into.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, into, ignore=_WITHOUT)
    else:
        shutil.copy2(source, into)


def _copy_package(name: str, into: Path) -> None:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise CannotPack(f"{sys.executable} has no package {name!r}; `make python` installs it")
    source = Path(found.origin)
    source = source.parent if source.name == "__init__.py" else source
    _copy(source, into / source.name)


def main() -> int:
    """Makes the bundle of this checkout."""
    try:
        archive = make(ROOT, TARGET / "release", TARGET / "gpu-bundle")
    except CannotPack as error:
        print(f"gpu-bundle: {error}", file=sys.stderr)
        return 1
    print(f"{archive.relative_to(ROOT)}: {archive.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
