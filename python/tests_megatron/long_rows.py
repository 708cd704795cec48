"""Batches and models whose tensors the runtime allocates: smaller ones are libc's."""

from __future__ import annotations

import torch

import cases

CONFIG = {"hidden_size": 256, "ffn_hidden_size": 512}
# Tokens of the responses to each prompt.
RESPONSES = (200, 217, 234, 251)


def batches_of(prompts: tuple[int, ...], seed: int = 0) -> list[dict]:
    """Returns a microbatch of each prompt. ``prompts``: their tokens."""
    generator = torch.Generator().manual_seed(seed)
    columns = max(prompts) + max(RESPONSES)
    found = []
    for prompt_tokens in prompts:
        prompt = torch.randint(cases.VOCABULARY, (prompt_tokens,), generator=generator)
        ids = torch.zeros(len(RESPONSES), columns + 1, dtype=torch.int64)
        mask = torch.zeros(len(RESPONSES), columns)
        for row, count in enumerate(RESPONSES):
            response = torch.randint(cases.VOCABULARY, (count,), generator=generator)
            ids[row, : prompt_tokens + count] = torch.cat([prompt, response])
            mask[row, prompt_tokens - 1 : prompt_tokens + count - 1] = 1
        found.append(
            {
                "tokens": ids[:, :-1],
                "labels": ids[:, 1:],
                "loss_mask": mask,
                "positions": torch.arange(columns).expand_as(mask),
                "weights": torch.ones(len(RESPONSES), 1),
                "count": mask.sum(),
            }
        )
    return found
