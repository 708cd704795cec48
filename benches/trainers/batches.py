"""Padded batches of random tokens."""

from __future__ import annotations

import torch

# Ids of ordinary words in SmolLM2's vocabulary.
FIRST, END = 1000, 40000


def draw(count: int, seed: int) -> torch.Tensor:
    return torch.randint(FIRST, END, (count,), generator=torch.Generator().manual_seed(seed))


def padded(prompt: int, responses: int, length: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids, their mask, and the number of columns of responses. All rows have one prompt; the
    responses' lengths go evenly from half of ``length`` up to ``length``."""
    ids = torch.zeros(responses, prompt + length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row in range(responses):
        count = length - row * length // (2 * responses)
        ids[row, :prompt] = draw(prompt, 0)
        ids[row, prompt : prompt + count] = draw(count, 1 + row)
        mask[row, : prompt + count] = 1
    return ids, mask, length


def of_prompts(prompts: int, prompt: int, responses: int, length: int):
    """Token ids ``[responses, prompt + length]`` of several prompts, interleaved, and their mask."""
    texts = [draw(prompt, seed) for seed in range(prompts)]
    rows = [torch.cat([texts[r % prompts], draw(length, 100 + r)]) for r in range(responses)]
    ids = torch.stack(rows)
    return ids, torch.ones_like(ids)
