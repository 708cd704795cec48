"""Greedy answers to the recorded prompts, and their rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from recorded import Batch

from dormouse.demo import record, rewards


class Sampler:
    """Lets models answer the prompts of batches, all of one length."""

    def __init__(self, tokenizer, batches: Sequence[Batch]):
        self._tokenizer = tokenizer
        self._prompts = torch.stack([batch.prompt for batch in batches])
        facts = {question.id: question.facts for question in record.questions()}
        self._facts = [facts[batch.group] for batch in batches]

    def samples(self, model) -> list[dict]:
        """Returns tokens, text and reward of the most likely answer to each prompt."""
        stop = self._tokenizer.eos_token_id
        with torch.no_grad():
            rows = model.generate(
                self._prompts,
                attention_mask=torch.ones_like(self._prompts),
                do_sample=False,
                max_new_tokens=record.RESPONSE_TOKENS_MAX,
                eos_token_id=stop,
                pad_token_id=stop,
            )
        return [
            self._sample(row[self._prompts.shape[1] :].tolist(), facts, stop)
            for row, facts in zip(rows, self._facts, strict=True)
        ]

    def _sample(self, tokens: list[int], facts: list[list[str]], stop: int) -> dict:
        if stop in tokens:
            tokens = tokens[: tokens.index(stop) + 1]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        earned = rewards.reward(text, facts, finished=tokens[-1] == stop)
        return {"tokens": tokens, "text": text, "reward": earned}
