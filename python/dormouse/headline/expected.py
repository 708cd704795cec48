"""What the arithmetic expects of a step, at rates that others published or measured.

No figure here was measured by us on a GPU; the suite's parts ``attention`` and ``mapping`` measure
the rates and costs, and docs/evidence/gpu.md says what follows for every bar.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import arithmetic
from .arithmetic import Operations
from .shapes import Cell, Geometry

MIB = 1 << 20
FLASH, CUDNN = "flash", "cudnn"
# Operations per second of an H100 or H200: large BF16 products, and attention both ways.
PRODUCT_FLOPS = 620e12
ATTENTION_FLOPS = {FLASH: 330e12, CUDNN: 580e12}
# A PCIe 5.0 link with 16 lanes, one way.
LINK_BYTES_PER_S = 55e9
# Which kernel the dense run and ours use.
SIDES = ((CUDNN, FLASH), (CUDNN, CUDNN), (FLASH, FLASH))

# Host time of driver calls per handle, published for 2 MiB, and per MiB of the handle.
SLEEP_CALLS_US = {"unmap": 34.0, "release": 23.0}
WAKE_CALLS_US = {"create": 29.0, "map": 2.0, "access": 35.3}
ACCESS_US_PER_MIB = 1.33
PAGES_MIB = (2, 8, 16, 32, 64)
# Layers on the GPU while the prompt runs: the current one, and one in each direction.
WINDOW_LAYERS = 3
# A backward takes twice as long as its forward.
FORWARD_SHARE = 1 / 3


def seconds(operations: Operations, kernel: str) -> float:
    """Returns the time of operations with an attention kernel."""
    attention = operations.attention / ATTENTION_FLOPS[kernel]
    return operations.products / PRODUCT_FLOPS + attention


def speedup(g: Geometry, cell: Cell, dense_kernel: str, our_kernel: str) -> float:
    """Returns dense over ours, without what sleeping costs."""
    work = work_of(g, cell)
    return seconds(work.dense, dense_kernel) / seconds(work.ours, our_kernel)


def work_of(g: Geometry, cell: Cell) -> arithmetic.Work:
    """Returns the operations of a cell."""
    return arithmetic.work(g, *cell.tokens(g), cell.responses)


@dataclass(frozen=True)
class Mapping:
    """Handles of one size, and the host seconds of their calls when everything dormant moves."""

    handles: int
    sleep_s: float
    wake_s: float


def mapping(dormant_bytes: int, page_mib: int) -> Mapping:
    """Returns the calls of all dormant bytes, once out and once in."""
    handles = -(-dormant_bytes // (page_mib * MIB))
    wake_us = sum(WAKE_CALLS_US.values()) + ACCESS_US_PER_MIB * page_mib
    return Mapping(handles, handles * sum(SLEEP_CALLS_US.values()) / 1e6, handles * wake_us / 1e6)


def waste_share(page_mib: int, tensor_bytes: list[int]) -> float:
    """Returns what whole pages add to tensors, as a share of their bytes."""
    page = page_mib * MIB
    whole = sum(-(-each // page) * page for each in tensor_bytes)
    return whole / sum(tensor_bytes) - 1.0


def saved_tensor_bytes(g: Geometry, tokens: int) -> list[int]:
    """Returns the bytes of each tensor that an eager layer saves, K and V apart."""
    narrow, wide = g.hidden * arithmetic.BF16_BYTES, g.hidden * arithmetic.FP32_BYTES
    norm = [wide, narrow, narrow]
    each = [*norm, narrow, narrow, *norm, *[g.inner * arithmetic.BF16_BYTES] * 4]
    return [tokens * one for one in each]


@dataclass(frozen=True)
class WholeStep:
    """The peak of a sleeping step at the first microbatch, and waiting that would lower it."""

    left_bytes: float
    peak_bytes: float
    cut_percent: float
    wait_s: float


def whole_step(
    g: Geometry, cell: Cell, kernel: str, cut_percent: float, microbatch_tokens: int | None = None
) -> WholeStep:
    """Returns what has left by the first microbatch's peak if nothing waits, and the wait after
    which the whole-step peak is ``cut_percent`` below the awake one."""
    found, awake = arithmetic.peaks(g, cell, microbatch_tokens), arithmetic.peaks(g, cell).awake
    work = work_of(g, cell)
    rows = cell.responses * cell.tokens(g)[1]
    share = (microbatch_tokens or g.microbatch_tokens) / rows
    until = seconds(work.a, kernel) + FORWARD_SHARE * share * seconds(work.b, kernel)
    left = min(found.dormant, LINK_BYTES_PER_S * until)
    peak = found.awake - left
    wanted = (1.0 - cut_percent / 100.0) * awake
    return WholeStep(
        left, peak, 100.0 * (1.0 - peak / awake), max(0.0, (peak - wanted) / LINK_BYTES_PER_S)
    )


def late_copies_s(g: Geometry, cell: Cell, kernel: str) -> float:
    """Returns how long before phase C its copies must begin so that it never waits."""
    copies = arithmetic.peaks(g, cell).dormant / LINK_BYTES_PER_S
    return max(0.0, copies - seconds(work_of(g, cell).c, kernel))


def longest_tokens(g: Geometry, gpu_bytes: int, tier_bytes: int) -> tuple[int, int]:
    """Returns prompt and response tokens that fit, ours and dense, of responses of 2 k; one process,
    microbatches of one response."""
    response = 2 * g.k
    weights = 2 * arithmetic.BF16_BYTES * arithmetic.parameters(g)
    room = gpu_bytes - arithmetic.CONTEXT_BYTES - weights
    saved = arithmetic.saved_bytes_per_token(g)
    keys_and_values = 2 * g.kv_heads * g.head_dim * arithmetic.BF16_BYTES
    logits = arithmetic.logits_bytes(g, response)
    dense = (room - logits) / (g.layers * (saved + keys_and_values))
    ours = arithmetic.capacity_tokens(
        room,
        tier_bytes,
        response * g.layers * saved + logits,
        (g.layers - 1) * saved,
        arithmetic.boundary_bytes_per_token(g),
        WINDOW_LAYERS / g.layers,
    )
    return ours + response, max(0, int(dense))


def cell_table(g: Geometry, cell: Cell) -> dict[str, float]:
    """Returns the expected figures of a cell, in seconds and GB."""
    work, peaks = work_of(g, cell), arithmetic.peaks(g, cell)
    return {
        "dense s, cuDNN": seconds(work.dense, CUDNN),
        "ours s, cuDNN": seconds(work.ours, CUDNN),
        "A s": seconds(work.a, CUDNN),
        "B s": seconds(work.b, CUDNN),
        "C s": seconds(work.c, CUDNN),
        "ours s, flash": seconds(work.ours, FLASH),
        **{f"× {dense}/{ours}": speedup(g, cell, dense, ours) for dense, ours in SIDES},
        "dormant GB": peaks.dormant / 1e9,
        "copy s": peaks.dormant / LINK_BYTES_PER_S,
        "boundary GB": peaks.boundary / 1e9,
        "microbatch GB": peaks.microbatch / 1e9,
        "awake peak GB": peaks.awake / 1e9,
        "asleep in B GB": peaks.asleep_in_b / 1e9,
        "dense peak GB": peaks.dense / 1e9,
    }


def page_table(g: Geometry, cell: Cell) -> list[dict[str, float]]:
    """Returns for each page size what the calls of the cell's dormant bytes take."""
    dormant = arithmetic.peaks(g, cell).dormant
    tensors = saved_tensor_bytes(g, cell.tokens(g)[0])
    rows = []
    for page_mib in PAGES_MIB:
        found, waste = mapping(dormant, page_mib), waste_share(page_mib, tensors)
        rows.append(
            {
                "page MiB": page_mib,
                "handles": round(found.handles * (1.0 + waste)),
                "sleep s": found.sleep_s * (1.0 + waste),
                "wake s": found.wake_s * (1.0 + waste),
                "waste %": 100.0 * waste,
            }
        )
    return rows
