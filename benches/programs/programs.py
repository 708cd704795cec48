"""The programs, as data."""

from __future__ import annotations

import glob
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from running import BUILT, TARGET

WORK = Path(__file__).resolve().parent / "work"
# Packages of their own versions; scripts/setup-programs makes it.
PYTHON = str(TARGET / "programs-venv" / "bin" / "python")
CPYTHON = "/usr/bin/python3"
CPYTHON_TESTS = (
    *("array", "bytes", "ctypes", "dict", "fork1", "gc", "list", "mmap", "pickle", "set"),
    *("signal", "socket", "struct", "subprocess", "thread", "threading", "tracemalloc"),
    *("unicode", "weakref", "zlib"),
)
STRESSORS = ("malloc", "brk", "bigheap", "fork", "mmapfork", "memrate", "stack", "mremap")
STRESSOR_OPS = {
    **{"bigheap": 2000, "brk": 20000, "fork": 500, "mmapfork": 4, "memrate": 2},
    # A second each, or a third of it.
    **{"stack": 10, "mremap": 20},
}
# Tests that hang under glibc too, where virtual machines have no peer.
CPYTHON_IGNORED = {"socket": ["-i", "*VSOCK*"]}


@dataclass(frozen=True)
class Program:
    """``package`` of Debian carries ``needs``, paths or commands. Standard output is compared,
    without the lines that match ``ignored``; a program prints checksums of what it writes."""

    name: str
    command: list[str]
    package: str = ""
    needs: tuple[str, ...] = ()
    ignored: str = ""

    def missing(self) -> str | None:
        gone = [each for each in self.needs if not (shutil.which(each) or Path(each).exists())]
        return f"missing: {self.package} ({', '.join(gone)})" if gone else None


def script(name: str) -> list[str]:
    return ["sh", "-eu", str(WORK / name)]


def cpython(module: str) -> Program:
    found = glob.glob(f"/usr/lib/python3.*/test/test_{module}*")
    return Program(
        f"cpython.{module}",
        [CPYTHON, "-m", "test", "-q", *CPYTHON_IGNORED.get(module, []), f"test_{module}"],
        "libpython3.11-testsuite",
        # The pattern names itself where nothing matches it.
        (CPYTHON, *(found[:1] or [f"/usr/lib/python3.*/test/test_{module}"])),
        # Durations, load, seeds and process ids.
        r"duration|load avg|random seed|^== |tests? (OK|run)|Result:",
    )


def stressor(name: str) -> Program:
    command = ["stress-ng", f"--{name}", "1", f"--{name}-ops", str(STRESSOR_OPS.get(name, 5000))]
    limits = {"bigheap": ["--bigheap-growth", "1m"], "memrate": ["--memrate-bytes", "64m"]}
    return Program(
        f"stress-ng.{name}",
        [*command, *limits.get(name, []), "--quiet", "--timeout", "300"],
        "stress-ng",
        ("stress-ng",),
    )


def arrays(name: str, python: str = PYTHON) -> Program:
    packages = f"{Path(python).parents[1]}/lib/python3*/site-packages/{name}"
    return Program(
        f"python.{name}",
        [python, str(WORK / "arrays.py"), name],
        "scripts/setup-programs",
        (python, *(glob.glob(packages)[:1] or [packages])),
    )


PROGRAMS = (
    Program("malloc.family", [str(BUILT / "family")]),
    *(
        Program(f"malloc.{kind}", [str(BUILT / "churn"), kind])
        for kind in ("exchange", "producer", "local", "mixed")
    ),
    *map(cpython, CPYTHON_TESTS),
    *map(stressor, STRESSORS),
    *map(arrays, ("numpy", "pandas", "sklearn")),
    arrays("torch", sys.executable),
    Program("redis", script("redis.sh"), "redis-server", ("redis-server", "redis-benchmark")),
    Program("sqlite", script("sqlite.sh"), "sqlite3", ("sqlite3",)),
    Program("git", script("git.sh"), "git", ("git",)),
    Program("g++", script("compile.sh"), "g++", ("g++",)),
    Program("node", ["node", str(WORK / "objects.js")], "nodejs", ("node",)),
    Program("java", ["java", "-Xmx256m", str(WORK / "Objects.java")], "default-jdk", ("javac",)),
    Program("go", script("go.sh"), "golang-go", ("go",)),
    Program("chromium", script("chromium.sh"), "chromium", ("chromium",)),
)
