"""Deadlock-free by rule, where the caller keeps the interpreter's lock: no thread of ours needs it.

Our threads stand still when the call begins, and the kernel lets them go a while later; the caller
lets no other thread of Python's run before it has its answer.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import threading
import uuid

import pytest
import torch
from deadlock import LIMIT_S, Held, cells, has_place, kept, threads

from dormouse import _native as native
from dormouse.runtime import Prefix

PIECE_BYTES = 1 << 20
KEYS = itertools.count(1 << 48)  # of no other test's storage
SLACK_BYTES = 512 << 10  # for the interpreter's own memory while the device is full
OUT_OF_MEMORY, TIER_CLOSED = -201, -202  # DORMOUSE_ERR_*


def piece(seed: int) -> torch.Tensor:
    # A malloc of the size, which the preload library serves.
    return torch.arange(PIECE_BYTES // 8).mul_(seed)


def is_intact(tensor: torch.Tensor, seed: int) -> bool:
    return torch.equal(tensor, torch.arange(tensor.numel()).mul_(seed))


# They wait for the copy's end, on a thread of their own.
BEGINS = {
    "out": lambda tag: tag.sleep("host"),
    "in": lambda tag: tag.wake(),
    "write": lambda tag: tag.sleep("nvme"),
}


class Scene:
    """A tag whose copy is in flight, a tag asleep, and a prefix whose layer may sleep."""

    def __init__(self, runtime, memory: str, copy: str, *, wakes_node: bool):
        self.runtime, self.memory, self.copy = runtime, memory, copy
        self.info = runtime.info()
        self.subject, self.asleep = piece(3), piece(5)
        self.plain, self.target = piece(7), piece(0)
        self.subject_tag = self._tag(self.subject)
        self.asleep_tag = self._tag(self.asleep)
        self.held = self.waiter = None
        self.came_back = False
        self.stash = ctypes.c_uint64()
        self._stash(self.stash)
        self.other_stash = ctypes.c_uint64()
        self._stash(self.other_stash)
        self.libc = libc = ctypes.PyDLL(None)
        libc.malloc.restype = libc.realloc.restype = ctypes.c_void_p
        libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
        libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.block = libc.malloc(SLACK_BYTES // 4)
        assert self.asleep_tag.sleep("nvme") is None
        if wakes_node:
            self.node, self.dormant = self._node()
            self._settled(self.dormant)
            self.spare_node, self.spare = self._spare()
        else:
            self.node, self.dormant = self._spare()
        self._settled(self.asleep)
        self.freed_later = [torch.zeros(SLACK_BYTES // 16)]
        self.can_free = threading.Event()
        self.freer = threading.Thread(target=self._free_later)
        self.freer.start()
        gc.collect()
        runtime.trim()

    def _tag(self, tensor):
        tag = self.runtime.tag(uuid.uuid4().hex)
        tag.add(tensor)
        return tag

    def _stash(self, out) -> int:
        key = next(KEYS)
        address, nbytes = self.plain.data_ptr(), self.plain.nbytes
        return kept(
            "stash_put", self.runtime._handle, address, nbytes, key, None, ctypes.byref(out)
        )

    def _node(self):
        """A node in phase B, and the tensor of its one layer."""
        node = Prefix(self.runtime, None, 1)
        node.enter(native.Phase.A)
        node.mark(native.Edge.FORWARD_BEGIN, 0)
        dormant = piece(11)
        node.dormant(0, [dormant.data_ptr()])
        node.mark(native.Edge.FORWARD_END, 0)
        node.enter(native.Phase.B)
        return node, dormant

    def _spare(self):
        """The same, awake because no tier had a place for it, and free to sleep for others."""
        self._tiers(0, 0)
        node, dormant = self._node()
        self._tiers(self.info["host_budget_bytes"], self.info["nvme_file_bytes"])
        now = self.state(dormant)
        assert now == "awake"
        return node, dormant

    def _tiers(self, host_bytes: int, nvme_bytes: int):
        self.runtime.set_budget("host", host_bytes)
        self.runtime.set_budget("nvme", nvme_bytes)

    def _free_later(self):
        # What torch's allocator does on another thread: it needs the interpreter first.
        self.can_free.wait()
        self.freed_later.clear()

    def state(self, tensor) -> str:
        return self.runtime.query(tensor.data_ptr())["state"]

    def _settled(self, tensor):
        while self.state(tensor) in ("falling_asleep", "spilling", "loading", "waking"):
            pass

    def begin(self) -> None:
        """Has the copy under way and held, and the device as full as the cell says."""
        if self.copy == "in":
            self.subject_tag.sleep("host")
            self._settled(self.subject)
        was = self.state(self.subject)
        if self.copy != "none":
            self.held = Held(threads())
            self.waiter = threading.Thread(target=BEGINS[self.copy], args=[self.subject_tag])
            self.waiter.start()
            while self.state(self.subject) == was:
                pass
        if self.memory != "plenty":
            mapped = self.runtime.stats()["mapped"]["current_bytes"]
            self.runtime.set_budget("device", mapped + SLACK_BYTES)
            host, nvme = has_place(self.memory)
            self._tiers(self.info["host_budget_bytes"] * host, self.info["nvme_file_bytes"] * nvme)
        wanted = {"none": "awake", "in": "waking"}.get(self.copy, "falling_asleep")
        now = self.state(self.subject)
        assert now == wanted
        self.can_free.set()

    def let_go_later(self) -> None:
        if self.held:
            self.held.let_go_later()

    def _restore(self):
        self.runtime.set_budget("device", self.info["alloc_budget_bytes"])
        self._tiers(self.info["host_budget_bytes"], self.info["nvme_file_bytes"])

    def has_room(self) -> bool:
        return (
            self.memory == "plenty" or self.copy in ("out", "write") or any(has_place(self.memory))
        )

    def end(self) -> None:
        if self.held:
            self.held.let_go()
        if self.waiter:
            self.waiter.join()
        self._restore()
        self.freer.join()
        assert not self.freed_later
        for tag in (self.subject_tag, self.asleep_tag):
            tag.wake()
            tag.close()
        self.node.close()
        if hasattr(self, "spare_node"):
            self.spare_node.close()
        assert is_intact(self.subject, 3) and is_intact(self.asleep, 5)
        assert not self.came_back or is_intact(self.target, 7)
        assert is_intact(self.plain, 7) and is_intact(self.dormant, 11)
        for stash in (self.stash, self.other_stash):
            # One of them may be gone already.
            kept("stash_drop", self.runtime._handle, stash.value)


def copy(scene: Scene) -> None:
    out = ctypes.c_uint64()
    status = scene._stash(out)
    assert status == (native.OK if any(has_place(scene.memory)) else native.DECLINED)
    handle = scene.runtime._handle
    assert kept("stash_get", handle, scene.stash.value, scene.target.data_ptr(), None) == native.OK
    scene.came_back = True
    if status == native.OK:
        drop(scene, out.value)


def tags(scene: Scene) -> None:
    handle = scene.asleep_tag._handle
    assert_memory(scene, kept("tag_wake", handle, None))
    for tier, is_open in zip(native.TIERS[1:], has_place(scene.memory), strict=True):
        asked = kept("tag_sleep", handle, native.TIERS.index(tier), None)
        assert asked >= native.OK if is_open else asked == TIER_CLOSED, native.last_error()


def marks(scene: Scene) -> None:
    status = kept("prefix_mark_edge", scene.node._handle, native.Edge.BACKWARD_BEGIN, 0, None)
    assert_memory(scene, status)


def preload(scene: Scene) -> None:
    libc = scene.libc
    memory = libc.malloc(PIECE_BYTES)
    assert (memory is not None) == scene.has_room()
    if memory is not None:
        grown = libc.realloc(memory, PIECE_BYTES + 1)
        libc.free(grown or memory)


def assert_memory(scene: Scene, status: int) -> None:
    expected = native.OK if scene.has_room() else OUT_OF_MEMORY
    assert status == expected, native.last_error()


# What returns while the copy is held.
AT_ONCE = {
    "copy": lambda scene: drop(scene, scene.other_stash.value),
    "marks": lambda scene: mark(scene, "prefix_enter_phase", native.Phase.C),
    "preload": lambda scene: scene.libc.free(scene.block),
}


def drop(scene: Scene, stash: int) -> None:
    assert kept("stash_drop", scene.runtime._handle, stash) == native.OK


def mark(scene: Scene, name: str, *arguments: int) -> None:
    assert kept(name, scene.node._handle, *arguments, None) == native.OK


INTERFACES = {"copy": copy, "tags": tags, "marks": marks, "preload": preload}


@pytest.mark.parametrize("cell", cells("python"), ids="-".join)
def test_a_caller_that_keeps_the_interpreter_is_answered(runtime, cell):
    interface, memory, copy = cell
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    scene = Scene(runtime, memory, copy, wakes_node=interface == "marks")
    try:
        scene.begin()
        AT_ONCE.get(interface, lambda _scene: None)(scene)
        scene.let_go_later()
        INTERFACES[interface](scene)
    finally:
        scene.end()
        faulthandler.cancel_dump_traceback_later()
