"""Deadlock-free by rule: torch's two allocator interfaces, called as torch calls them, with the
interpreter's lock kept. No thread of ours needs it, and no free waits for a copy."""

from __future__ import annotations

import ctypes
import faulthandler
import tempfile
import threading
import time
from pathlib import Path

import torch
from alone import alone
from conftest import busy, standin_only

import dormouse
from dormouse import _native as native
from dormouse.runtime import Prefix

from deadlock import LIMIT_S, Held, cells, has_place, kept, threads  # isort: skip

PIECE_BYTES = 2 << 20  # a page: less shares one, and stays
HOST_BYTES, FILE_BYTES = 32 << 20, 32 << 20
NULL_STREAM = None
TRIES_MAX = 8
PATIENCE_S = 1  # for copies to begin
BUSY_MS = 50
# They wait for the copy's end, on a thread of their own.
BEGINS = {
    "out": ("tag_sleep", native.TIERS.index("host")),
    "in": ("tag_wake",),
    "write": ("tag_sleep", native.TIERS.index("nvme")),
}


class Interface:
    """One of torch's two allocator interfaces: its allocator, or a memory pool."""

    def __init__(self, name: str, folder):
        self.malloc = {"allocator": "torch_malloc", "pool": "torch_pool_malloc"}[name]
        self.name = name
        self.runtime = dormouse.Runtime(
            device="cuda",
            nvme_dir=folder,
            nvme_file_bytes=FILE_BYTES,
            host_budget_bytes=HOST_BYTES,
        )
        self.budget_bytes = self.runtime.info()["alloc_budget_bytes"]
        torch.ones(1).cuda()  # the default stream is there
        before = threads("")
        # Streams are made when they are first used.
        block, tag = self.tagged(1)
        busy(BUSY_MS)  # so that the sleep waits for an event, on a stream for that
        native.call("tag_sleep", tag._handle, BEGINS["write"][1], NULL_STREAM)
        native.call("tag_wake", tag._handle, NULL_STREAM)
        tag.close()
        self.free(block)
        self.io = threads("dormouse-io-")  # they have run: something was written
        # The driver's, but not of the trainer's stream, and those that tell of their progress.
        streams = threads("") - before - self.io
        while not streams <= threads():
            pass  # a thread names itself when it first runs
        # Nor those of the stream that waits for the trainer's events: what comes before a copy.
        # The thread that tells of a stream is made behind the stream's own.
        in_order = sorted(streams)
        waits = [in_order.index(tid) for tid in threads("dormouse-event") & streams]
        assert waits, "no thread of the event wait's stream"
        self.streams = streams - {in_order[at] for wait in waits for at in (wait - 1, wait)}

    def new(self, seed: int) -> int:
        block = kept(self.malloc, PIECE_BYTES, 0, NULL_STREAM)
        assert block, native.last_error()
        # The stand-in's memory is the CPU's to touch.
        ctypes.memset(block, seed, PIECE_BYTES)
        return block

    def free(self, block: int) -> None:
        kept("torch_free", block, PIECE_BYTES, 0, NULL_STREAM)

    def tagged(self, seed: int):
        tag = self.runtime.tag(f"{self.name}-{seed}-{threading.get_native_id()}")
        block = self.new(seed)
        native.call("tag_add", tag._handle, block, PIECE_BYTES)
        return block, tag

    def node(self, seed: int):
        """A node in phase B and its dormant block, awake: no tier has had a place for it."""
        self.tiers(0, 0)
        node = Prefix(self.runtime, None, 1)
        node.enter(native.Phase.A)
        node.mark(native.Edge.FORWARD_BEGIN, 0)
        block = self.new(seed)
        node.dormant(0, [block])
        node.mark(native.Edge.FORWARD_END, 0)
        node.enter(native.Phase.B)
        self.tiers(HOST_BYTES, FILE_BYTES)
        assert self.state(block) == "awake"
        return node, block

    def tiers(self, host_bytes: int, nvme_bytes: int) -> None:
        self.runtime.set_budget("host", host_bytes)
        self.runtime.set_budget("nvme", nvme_bytes)

    def state(self, block: int) -> str:
        return self.runtime.query(block)["state"]


def holds(block: int, seed: int) -> bool:
    return ctypes.string_at(block, PIECE_BYTES) == bytes([seed]) * PIECE_BYTES


