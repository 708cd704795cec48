"""DeepNVMe (DeepSpeed's async_io) as a process that reads or writes a file when told to.

It needs a Python that has it, built for the CPU::

    pip download --no-deps --no-binary :all: --no-build-isolation deepspeed==0.19.8 -d dl
    DS_ACCELERATOR=cpu DS_BUILD_AIO=1 pip install --no-build-isolation dl/deepspeed-0.19.8.tar.gz
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

# Block size, queue depth, single submit, overlapping events, parallelism: the first is its default.
SETTINGS = (
    (1 << 20, 128, False, False, 1),
    (1 << 20, 32, True, True, 1),
    (4 << 20, 32, False, False, 1),
    (8 << 20, 32, False, True, 1),
)
MEMORY_BYTES = 256 << 20


class DeepNvme:
    """One process with one setting."""

    def __init__(self, python: str, file: Path, file_bytes: int, setting: tuple) -> None:
        from ours import Unavailable

        self.unavailable = Unavailable
        libaio = "libaio.so.1"  # its extension does not name it
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "LD_PRELOAD": libaio}
        command = [python, __file__, str(file), str(file_bytes), json.dumps(setting)]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def _answer(self) -> dict:
        # DeepSpeed prints remarks of its own.
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise self.unavailable(f"DeepNVMe's process ended with {self.process.wait()}")

    def run(self, what: str):
        from ours import Run

        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return Run(**self._answer())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve(file: str, file_bytes: int, setting: list) -> None:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(*setting)
    memory = handle.new_cpu_locked_tensor(MEMORY_BYTES, torch.empty(0, dtype=torch.uint8))
    memory.random_(0, 256)
    print(json.dumps({"setting": setting}), flush=True)
    for line in sys.stdin:
        act = handle.sync_pwrite if line.startswith("write") else handle.sync_pread
        cpu, started = time.process_time(), time.perf_counter()
        for offset in range(0, file_bytes, MEMORY_BYTES):
            if act(memory, file, offset) != 1:
                raise SystemExit(f"{line.strip()} at {offset} failed")
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        print(
            json.dumps({"bytes": file_bytes, "seconds": seconds, "cpu_seconds": cpu}), flush=True
        )


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
