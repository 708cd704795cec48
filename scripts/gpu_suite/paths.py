"""Where things lie: in a bundle, or in a checkout."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "libdormouse.so"
SANITIZER = "compute-sanitizer"
_CUDA_ROOTS = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT")


@dataclass(frozen=True)
class Paths:
    """``root``: a bundle's or a checkout's folder. Paths are None where nothing is there."""

    root: Path
    library: Path | None
    gpu_check: Path | None

    @classmethod
    def find(cls, root: Path, library: Path | None = None, gpu_check: Path | None = None) -> Paths:
        """What was named, else the bundle's, else the checkout's own builds."""
        builds = [root / "target" / kind for kind in ("release", "debug")]
        named = os.environ.get("DORMOUSE_LIB")
        libraries = [Path(named)] if named else [root / "lib" / LIBRARY, builds[0] / LIBRARY]
        checks = [root / "bin" / "gpu-check", *(build / "gpu-check" for build in builds)]
        return cls(
            root.resolve(),
            _first([library] if library else libraries),
            _first([gpu_check] if gpu_check else checks),
        )

    def environment(self) -> dict[str, str]:
        """What parts run in: this package and library before all others."""
        environment = dict(os.environ)
        path = [str(self.root / "python"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if self.library is not None:
            environment["DORMOUSE_LIB"] = str(self.library)
        return environment

    @property
    def vendor(self) -> Path:
        """pytest, for a machine that has none."""
        return self.root / "vendor"


def compute_sanitizer() -> Path | None:
    """On the path, in a toolkit, or in a wheel of this interpreter's packages."""
    found = shutil.which(SANITIZER)
    if found:
        return Path(found)
    roots = [Path(os.environ[name]) for name in _CUDA_ROOTS if os.environ.get(name)]
    folders = [root / "bin" for root in [*roots, Path("/usr/local/cuda")]]
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    wheels = sorted(packages.rglob(SANITIZER)) if packages.is_dir() else []
    runnable = [path for path in wheels if path.is_file() and os.access(path, os.X_OK)]
    return _first([*(folder / SANITIZER for folder in folders), *runnable])


def _first(candidates: list[Path]) -> Path | None:
    return next((path.resolve() for path in candidates if path.is_file()), None)