def begin(interface: Interface, copy: str, tags: dict):
    """Has the copies of these blocks under way, and held. What a stream of the driver's is late for
    may be behind one that is held already: then it is begun again."""
    if copy == "none":
        return None, []
    now = {"out": "falling_asleep", "in": "awake", "write": "spilling"}[copy]
    name, *tier = BEGINS[copy]
    for _ in range(TRIES_MAX):
        for tag in tags.values() if copy == "in" else ():
            native.call("tag_sleep", tag._handle, BEGINS["out"][1], NULL_STREAM)
        interface.runtime.trim()
        held = Held(interface.io if copy == "write" else interface.streams)
        waiters = []
        for tag in tags.values():
            arguments = (name, tag._handle, *tier, NULL_STREAM)
            waiters.append(threading.Thread(target=native.call, args=arguments))
            waiters[-1].start()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if all(interface.state(block) == now for block in tags):
                return held, waiters
        held.let_go()
        for waiter in waiters:
            waiter.join()
        for tag in tags.values():
            native.call("tag_wake", tag._handle, NULL_STREAM)
    raise AssertionError(f"{TRIES_MAX} times not {now}")


def run(interface: Interface, memory: str, copy: str) -> None:
    runtime = interface.runtime
    subject, subject_tag = interface.tagged(3)
    asleep, asleep_tag = interface.tagged(5)
    deferred, deferred_tag = interface.tagged(7)
    plain = interface.new(9)
    native.call("tag_sleep", asleep_tag._handle, BEGINS["write"][1], NULL_STREAM)
    node, spare = interface.node(11)
    runtime.trim()
    held, waiters = begin(interface, copy, {subject: subject_tag, deferred: deferred_tag})
    if memory != "plenty":
        runtime.set_budget("device", runtime.stats()["mapped"]["current_bytes"])
        host, nvme = has_place(memory)
        interface.tiers(HOST_BYTES * host, FILE_BYTES * nvme)
    # With the copy held: a free that waited for it would never come back.
    interface.free(deferred)
    if held:
        held.let_go_later()
    # On a GPU what sleeps in the file has gone by way of host memory.
    has_room = memory == "plenty" or copy == "out" or has_place(memory)[0]
    other_bytes = PIECE_BYTES if memory == "plenty" else PIECE_BYTES + freed_bytes(copy)
    asked = interface.malloc if has_room else "torch_pool_malloc"  # which throws nothing
    block = kept(asked, other_bytes, 0, NULL_STREAM)
    assert bool(block) == has_room, native.last_error()
    if held:
        held.let_go()
    for waiter in waiters:
        waiter.join()
    runtime.set_budget("device", interface.budget_bytes)
    interface.tiers(HOST_BYTES, FILE_BYTES)
    if block:
        kept("torch_free", block, other_bytes, 0, NULL_STREAM)
    for tag in (subject_tag, asleep_tag, deferred_tag):
        native.call("tag_wake", tag._handle, NULL_STREAM)
        tag.close()
    node.close()
    for address, seed in ((subject, 3), (asleep, 5), (plain, 9), (spare, 11)):
        assert holds(address, seed), seed
        interface.free(address)


def freed_bytes(copy: str) -> int:
    """What the free of the block freed late gives up at once or when its copy ends."""
    return 0 if copy == "write" else PIECE_BYTES


def run_interface(name: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "target"
    folder.mkdir(exist_ok=True)
    interface = Interface(name, tempfile.mkdtemp(dir=folder))
    for cell_interface, memory, copy in cells("python-gpu"):
        if cell_interface == name:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            try:
                run(interface, memory, copy)
            except AssertionError as error:
                raise AssertionError(f"{name} {memory} {copy}") from error
    faulthandler.cancel_dump_traceback_later()


@standin_only("the CPU writes to blocks")
@alone()
def test_allocator():
    run_interface("allocator")


@standin_only("the CPU writes to blocks")
@alone()
def test_pool():
    run_interface("pool")


@alone()
def test_the_heap_of_malloc_is_the_hosts():
    """Why the preload library has no cells on a GPU: no GPU address lies in its range."""

    class Span(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in ("begin", "end", "min_bytes")]

    block = kept("torch_malloc", PIECE_BYTES, 0, NULL_STREAM)
    heap_range = native.library().dormouse_heap_range
    heap_range.restype = ctypes.POINTER(Span)
    span = heap_range().contents
    assert block and not span.begin <= block < span.end
    kept("torch_free", block, PIECE_BYTES, 0, NULL_STREAM)
