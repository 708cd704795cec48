"""Synthetic traces, made to be hard.

    python benches/traces/generate.py adversarial      # -> benches/traces/adversarial.csv.xz
    python benches/traces/generate.py --all

Needs no torch; makes the same events every time.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import experts
from builder import Builder
from command import chosen
from format import PARTS_KEY, Trace, write

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# --- stream_rotation
STREAMS = 16
ROTATIONS = 8
ROTATED_BYTES = 2 * GIB
GATHERS = 24  # layers gathered ahead, per rotation
GATHERED_BYTES = (218 * MIB, 352 * MIB)  # attention and MLP of a wide layer, in BF16
AHEAD = 2  # buffers alive at once

# --- adversarial
COMB_BYTES = 4 * GIB  # asked for in each row of the comb, less what is still live
COMB_LEAST, COMB_MOST = 2 * MIB, 512 * MIB
PINS = 400
CACHES, CACHE_TURNS = 8, 50
CHURN, CHURN_OCTAVES = 6000, 17  # 512 B to 64 MiB
SEED = 20


def stream_rotation() -> Trace:
    """Buffers that move from stream to stream, as those of copies and collectives do.

    Live are never more than a few; kept by stream, one is stranded on each.
    """
    made = Builder()
    made.allocate(4 * GIB)  # weights, on the first stream, for good
    for turn in range(ROTATIONS):
        for stream in range(STREAMS):
            # In turn: one large buffer, then nothing of it.
            block = made.allocate(ROTATED_BYTES - turn * 64 * MIB, stream)
            small = [made.allocate(64 * KIB * (i + 1), stream) for i in range(8)]
            made.free(block)
            made.free_all(small)
        # Overlapped: the next buffers are filled on their streams while these are read.
        ahead: list[int] = []
        for i in range(GATHERS):
            stream = (turn + i) % STREAMS
            ahead.append(made.allocate(GATHERED_BYTES[i % 2], stream))
            if len(ahead) > AHEAD:
                made.free(ahead.pop(0))
        made.free_all(ahead)
    return _trace(
        "stream_rotation",
        f"large buffers in turn on {STREAMS} streams, one or {AHEAD} alive at a time",
        made,
    )


def expert_parallel() -> Trace:
    """A mixture of experts whose all-to-alls receive on streams of their own, other amounts each time."""
    made, chance = Builder(), random.Random(experts.SEED)
    # Weights, their gradients and the optimizer's states, for good.
    for size in (3 * GIB, 3 * GIB, 6 * GIB):
        made.allocate(size)
    for _ in range(experts.STEPS):
        experts.step(made, chance)
    return _trace(
        "expert_parallel",
        f"a rank of a mixture of experts, {experts.LAYERS} layers of {experts.EXPERTS} experts; dispatch and combine "
        "receive on streams of their own; another number of tokens in each step and expert",
        made,
    )


def adversarial() -> Trace:
    """What best fit, size classes and whole pages do worst at, one after the other; between two
    of them nothing is live."""
    made, parts = Builder(), []
    for name, part in ADVERSARIES.items():
        parts.append(f"{name} {len(made.events)}")
        part(made)
        made.free_all(made.live)
    about = (
        "Robson's comb; small blocks that outlive large ones; buffers that grow; sizes just above "
        "what is rounded to; log-uniform churn"
    )
    return _trace("adversarial", about, made, **{PARTS_KEY: ", ".join(parts)})


def _comb(made: Builder) -> None:
    """Robson: fill with one size, free every other block, ask for twice the size: no hole fits.

    Live bytes stay below :data:`COMB_BYTES`; best fit in one address range needs several times it.
    """
    size, teeth, live_bytes = COMB_LEAST, [], 0
    while size <= COMB_MOST:
        row = [made.allocate(size) for _ in range((COMB_BYTES - live_bytes) // size)]
        made.free_all(row[::2])
        kept = row[1::2]
        # Of the older teeth every other one goes as well, so that there is room to ask again.
        made.free_all(pointer for pointer, _ in teeth[::2])
        teeth = teeth[1::2] + [(pointer, size) for pointer in kept]
        live_bytes = sum(nbytes for _, nbytes in teeth)
        size *= 2


def _pinned_holes(made: Builder) -> None:
    """A small block made between large ones outlives them and splits what they leave."""
    for i in range(PINS):
        large = [made.allocate((20 + 7 * ((i + j) % 9)) * MIB) for j in range(6)]
        made.allocate(1536 * KIB if i % 4 == 0 else 96 * KIB)
        made.free_all(large)


def _growth(made: Builder) -> None:
    """Caches copied into slightly larger blocks again and again: each hole is too small for the
    next."""
    sizes = [(48 + i * 2) * MIB for i in range(CACHES)]
    caches = [made.allocate(size) for size in sizes]
    for turn in range(CACHE_TURNS):
        for i, size in enumerate(sizes):
            sizes[i] = size + size // 24 // 512 * 512
            larger = made.allocate(sizes[i])
            made.free(caches[i])
            caches[i] = larger
        if turn % 10 == 9:
            # Only holes that were joined have room for this one.
            made.free(made.allocate(sizes[0] * 3 // 2))


def _off_by_little(made: Builder) -> None:
    """One step above a power of two, a page and a segment: the most that rounding can cost."""
    steps = [512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB, 10 * MIB, 20 * MIB, 32 * MIB, 64 * MIB]
    blocks = [made.allocate(step + 512) for _ in range(12) for step in steps]
    made.free_all(blocks[::3])
    for _ in range(8):
        blocks = [made.allocate(step - 512) for step in steps for _ in range(4)]
        made.free_all(blocks)


def _churn(made: Builder) -> None:
    """Each octave of sizes as often, in no order; about 300 blocks alive."""
    chance = random.Random(SEED)
    live: list[int] = []
    for _ in range(CHURN):
        if len(live) > 200 and chance.random() < len(live) / 600:
            made.free(live.pop(int(chance.random() * len(live))))
        else:
            live.append(made.allocate(max(1, int(512 * 2 ** (chance.random() * CHURN_OCTAVES)))))


def _trace(name: str, about: str, made: Builder, **more: str) -> Trace:
    command = f"python benches/traces/generate.py {name}"
    return Trace({"about": about, "command": command} | more, made.events)


ADVERSARIES: dict[str, Callable[[Builder], None]] = {
    "comb": _comb,
    "pinned-holes": _pinned_holes,
    "growth": _growth,
    "off-by-little": _off_by_little,
    "churn": _churn,
}
GENERATORS: dict[str, Callable[[], Trace]] = {
    "stream_rotation": stream_rotation,
    "expert_parallel": expert_parallel,
    "adversarial": adversarial,
}


def main(arguments: list[str] | None = None) -> int:
    names, folder = chosen(arguments, GENERATORS, __doc__)
    for name in names:
        path = folder / f"{name}.csv.xz"
        trace = GENERATORS[name]()
        write(path, trace)
        print(f"{path.name}: {len(trace.events)} events, {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
