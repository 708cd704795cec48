"""Memory for a run: the pages of a file in memory, so that two processes can use the same.

How fast a disk of a virtual machine is hangs on which pages it is to fill: one process has the
fast ones as long as it lives and another the slow ones. Neighbours in a comparison share them, and
each pair has others.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = Path("/dev/shm")
BLOCK_BYTES = 1 << 20


class Pages:
    """Content that no disk can compress, in memory until it is dropped."""

    def __init__(self, size_bytes: int) -> None:
        self.path = DIRECTORY / f"dormouse-bench-{os.getpid()}"
        self.size_bytes = size_bytes

    def renew(self) -> None:
        """Other pages from now on."""
        self.drop()
        with self.path.open("wb") as file:
            for _ in range(self.size_bytes // BLOCK_BYTES):
                file.write(os.urandom(BLOCK_BYTES))

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
