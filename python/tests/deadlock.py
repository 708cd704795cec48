"""Shared by the "deadlock-free by rule" tests: the matrix, calls that keep the GIL, and a way to
hold the runtime's own threads."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import signal
from pathlib import Path

from dormouse import _native as native

MATRIX = Path(__file__).resolve().parents[2] / "tests" / "deadlock" / "matrix.txt"
LIMIT_S = 30  # one cell's; a call that hangs ends the process with every thread's stack


@functools.cache
def words(key: str) -> tuple[str, ...]:
    """The words after ``key:`` in the matrix."""
    lines = [line for line in MATRIX.read_text().splitlines() if line.startswith(f"{key}:")]
    assert len(lines) == 1, f"{len(lines)} lines {key!r}"
    return tuple(lines[0].partition(":")[2].split())


def cells(suite: str) -> list[tuple[str, str, str]]:
    """(interface, memory, copy) of every cell that this suite runs."""
    run = words(f"run {suite}")
    at = run.index("/")
    assert run[at + 1 :] == ("interpreter",), run
    return list(itertools.product(run[:at], words("memory"), words("copy")))


def has_place(memory: str) -> tuple[bool, bool]:
    """Whether host memory and the file have one."""
    return memory in ("plenty", "full", "no_nvme"), memory in ("plenty", "full", "no_host")


@functools.cache
def keeping() -> ctypes.PyDLL:
    """The library, called with the GIL kept, as torch's own code calls it."""
    library = ctypes.PyDLL(str(native.library_path()))
    for name, arguments in native._PROTOTYPES.items():
        function = getattr(library, f"dormouse_{name}")
        function.restype, function.argtypes = ctypes.c_int32, arguments
    for name, (result, arguments) in native._TORCH_PROTOTYPES.items():
        function = getattr(library, f"dormouse_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def kept(name: str, *arguments) -> int:
    """Calls ``dormouse_<name>`` with the GIL kept. Its result, whatever it is."""
    return getattr(keeping(), f"dormouse_{name}")(*arguments)


class _SigEvent(ctypes.Structure):
    """``struct sigevent`` for a signal to one thread."""

    _fields_ = [
        ("value", ctypes.c_uint64),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("tid", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    ]


SIGEV_THREAD_ID = 4
CLOCK_MONOTONIC = 1
# A handler is given its signal's number: sleep() stays for so many seconds, more than a cell has.
HOLD = signal.SIGRTMIN + 6
LET_GO = signal.SIGRTMIN + 7  # its handler does nothing, and ends that sleep
CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}  # what sleep() calls
A_WHILE_NS = 4_000_000


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    for number, handler in ((HOLD, libc.sleep), (LET_GO, libc.abs)):
        libc.signal(number, ctypes.cast(handler, ctypes.c_void_p))
    return libc


def threads(prefix: str = "dormouse-") -> set[int]:
    """The threads of this process so named."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(task.name) for task in tasks if (task / "comm").read_text().startswith(prefix)}


def _sleeps(tid: int) -> bool:
    number = CLOCK_NANOSLEEP[os.uname().machine]
    return Path(f"/proc/self/task/{tid}/syscall").read_text().startswith(f"{number} ")


class Held:
    """The runtime's own threads stand still, in a signal handler, until they are let go.

    The kernel lets them go, a while after :meth:`let_go_later`: no thread of Python's need run.
    """

    def __init__(self, tids: set[int]):
        assert tids and HOLD > LIMIT_S
        self._tids = tids
        self._timers: list[ctypes.c_void_p] = []
        for tid in self._tids:
            self._kill(tid, HOLD)
        # A signal to go on would be lost on a thread that does not stand still yet.
        while not all(map(_sleeps, self._tids)):
            pass

    def _kill(self, tid: int, number: int) -> None:
        assert _libc().tgkill(os.getpid(), tid, number) == 0, os.strerror(ctypes.get_errno())

    def let_go_later(self) -> None:
        """Lets them go in a while, whoever has the GIL then."""
        when = (ctypes.c_long * 4)(0, 0, 0, A_WHILE_NS)
        for tid in self._tids:
            event, timer = _SigEvent(0, LET_GO, SIGEV_THREAD_ID, tid), ctypes.c_void_p()
            libc = _libc()
            assert libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0
            assert libc.timer_settime(timer, 0, when, None) == 0
            self._timers.append(timer)

    def let_go(self) -> None:
        """Lets them go now."""
        for tid in self._tids:
            self._kill(tid, LET_GO)
        for timer in self._timers:
            _libc().timer_delete(timer)
