"""Programs of the Rust crates that a benchmark runs: their `examples`, built with the release profile."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "target" / "release" / "examples"


def example(name: str, *arguments: object) -> dict:
    """What one example prints. Raises ``CalledProcessError`` where it fails."""
    path = EXAMPLES / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing (the benchmark's make target builds it)")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)
