"""A mixture of experts on one rank: expert parallelism with its two all-to-alls on streams of their own."""

from __future__ import annotations

import random

from builder import Builder

COMPUTE, DISPATCH, COMBINE = range(3)
STEPS, LAYERS = 6, 12
TOKENS = (6_000, 8_192)
HIDDEN, FFN = 4096, 1536
EXPERTS, CHOSEN = 8, 4  # of this rank; per token
# Tokens that a rank receives, over what it sends: routers are never even.
LOAD = (0.55, 1.75)
BF16, FP32 = 2, 4
SEED = 11


def step(made: Builder, chance: random.Random) -> None:
    """Forward and backward of one microbatch. What backward reads is kept, everything else is not."""
    tokens = chance.randint(*TOKENS)
    saved = []
    for _ in range(LAYERS):
        received = int(tokens * CHOSEN / 2 * chance.uniform(*LOAD))
        saved.append(_forward(made, chance, tokens, received))
    logits = made.allocate(tokens * 32_000 * FP32)
    made.free(made.allocate(tokens * 32_000 * BF16))
    made.free(logits)
    while saved:
        _backward(made, *saved.pop())


def _forward(made: Builder, chance: random.Random, tokens: int, received: int):
    kept = [made.allocate(tokens * HIDDEN * BF16) for _ in range(5)]
    scores = made.allocate(tokens * 64 * FP32)
    sent = made.allocate(tokens * CHOSEN // 2 * HIDDEN * BF16)
    # Filled by the other ranks, on the stream of the collective.
    inputs = made.allocate(received * HIDDEN * BF16, DISPATCH)
    made.free(sent)
    shares = _shares(chance, received)
    outputs = made.allocate(received * HIDDEN * BF16)
    for share in shares:
        gate_up = made.allocate(share * 2 * FFN * BF16)
        kept += [gate_up, made.allocate(share * FFN * BF16)]
    combined = made.allocate(tokens * CHOSEN // 2 * HIDDEN * BF16, COMBINE)
    made.free(outputs)
    kept += [scores, inputs, made.allocate(tokens * HIDDEN * BF16)]
    made.free(combined)
    return kept, tokens, received, shares


def _backward(made: Builder, kept: list[int], tokens: int, received: int, shares: list[int]) -> None:
    gradient = made.allocate(received * HIDDEN * BF16, DISPATCH)
    for share in shares:
        of_act = made.allocate(share * FFN * BF16)
        of_gate_up = made.allocate(share * 2 * FFN * BF16)
        made.free(of_act)
        made.free(of_gate_up)
    of_inputs = made.allocate(received * HIDDEN * BF16)
    made.free(gradient)
    returned = made.allocate(tokens * CHOSEN // 2 * HIDDEN * BF16, COMBINE)
    made.free(of_inputs)
    made.free_all(made.allocate(tokens * HIDDEN * BF16) for _ in range(2))
    made.free(returned)
    made.free_all(kept)


def _shares(chance: random.Random, received: int) -> list[int]:
    """Tokens of each expert, at least one."""
    weights = [chance.uniform(0.3, 2) for _ in range(EXPERTS)]
    return [max(1, int(received * weight / sum(weights))) for weight in weights]
