"""Parts of the GPU suite that need no GPU, and how they are run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpu_suite import cli, commands, limits, parts, paths

ROOT = Path(__file__).resolve().parents[2]
ROW = {"name": "n", "unit": "s", "ours": 1.0, "bar": 2.0, "better": "lower", "peers": {}, "how": ""}

# Of a machine that lacks nothing.
FACTS = {
    "driver": {
        "why": None,
        "cuda": [13, 0],
        "name": "H200",
        "driver": "580.1",
        "capability": [9, 0],
    },
    "packages": {"torch": "2.11", "transformers": "5.17", "triton": "3.6"},
    "torch_gpu_why": None,
    "compiler": "gcc 13",
    "sanitizer": "/bin/compute-sanitizer",
    "driver_too_old": None,
    "variables": {"DORMOUSE_CUDA_PAGE_BYTES": "16777216"},
    "gpu_free_bytes": 140 << 30,
    "host_free_bytes": 120 << 30,
}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run(code: str, seconds: float = 30.0) -> limits.Ended:
    return limits.run(python(code), seconds, dict(os.environ), ROOT)


def fake(code: str, seconds: float = 30, **changes) -> parts.Part:
    return parts.Part("fake", "", seconds, lambda setting, seconds: python(code), **changes)


def setting(**changes) -> commands.Setting:
    found = paths.Paths(ROOT, None, None)
    return commands.Setting(found, True, "cpu", ROOT / "gpu-results", **changes)


def run_fake(code: str, seconds: float = 30.0, **changes) -> dict:
    return cli.run_part(fake(code, **changes), setting(), seconds)


def says(*objects: dict) -> str:
    return "".join(f"print({json.dumps(each)!r}, flush=True);" for each in objects)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
