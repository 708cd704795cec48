"""A test in a process of its own: torch accepts another allocator once, and for good."""

from __future__ import annotations

import atexit
import functools
import sys
from pathlib import Path

from conftest import SCRIPT_SECONDS_MAX, check_quiet, run_script, skip_without_standin
from zygote import Zygote

HERE = Path(__file__).resolve().parent
# The package, and the small models of the tests on the CPU.
sys.path[:0] = [str(HERE.parent)]
sys.path.append(str(HERE.parent / "tests"))

_zygote: Zygote | None = None


def zygote() -> Zygote:
    """The zygote of this test run, started when first used."""
    global _zygote
    if _zygote is None or not _zygote.is_alive:
        _zygote = Zygote()
        atexit.register(_zygote.close)
    return _zygote


def alone(**environment: str):
    """Runs the test in a fresh process with these variables. Whatever it writes to standard error
    fails it; what it prints is lost."""

    def wrap(body):
        # Without parameters of the body, which are no fixtures of pytest's.
        @functools.wraps(body)
        def test():
            skip_without_standin(environment)
            module, name = body.__module__, body.__name__
            if any(variable.startswith("LD_") for variable in environment):
                # The loader reads these before any code runs.
                path = f"sys.path.insert(0, {str(HERE)!r})"
                code = f"import sys; {path}; import {module}; {module}.{name}.__wrapped__()"
                run_script(code, **environment)
            else:
                check_quiet(zygote().run(module, name, environment, SCRIPT_SECONDS_MAX))

        return test

    return wrap
