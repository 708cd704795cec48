"""Runs of drivers, plain and under callgrind."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contenders import RUN_SECONDS_MAX, TARGET, Contender, Unavailable

EXIT_OUT_OF_MEMORY = 3
PROFILE_LINES = 40
# A count, its share, a file, a function, and the library that has it.
ANNOTATED = re.compile(r"^ *([\d,]+) \([ \d.]+%\)  [^\n]*?:((?:[^:\n]|::)+?)(?: \[(.*)\])?$", re.M)

Result = dict[str, Any]


def run(contender: Contender, *arguments: object, **environment: object) -> Result:
    """What the driver printed. :class:`MemoryError` where it ran out of memory."""
    completed = start(contender, [], arguments, environment)
    return json.loads(completed.stdout)


def count_instructions(contender: Contender, *arguments: object) -> float:
    """Instructions per pair of the measured part, of all threads of the process."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "callgrind.out"
        completed = start(contender, callgrind(out), arguments, {})
    collected = re.search(r"Collected : (\d+)", completed.stderr)
    if collected is None:
        raise Unavailable("callgrind collected nothing")
    return int(collected.group(1)) / json.loads(completed.stdout)["pairs"]


def profile(contender: Contender, *arguments: object) -> str:
    """Instructions per pair of the measured part, by function and by library."""
    out = TARGET / "bench" / f"callgrind.{contender.driver}"
    pairs = json.loads(start(contender, callgrind(out), arguments, {}).stdout)["pairs"]
    annotate = ["callgrind_annotate", "--auto=no", "--threshold=100", str(out)]
    listing = subprocess.run(annotate, capture_output=True, text=True, check=True).stdout
    functions: Counter[str] = Counter()
    libraries: Counter[str] = Counter()
    library_of: dict[str, str] = {}
    # Code that was inlined has lines of its own, by the file it is from and without a library.
    for count, name, library in ANNOTATED.findall(listing):
        instructions = int(count.replace(",", ""))
        functions[name] += instructions
        if library:
            library_of[name] = Path(library).name
    for name, instructions in functions.items():
        libraries[library_of.get(name, "elsewhere")] += instructions
    lines = [f"{n / pairs:10.1f}  {name}" for name, n in functions.most_common(PROFILE_LINES)]
    lines += ["", *(f"{n / pairs:10.1f}  {name}" for name, n in libraries.most_common())]
    lines += ["", f"callers and callees: callgrind_annotate --inclusive=yes --tree=both {out}"]
    return "\n".join(["instructions per pair", *lines])


def callgrind(out: Path) -> list[str]:
    # The driver starts the count itself, behind its warm-up.
    return ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]


def start(
    contender: Contender,
    prefix: list[str],
    arguments: Iterable[object],
    environment: dict[str, object],
) -> subprocess.CompletedProcess[str]:
    extra = {name: str(value) for name, value in environment.items()}
    command = [*prefix, str(contender.path()), *map(str, arguments)]
    try:
        completed = subprocess.run(
            command,
            env=contender.command_environment(extra),
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(str(error)) from error
    if completed.returncode == EXIT_OUT_OF_MEMORY:
        raise MemoryError(completed.stderr.strip())
    if completed.returncode != 0:
        said = completed.stderr.strip().splitlines() or ["nothing said"]
        raise Unavailable(f"exit status {completed.returncode}: {said[-1]}")
    return completed
