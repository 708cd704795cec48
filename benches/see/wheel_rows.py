"""Rows of the wheel: its size, and the time from installing it to the first step."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from rows import LOWER, Row

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "target" / "wheel"
MB = 1_000_000
# A checked step of a small model, whose saved activations sleep.
STEP_OF = ROOT / "python" / "tests"


def wheel_rows() -> list[Row]:
    size = Row("wheel_mb", "MB", LOWER, "the newest wheel of `make wheel`", bar=8)
    first = Row(
        "install_to_first_step_s",
        "s",
        LOWER,
        "`pip install` of that wheel into an empty environment beside torch, and "
        "`python -m dormouse run` of one checked step of a small model",
    )
    wheels = sorted(WHEELS.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    if not wheels:
        for row in (size, first):
            row.note("ours", "there is no wheel; run `make wheel`")
        return [size, first]
    size.ours = wheels[-1].stat().st_size / MB
    first.ours = install_and_step(wheels[-1])
    return [size, first]


def install_and_step(wheel: Path) -> float:
    sys.path.append(str(STEP_OF))
    from test_program import STEP

    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        run(sys.executable, "-m", "venv", "--without-pip", folder / "environment")
        python = folder / "environment" / "bin" / "python"
        script = folder / "step.py"
        script.write_text(STEP)
        (folder / "models.py").write_text((STEP_OF / "models.py").read_text())
        began_s = time.monotonic()
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
        run(
            python,
            "-m",
            "dormouse",
            "run",
            script,
            folder,
            PYTHONPATH=sysconfig.get_path("purelib"),
        )
        return time.monotonic() - began_s


def run(*command: str | Path, **environment: str) -> None:
    paths = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", **environment}
    subprocess.run(command, check=True, cwd="/", env=paths, capture_output=True, timeout=600)


MAKERS = [(("wheel_mb", "install_to_first_step_s"), wheel_rows)]
