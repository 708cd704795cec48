"""Calculated cost of a step: operations and bytes.

A *row* is one token of one sequence going through the model. Backward of a product is twice its
forward, of flash attention 2.5 times. Only half of a causal square is computed. What follows from
rates is in :mod:`.expected`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .shapes import Cell, Geometry

BF16_BYTES, FP32_BYTES = 2, 4
PRODUCT, ATTENTION = (2.0, 6.0), (4.0, 14.0)  # per weight or score: forward, and both ways
# Of each process on the GPU: its context, and the libraries' workspaces.
CONTEXT_BYTES = 1_200_000_000
# Above the arithmetic's peak: last pages of tensors, and what allocators cannot use.
SLACK = 1.04


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of matrix products, and of attention."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        """Returns their sum."""
        return self.products + self.attention

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.products + other.products, self.attention + other.attention)

    def __sub__(self, other: Operations) -> Operations:
        return self + -1 * other

    def __rmul__(self, count: float) -> Operations:
        return Operations(count * self.products, count * self.attention)


@dataclass(frozen=True)
class Work:
    """Operations of a step by phase; ``dense``: of the dense run."""

    dense: Operations
    a: Operations
    b: Operations
    c: Operations

    @property
    def ours(self) -> Operations:
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

    def cost(rows: float, scores: float, heads: float, both_ways: int) -> Operations:
        products = rows * g.layers * layer_weights(g) + heads
        attention = scores * g.layers * g.hidden
        return Operations(PRODUCT[both_ways] * products, ATTENTION[both_ways] * attention)

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


@dataclass(frozen=True)
class Peaks:
    """Bytes of a cell's step above parameters and gradients, by what holds them."""

    dormant: int
    boundary: int
    microbatch: int
    dense: int

    @property
    def awake(self) -> int:
        """Returns the peak of a step that does not sleep."""
        return self.dormant + self.boundary + self.microbatch

    @property
    def asleep_in_b(self) -> int:
        """Returns the peak of phase B once everything dormant has left."""
        return self.boundary + self.microbatch


def peaks(g: Geometry, cell: Cell, microbatch_tokens: int | None = None) -> Peaks:
    """Returns the bytes of a cell's step. ``microbatch_tokens``: defaults to the geometry's."""
    prompt, response = cell.tokens(g)
    wanted = microbatch_tokens or g.microbatch_tokens
    rows = max(response, wanted // response * response)
    saved = saved_bytes_per_token(g) * g.layers
    return Peaks(
        dormant=prompt * (g.layers - 1) * saved_bytes_per_token(g),
        boundary=prompt * boundary_bytes_per_token(g),
        microbatch=rows * saved + logits_bytes(g, rows),
        dense=(prompt + response) * saved + logits_bytes(g, response),
    )


def layers_that_fit(g: Geometry, cell: Cell, gpu_bytes: int, host_bytes: int) -> int:
    """Returns how many of the model's layers both sides of a cell fit; 0: not even one.

    Two processes share the GPU. While ours runs, the other one keeps nothing; while that one runs,
    ours keeps its weights. What sleeps fits the host tier.
    """
    room = gpu_bytes - 2 * CONTEXT_BYTES

    def fits(layers: int) -> bool:
        smaller = replace(g, layers=layers)
        weights = BF16_BYTES * parameters(smaller)
        found = peaks(smaller, cell)
        ours = 2 * weights + SLACK * found.awake
        dense = 3 * weights + SLACK * found.dense
        return max(ours, dense) <= room and found.dormant <= host_bytes

    return max(filter(fits, range(1, g.layers + 1)), default=0)


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
