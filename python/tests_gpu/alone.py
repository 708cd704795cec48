"""A test in a process of its own: torch takes another allocator once, and never back."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from conftest import run_script

HERE = Path(__file__).resolve().parent
# The package, and the small models of the tests on the CPU.
sys.path[:0] = [str(HERE.parent)]
sys.path.append(str(HERE.parent / "tests"))

# Torch's backward thread lets go of its Python objects a moment after backward has returned. Where
# the process ends at that very moment, CPython 3.11 unwinds the thread and C++ aborts.
LAST_WORDS = "; import time; time.sleep(0.1)"


def alone(**environment: str):
    """Runs the test in a fresh process with these variables. Whatever it writes to standard error
    fails it; what it prints is lost."""

    def wrap(body):
        # Without parameters of the body, which are no fixtures of pytest's.
        @functools.wraps(body)
        def test():
            path = f"sys.path.insert(0, {str(HERE)!r})"
            name = f"{body.__module__}.{body.__name__}"
            code = f"import sys; {path}; import {body.__module__}; {name}.__wrapped__()"
            code += LAST_WORDS
            run_script(code, **environment)

        return test

    return wrap
