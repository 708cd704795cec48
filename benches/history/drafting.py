"""What drafts responses: ours, prompt lookup of transformers, and a table of n-grams.

All have the interface of transformers' candidate generators, so that one loop serves them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from dormouse.history import History
from dormouse.history.generation import HistoryCandidates

# transformers' defaults of prompt lookup.
LOOKUP_TOKENS, LOOKUP_NGRAM_MAX = 10, 2
# Of the n-gram drafter: lengths that are tried, the longest first, and tokens of a draft.
NGRAMS = (5, 4, 3, 2)
NGRAM_DRAFT_TOKENS = 8

OURS, LOOKUP, NGRAM, PLAIN = "ours", "prompt_lookup", "ngram", "plain"


@dataclass(frozen=True)
class Recorded:
    """A response of an earlier epoch."""

    prompt: list[int]
    response: list[int]
    reward: float
    epoch: int


# Makes what drafts one response, of the prompt's ids, the most tokens of the sequence, and its end.
Begin = Callable[[torch.Tensor, int, int], CandidateGenerator]


class Plain(CandidateGenerator):
    """Drafts nothing."""

    def get_candidates(self, input_ids: torch.Tensor, **_):
        return input_ids, None


class NgramTable(CandidateGenerator):
    """The most frequent next token after the longest n-gram that is known, token by token."""

    def __init__(self, texts: Iterable[list[int]]):
        self._next: dict[tuple[int, ...], Counter] = defaultdict(Counter)
        for text in texts:
            for at, token in enumerate(text):
                for count in NGRAMS:
                    if at >= count:
                        self._next[tuple(text[at - count : at])][token] += 1

    def begin(self, prompt: torch.Tensor, length_max: int, stop: int) -> CandidateGenerator:
        return _NgramCandidates(self._next, length_max, stop)


class _NgramCandidates(CandidateGenerator):
    def __init__(self, table: dict, length_max: int, stop: int):
        self._next, self._length_max, self._stop = table, length_max, stop

    def get_candidates(self, input_ids: torch.Tensor, **_):
        end = input_ids[0, -max(NGRAMS) :].tolist()
        room = min(NGRAM_DRAFT_TOKENS, self._length_max - input_ids.shape[1] - 1)
        draft: list[int] = []
        while len(draft) < room:
            known = [*end, *draft]
            found = (self._next.get(tuple(known[-count:])) for count in NGRAMS)
            options = next(filter(None, found), None)
            if options is None:
                break
            token = options.most_common(1)[0][0]
            if token == self._stop:
                break
            draft.append(token)
        return torch.cat([input_ids, torch.tensor([draft], dtype=input_ids.dtype)], dim=1), None


def lookup(prompt: torch.Tensor, length_max: int, stop: int) -> CandidateGenerator:
    return PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([stop]),
        num_output_tokens=LOOKUP_TOKENS,
        max_matching_ngram_size=LOOKUP_NGRAM_MAX,
        max_length=length_max,
    )


def ours(vocab: int, earlier: Iterable[Recorded]) -> Begin:
    history = History(vocab)
    for each in earlier:
        history.record(each.prompt, each.response, each.reward, each.epoch)
    return lambda prompt, length_max, stop: HistoryCandidates(
        history, prompt, length_max, torch.tensor([stop])
    )


def contenders(vocab: int, earlier: list[Recorded]) -> dict[str, Begin]:
    """Returns what drafts from the responses of earlier epochs, and what needs none, by name."""
    table = NgramTable([*each.prompt, *each.response] for each in earlier)
    return {
        OURS: ours(vocab, earlier),
        LOOKUP: lookup,
        NGRAM: table.begin,
        PLAIN: lambda *_: Plain(),
    }
