"""Worker processes of both sides on one device, started on first use."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from ..demo.process import Process, WorkerError
from .shapes import Geometry

WORKER_MODULE = "dormouse.headline.worker"


class Pair:
    """At most one process per side. ``runtime``: options of :class:`dormouse.Runtime` for the
    shared side."""

    def __init__(self, geometry: Geometry, device: str, runtime: dict):
        self._geometry = geometry
        self._device = device
        self._runtime = runtime
        self._logs = tempfile.TemporaryDirectory(prefix="headline-")
        self._processes: dict[str, Process] = {}
        self.info: dict[str, dict] = {}

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc) -> None:
        for side in list(self._processes):
            self.end(side)
        self._logs.cleanup()

    def query(self, side: str, name: str, **arguments) -> dict:
        """Sends a command to a side. Raises :class:`WorkerError` if it fails."""
        if side not in self._processes:
            self._start(side)
        return self._processes[side].query(name, **arguments)

    def end(self, side: str) -> None:
        """Ends a side's process; the next command starts a new one."""
        process = self._processes.pop(side, None)
        if process is not None:
            process.close()

    def died(self, side: str) -> bool:
        """Returns whether the side's process no longer answers."""
        try:
            self.query(side, "info")
        except WorkerError:
            return True
        return False

    def _start(self, side: str) -> None:
        arguments = ["-m", WORKER_MODULE, side, "--geometry", self._geometry.name]
        arguments += ["--layers", str(self._geometry.layers)]
        arguments += ["--microbatch-tokens", str(self._geometry.microbatch_tokens)]
        arguments += ["--device", self._device, "--runtime", json.dumps(self._runtime)]
        log = Path(self._logs.name) / f"{side}.log"
        process = Process(arguments, preload=None, log=log)
        try:
            self.info[side] = process.ready()
        except BaseException:
            process.close()
            raise
        self._processes[side] = process
