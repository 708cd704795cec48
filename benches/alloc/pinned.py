"""Pinned host memory: what the pools hold beyond what was asked for.

As a program it is the peer: real torch pins buffers through the stand-in runtime, and prints what
was asked for and what was pinned.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from contenders import RUN_SECONDS_MAX, Unavailable

REQUESTS = 2_000
MIN_BYTES = 4 << 10
MAX_BYTES = 256 << 20
SEED = 1


def sizes() -> list[int]:
    """The same sizes for every pool."""
    source = random.Random(SEED)
    ratio = MAX_BYTES / MIN_BYTES
    return [int(MIN_BYTES * ratio ** source.random()) for _ in range(REQUESTS)]


def measure_ours() -> float:
    """The worst of a fill and of churns at two sizes, several seeds each, by the pool itself."""
    command = ["cargo", "run", "--release", "--locked", "-q", "-p", "dormouse-alloc"]
    command += ["--example", "pinned_waste"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    if completed.returncode != 0:
        raise Unavailable(completed.stderr.strip().splitlines()[-1])
    return json.loads(completed.stdout)["pinned_waste"]


def measure_torch(environment: dict[str, str]) -> float:
    completed = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
    )
    if completed.returncode != 0:
        raise Unavailable(completed.stderr.strip().splitlines()[-1])
    result = json.loads(completed.stdout.splitlines()[-1])
    return result["pinned_bytes"] / result["requested_bytes"] - 1


def main() -> int:
    import torch

    torch.cuda.init()
    wanted = sizes()
    # Never touched, so nothing is behind them.
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in wanted]
    stats = torch.cuda.host_memory_stats()
    pinned_bytes = stats["allocated_bytes.current"]
    print(json.dumps({"requested_bytes": sum(wanted), "pinned_bytes": pinned_bytes}))
    del held
    return 0


if __name__ == "__main__":
    sys.exit(main())
