"""Starts a worker process under the preload library, sends it commands, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Lines of a dead worker's standard error that are shown.
LOG_LINES_SHOWN = 25

QUIT_SECONDS_MAX = 30

Listener = Callable[[dict], None]


class WorkerError(RuntimeError):
    """A worker refused a command or died. The message contains its output."""


class Process:
    """One worker process. Commands are answered in order; one at a time."""

    def __init__(self, arguments: list[str], *, preload: Path | None, log: Path):
        self._log = log
        self._name = " ".join(arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
            # The preload library loads the libdormouse next to it; another copy would be a second
            # runtime.
            environment["DORMOUSE_LIB"] = str(preload.with_name("libdormouse.so"))
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                env=environment,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    def ready(self) -> dict:
        """Waits until the worker is ready."""
        return self._answer(lambda event: None)

    def query(self, name: str, listen: Listener | None = None, **arguments) -> dict:
        """Sends a command, passes its events to ``listen``, returns its reply."""
        try:
            self._process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        return self._answer(listen or (lambda event: None))

    def close(self) -> None:
        """Asks the worker to exit; kills it if it does not."""
        if self._process.poll() is None:
            try:
                self._process.stdin.write(json.dumps({"do": "quit"}) + "\n")
                self._process.wait(QUIT_SECONDS_MAX)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            # The pipe's buffer may hold data that a dead worker never read.
            self._process.stdin.close()
        self._process.stdout.close()

    def _answer(self, listen: Listener) -> dict:
        for line in self._process.stdout:
            message = json.loads(line)
            if "reply" in message:
                return message["reply"]
            if "error" in message:
                raise WorkerError(f"worker {self._name}: {message['error']} (log: {self._log})")
            listen(message)
        raise WorkerError(self._last_words())

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        said = "\n  ".join(lines) or "(nothing)"
        return f"worker {self._name} ended with status {code}; it said:\n  {said}"
