"""Forks processes that have imported torch already, one per request.

``python zygote.py`` imports the module a request names and the modules in its ``BEFORE_FORK``, and
forks; the child runs the test and ends as any interpreter does. CUDA and libdormouse
are not initialized before the fork, so a child starts as fresh as a new process, without the
seconds that importing torch takes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Of torch's threads for backward passes on a GPU.
AUTOGRAD_THREAD = "pt_autograd"
# Such a thread releases its Python objects shortly after backward has returned. If the process ends
# at that moment, CPython 3.11 unwinds the thread and C++ aborts.
RELEASE_S = 0.1


class Zygote:
    """The process that forks. Used by one thread."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(
        self, module: str, name: str, environment: dict[str, str], seconds_max: float
    ) -> subprocess.CompletedProcess:
        """Runs ``module.name.__wrapped__()`` in a fork. Raises TimeoutExpired like subprocess."""
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            request = (module, name, environment, out.name, err.name)
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            child = self._answer(seconds_max)
            try:
                status = self._answer(seconds_max)
            except subprocess.TimeoutExpired:
                os.kill(child, 9)
                self.close()
                raise
            return subprocess.CompletedProcess(request, status, out.read(), err.read())

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _answer(self, seconds_max: float) -> int:
        if not select.select([self._process.stdout], [], [], seconds_max)[0]:
            raise subprocess.TimeoutExpired(self._process.args, seconds_max)
        return int(self._process.stdout.readline())


def serve() -> tuple[str, str]:
    """Answers requests with a child's id and its exit status; returns in each child."""
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        module, name, environment, out, err = json.loads(line)
        load(module)
        child = os.fork()
        if child == 0:
            os.close(answers)
            for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
                opened = os.open(path, os.O_RDWR)
                os.dup2(opened, descriptor)
                os.close(opened)
            os.environ.update(environment)
            return module, name
        os.write(answers, b"%d\n" % child)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, b"%d\n" % status)
    os._exit(0)


def load(module: str) -> None:
    """Imports ``module``. It must leave CUDA and libdormouse for the child to initialize."""
    if module not in sys.modules:
        for also in getattr(importlib.import_module(module), "BEFORE_FORK", ()):
            importlib.import_module(also)
        # A child's interpreter ends in a tenth of the time if it need not collect all of this.
        gc.collect()
        gc.freeze()
    torch, native = sys.modules.get("torch"), sys.modules.get("dormouse._native")
    assert torch is None or not torch.cuda.is_initialized(), f"{module} initialized CUDA"
    assert native is None or not native.library.cache_info().currsize, f"{module} loaded dormouse"


def has_autograd_threads() -> bool:
    """Whether torch has started threads for backward passes."""
    with contextlib.suppress(OSError):
        return any(
            name.read_text().startswith(AUTOGRAD_THREAD)
            for name in Path("/proc/self/task").glob("*/comm")
        )
    return True


def main() -> None:
    sys.path.insert(0, str(HERE))
    module, name = serve()
    getattr(sys.modules[module], name).__wrapped__()
    if has_autograd_threads():
        time.sleep(RELEASE_S)


if __name__ == "__main__":
    main()
