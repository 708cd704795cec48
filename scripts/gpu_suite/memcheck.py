"""``python -m gpu_suite.memcheck SANITIZER GPU_CHECK``: gpu-check with every access looked at."""

from __future__ import annotations

import re
import subprocess
import sys

from .result import CANNOT_RUN, DONE, FAILED, UNABLE, tail
from .rows import LOWER, row
from .say import say

# Small: under the tool each part takes many times as long.
RUNS = {
    "kernels": ["kernels"],
    "sleep": ["sleep", "mib=256"],
    "device conformance": ["conformance"],
}
# Refusals by the driver are part of the contract that conformance tests: no errors of ours.
OPTIONS = ("--tool", "memcheck", "--leak-check", "no", "--report-api-errors", "no")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


def main(sanitizer: str, gpu_check: str) -> int:
    """Runs each; returns the part's status."""
    for name, arguments in RUNS.items():
        command = [sanitizer, *OPTIONS, gpu_check, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        said = done.stdout + done.stderr
        counted = _SUMMARY.findall(said)
        if not counted:
            say(CANNOT_RUN, f"{sanitizer} gave no summary of {name}: {tail(said)[-400:]}")
            return UNABLE
        how = f"compute-sanitizer memcheck, gpu-check {' '.join(arguments)}"
        errors = sum(map(int, counted))
        say("row", row(f"memcheck errors, {name}", "errors", errors, bar=0, better=LOWER, how=how))
        if done.returncode:
            held = row(f"{name} holds under memcheck", FAILED, 1, bar=0, better=LOWER, how=how)
            say("row", held)
            print(tail(said), file=sys.stderr)
    return DONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
