"""The interleaved 1F1B schedule of one stage of a pipeline. Needs no torch.

That of Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021):
each stage holds several chunks of layers; after a warm-up it runs one forward and one backward in
turn, chunks changing every ``STAGES`` microbatches.
"""

from __future__ import annotations

STAGES, OWN = 4, 1  # stages of the pipeline, and which one this is
CHUNKS = 2  # virtual stages here
MICROBATCHES = 8  # a multiple of STAGES


def order() -> list[tuple[str, int]]:
    """``("forward" | "backward", chunk)`` in the order this stage runs them."""
    total = MICROBATCHES * CHUNKS
    warmup = min(total, (STAGES - OWN - 1) * 2 + (CHUNKS - 1) * STAGES)
    forwards = [("forward", i // STAGES % CHUNKS) for i in range(total)]
    backwards = [("backward", CHUNKS - 1 - i // STAGES % CHUNKS) for i in range(total)]
    steady = zip(forwards[warmup:], backwards, strict=False)
    ops = forwards[:warmup] + [op for pair in steady for op in pair]
    return ops + backwards[total - warmup :]
