"""Calculated cost of a step: operations, bytes, seconds at given rates.

A *row* is one token of one sequence going through the model. Backward of a product is twice its
forward, of flash attention 2.5 times. Only half of a causal square is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import Cell, Geometry

BF16_BYTES, FP32_BYTES = 2, 4

# Dense BF16 rate of an H100 or H200 by its data sheet, and the share that a good run reaches.
PEAK_FLOPS = 989e12
REACHED = 0.6
# A PCIe 5.0 link with 16 lanes, one way.
LINK_BYTES_PER_S = 55e9

PRODUCT, ATTENTION = (2.0, 6.0), (4.0, 14.0)  # per weight or score: forward, and both ways


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a step by phase; ``dense``: of the dense run."""

    dense: float
    a: float
    b: float
    c: float

    @property
    def ours(self) -> float:
        """Returns the sum of the three phases."""
        return self.a + self.b + self.c


def layer_weights(g: Geometry) -> int:
    """Returns the weights of a layer's matrix products."""
    attention = 2 * g.hidden * g.hidden + 2 * g.hidden * g.kv_heads * g.head_dim
    return attention + 3 * g.hidden * g.inner


def parameters(g: Geometry) -> int:
    """Counts all weights: layers with their two norms, embedding, head, last norm."""
    return g.layers * (layer_weights(g) + 2 * g.hidden) + 2 * g.vocab * g.hidden + g.hidden


def work(g: Geometry, prompt: int, response: int, responses: int) -> Work:
    """Returns the operations of one group. The last layer's dead work on the prompt is included."""
    head = response * g.hidden * g.vocab
    own = response * (response + 1) / 2

    def cost(rows: float, scores: float, heads: float, both_ways: int) -> float:
        products = rows * g.layers * layer_weights(g) + heads
        return PRODUCT[both_ways] * products + ATTENTION[both_ways] * scores * g.layers * g.hidden

    square = prompt * (prompt + 1) / 2
    whole = prompt + response
    dense = responses * cost(whole, whole * (whole + 1) / 2, head, 1)
    a = cost(prompt, square, 0, 0)
    b = responses * cost(response, own + response * prompt, head, 1)
    return Work(dense, a, b, cost(prompt, square, 0, 1) - a)


def saved_bytes_per_token(g: Geometry) -> int:
    """Returns the bytes that an eager BF16 layer saves per token for its backward, without K and V.

    Each of two norms: its input in FP32, the normalised row and its product with the weight. Then
    the rotated query and the attention's output; gate, its activation, up, and their product.
    """
    norms = 2 * (FP32_BYTES + 2 * BF16_BYTES) * g.hidden
    return norms + 2 * BF16_BYTES * g.hidden + 4 * BF16_BYTES * g.inner


def boundary_bytes_per_token(g: Geometry) -> int:
    """Returns the bytes per token of K and V of all layers in BF16 and their FP32 accumulators."""
    return g.layers * 2 * g.kv_heads * g.head_dim * (BF16_BYTES + FP32_BYTES)


def logits_bytes(g: Geometry, rows: int) -> int:
    """Returns the bytes per token of logits in BF16 and FP32, log-softmax and its gradient."""
    return rows * g.vocab * (BF16_BYTES + 3 * FP32_BYTES)


def seconds(flops: float) -> float:
    """Returns the seconds at :data:`REACHED` of :data:`PEAK_FLOPS`."""
    return flops / (REACHED * PEAK_FLOPS)


def cell_table(g: Geometry, cell: Cell) -> dict[str, float]:
    """Returns the expected figures of a cell, in seconds and GB."""
    prompt, response = cell.tokens(g)
    w = work(g, prompt, response, cell.responses)
    microbatch = max(response, g.microbatch_tokens // response * response)
    dormant = prompt * (g.layers - 1) * saved_bytes_per_token(g)
    saved = saved_bytes_per_token(g) * g.layers
    boundary = prompt * boundary_bytes_per_token(g)
    microbatch_bytes = microbatch * saved + logits_bytes(g, microbatch)
    copy = dormant / LINK_BYTES_PER_S
    return {
        "dense s": seconds(w.dense),
        "ours s": seconds(w.ours),
        "A s": seconds(w.a),
        "B s": seconds(w.b),
        "C s": seconds(w.c),
        "speedup": w.dense / w.ours,
        "dormant GB": dormant / 1e9,
        "copy s": copy,
        "boundary GB": boundary / 1e9,
        "microbatch GB": microbatch_bytes / 1e9,
        "awake peak GB": (dormant + boundary + microbatch_bytes) / 1e9,
        "asleep in B GB": (boundary + microbatch_bytes) / 1e9,
        "dense peak GB": ((prompt + response) * saved + logits_bytes(g, response)) / 1e9,
    }


def capacity_tokens(
    room: float,
    tiers: float,
    microbatch: float,
    dormant: float,
    boundary: float,
    window_share: float,
) -> int:
    """Returns the longest prompt whose bytes fit the tiers.

    ``room``: device bytes without parameters and gradients; ``tiers``: bytes of host and file;
    ``microbatch``: peak bytes of a microbatch except the prompt's. Per prompt token: ``dormant``
    bytes and ``boundary`` bytes, accumulators included. ``window_share``: share of the dormant
    bytes on the device while the prompt's layers run forward and backward.
    """
    everything = (room - microbatch + tiers) / (dormant + boundary)
    hot_in_b = (room - microbatch) / boundary
    window = room / (boundary + dormant * window_share)
    return max(0, int(min(everything, hot_in_b, window)))
