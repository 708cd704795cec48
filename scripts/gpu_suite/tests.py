"""``python -m gpu_suite.tests FOLDER VENDOR``: the GPU tests, by pytest."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter

from .result import BROKEN, CANNOT_RUN, DONE, UNABLE
from .rows import LOWER, row
from .say import say

# pytest's own statuses.
PASSED, SOME_FAILED = 0, 1
_OUTCOME = re.compile(r"^\S+::(.*) (PASSED|FAILED|ERROR|SKIPPED)\b")
BAD = ("FAILED", "ERROR")
NAMES_MAX = 20


def main(folder: str, vendor: str) -> int:
    """Runs them all; returns the part's status."""
    environment = dict(os.environ)
    if importlib.util.find_spec("pytest") is None:
        if importlib.machinery.PathFinder.find_spec("pytest", [vendor]) is None:
            say(CANNOT_RUN, f"pytest is neither in this Python nor in {vendor}")
            return UNABLE
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], vendor])
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-rs"]
    command += ["-p", "no:cacheprovider", folder]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    counts, bad, last = Counter(), [], "pytest said nothing"
    for line in process.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        last = line.strip() or last
        outcome = _OUTCOME.match(line)
        if outcome:
            name, how = outcome.groups()
            counts[how] += 1
            bad += [name] if how in BAD else []
            _tell(counts, bad)
    # A signal, errors while tests are collected, or no tests: what was counted is not all of them.
    status = process.wait()
    if status != (SOME_FAILED if bad else PASSED):
        print(f"pytest ended with status {status}: {last}", file=sys.stderr)
        return BROKEN
    return DONE


def _tell(counts: Counter, bad: list[str]) -> None:
    failed = len(bad)
    how = "skipped: what only the stand-in GPU can show"
    if not bad and not counts["PASSED"]:
        failed, how = None, "no figure: no test has passed"
    if bad:
        how = "failed: " + ", ".join(bad[:NAMES_MAX]) + (" …" if len(bad) > NAMES_MAX else "")
    say("row", row("tests failed", "tests", failed, bar=0, better=LOWER, how=how,
                   passed=counts["PASSED"], skipped=counts["SKIPPED"]))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
