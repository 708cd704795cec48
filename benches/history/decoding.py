"""Decodes recorded responses again, with drafts.

A drafted token is accepted if it is the recorded one. So every contender decodes the same tokens as
the sampler did, and acceptance is that of a sampler that compares its own draws with the draft, as
transformers' does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from drafting import Begin, Recorded

from dormouse.demo.epochs import Recording
from dormouse.history.drafters import equal_tokens


@dataclass
class Counts:
    """Of one contender: tokens that came, forwards of the model, drafted and accepted tokens."""

    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, other: Counts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards


# Runs the model on tokens that it does not have yet, ``[1, tokens]``, and keeps all but the last
# ``rejected`` of them.
Forward = Callable[[torch.Tensor, int], None]


class Model:
    """A model that has read a prompt, but for its last token."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._prompt: list[int] = []
        self._cache = None

    @torch.no_grad()
    def begin(self, prompt: list[int]) -> Forward:
        """Returns the forward of a response; the prompt is read once for all of them."""
        if prompt != self._prompt:
            ids = torch.tensor([prompt[:-1]])
            read = self._model(input_ids=ids, use_cache=True, logits_to_keep=1)
            self._cache, self._prompt = read.past_key_values, prompt
        cache = self._cache
        if extra := cache.get_seq_length() - (len(prompt) - 1):
            cache.crop(-extra)

        @torch.no_grad()
        def forward(tokens: torch.Tensor, rejected: int) -> None:
            logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            logits.argmax(-1)
            if rejected:
                cache.crop(-rejected)

        return forward


def decode(
    begin: Begin,
    prompt: list[int],
    response: list[int],
    response_tokens_max: int,
    stop: int,
    counts: Counts,
    forward: Forward | None = None,
) -> None:
    """Decodes one response and adds to the counts, with a model or without."""
    sequence = torch.tensor([prompt])
    end = len(prompt) + len(response)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    candidates = begin(sequence[0], len(prompt) + response_tokens_max, stop)
    while sequence.shape[1] < end:
        at = sequence.shape[1]
        with_draft, _ = candidates.get_candidates(sequence)
        draft = with_draft[0, at:].tolist()
        rest = response[at - len(prompt) :]
        # The last token is the model's own.
        equal = equal_tokens(draft, rest[:-1])
        if forward is not None:
            forward(with_draft[:, at - 1 :], len(draft) - equal)
        sequence = torch.cat([sequence, torch.tensor([rest[: equal + 1]])], dim=1)
        candidates.update_candidate_strategy(sequence, None, equal)
        counts.forwards += 1
        counts.drafted += len(draft)
        counts.accepted += equal
    counts.wall_s += time.perf_counter() - wall_s
    counts.cpu_s += time.process_time() - cpu_s
    counts.tokens += len(response)


def earlier_of(recording: Recording, epoch: int, temperature: float) -> list[Recorded]:
    """Returns the responses of all epochs before this one that were drawn at a temperature."""
    return [
        Recorded(recording.prompts[name], answer.tokens, answer.reward, before.number)
        for before in recording.epochs[:epoch]
        for name, answers in before.answers.items()
        for answer in answers
        if answer.temperature == temperature
    ]
