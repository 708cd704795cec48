"""Drafts in the shape of the inference engines' draft proposers.

:class:`HistoryProposer` has the methods of vLLM's proposers, and :class:`HistoryCorpus` those of
SGLang's n-gram corpus. Both follow the public sources that ``docs/history.md`` names and are tested
with calls as those make them; neither has run in its engine. They import no engine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ArgumentError
from .drafters import CONTEXT_TOKENS, WINDOW_TOKENS_MAX, Drafter, draft_all, equal_tokens
from .histories import History


@dataclass(frozen=True)
class Request:
    """A sequence that an engine decodes. ``tokens``: its ids so far, prompt included.
    ``prompt_tokens``: number of those of the prompt. ``drafted_max``: most tokens to draft."""

    id: Hashable
    tokens: Sequence[int] | np.ndarray
    prompt_tokens: int
    drafted_max: int = WINDOW_TOKENS_MAX


@dataclass
class _Decoded:
    drafter: Drafter
    tokens: int
    draft: list[int] = field(default_factory=list)


class HistoryProposer:
    """Drafts of all requests of an engine from one history. Not thread-safe; one for each engine.

    ``drafted_max``: most tokens of a draft, the engine's ``num_speculative_tokens``.
    ``length_max``: most tokens of a sequence, the engine's ``max_model_len``.

    How much of a draft was accepted is read from the tokens that a request has the next time, of
    which the last is the model's own. What is drafted behind a request's end is not counted.
    """

    def __init__(self, history: History, drafted_max: int, length_max: int):
        if drafted_max < 1:
            raise ArgumentError(f"drafted_max is {drafted_max}; accepted: at least 1")
        self._history, self._drafted_max, self._length_max = history, drafted_max, length_max
        self._decoded: dict[Hashable, _Decoded] = {}

    def load_model(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is no draft model."""

    def propose(
        self,
        input_batch: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns a draft for each row of a batch, as vLLM calls it after each step.

        ``input_batch``: its attributes ``req_ids`` ``[rows]``, ``req_id_to_index``,
        ``num_prompt_tokens`` and ``num_tokens_no_spec`` ``[rows]``, and ``token_ids_cpu``
        ``[rows, max_model_len]`` are read. ``sampled_token_ids``: what each row received in this
        step; a row without any, a prompt that is still being read, has no draft. Requests that are
        not in ``req_id_to_index`` have ended. ``slot_mappings`` is not read.
        """
        requests = []
        for row, sampled in enumerate(sampled_token_ids):
            if len(sampled) == 0:
                continue
            name = input_batch.req_ids[row]
            index = input_batch.req_id_to_index[name]
            count = int(input_batch.num_tokens_no_spec[index])
            tokens = input_batch.token_ids_cpu[index, :count]
            requests.append(Request(name, tokens, int(input_batch.num_prompt_tokens[index])))
        drafts = dict(zip((each.id for each in requests), self.draft(requests), strict=True))
        self.end(self._decoded.keys() - input_batch.req_id_to_index.keys())
        rows = zip(input_batch.req_ids, sampled_token_ids, strict=False)
        return [drafts[name] if len(sampled) else [] for name, sampled in rows]

    def draft(self, requests: Sequence[Request]) -> list[list[int]]:
        """Returns a draft for each request, in one call of the library.

        Raises :class:`dormouse.ArgumentError` for ids outside the vocabulary.
        """
        decoded = [self._follow(each) for each in requests]
        limits = [
            # The model adds one token of its own.
            max(
                0, min(each.drafted_max, self._drafted_max, self._length_max - len(each.tokens) - 1)
            )
            for each in requests
        ]
        ends = [each.tokens[-CONTEXT_TOKENS:] for each in requests]
        drafts = draft_all([each.drafter for each in decoded], ends, limits)
        for each, draft in zip(decoded, drafts, strict=True):
            each.draft = draft
        return drafts

    def end(self, ids: Iterable[Hashable]) -> None:
        """Drops the windows of requests that ended. Unknown ones are ignored."""
        for each in ids:
            self._decoded.pop(each, None)

    @property
    def requests(self) -> int:
        """Number of requests that have a window."""
        return len(self._decoded)

    def _follow(self, request: Request) -> _Decoded:
        """Returns what is known of a request, after the feedback on its last draft."""
        if not 0 <= request.prompt_tokens <= len(request.tokens):
            raise ArgumentError(
                f"request {request.id!r} has {request.prompt_tokens} prompt tokens of "
                f"{len(request.tokens)}; accepted: 0 to {len(request.tokens)}"
            )
        found = self._decoded.get(request.id)
        if found is None or len(request.tokens) < found.tokens:
            prompt = request.tokens[: request.prompt_tokens]
            found = _Decoded(self._history.drafter(prompt), len(request.tokens))
            self._decoded[request.id] = found
            return found
        own = [int(token) for token in request.tokens[found.tokens :]]
        if own:
            # The last token is the model's own, whether or not the draft had it.
            found.drafter.feedback(equal_tokens(found.draft, own[:-1]))
            found.tokens, found.draft = len(request.tokens), []
        return found


class HistoryCorpus:
    """A history in the place of SGLang's n-gram corpus, whose drafts are chains. Not thread-safe.

    Set it as ``ngram_corpus`` of the n-gram worker, and ``speculative_ngram_max_trie_depth`` to the
    model's context, so that the worker hands over whole sequences: a prompt is what a sequence has
    before its first sampled token. ``draft_token_num``: tokens of a chain, the last token of the
    sequence included.
    """

    def __init__(self, history: History, draft_token_num: int, length_max: int):
        if draft_token_num < 2:
            raise ArgumentError(f"draft_token_num is {draft_token_num}; accepted: at least 2")
        self.draft_token_num = draft_token_num
        self._proposer = HistoryProposer(history, draft_token_num - 1, length_max)
        self._prompts: dict[str, int] = {}

    def batch_get(
        self,
        req_ids: Sequence[str],
        batch_tokens: Sequence[Sequence[int]],
        total_lens: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids ``[requests · draft_token_num]`` of chains, and their masks ``[requests ·
        draft_token_num²]``: row r of a chain reads the columns that are 1. A chain begins with the
        sequence's last token and is filled up with id 0, which reads that token alone.

        Raises :class:`dormouse.ArgumentError` for sequences that are not whole.
        """
        requests = []
        for name, tokens, total in zip(req_ids, batch_tokens, total_lens, strict=True):
            if len(tokens) != total:
                raise ArgumentError(
                    f"request {name!r} has {len(tokens)} of its {total} tokens; accepted: all, by "
                    "speculative_ngram_max_trie_depth"
                )
            prompt = self._prompts.setdefault(name, total - 1)
            requests.append(Request(name, tokens, min(prompt, total)))
        drafts = self._proposer.draft(requests)
        width = self.draft_token_num
        ids = np.zeros((len(requests), width), dtype=np.int64)
        masks = np.zeros((len(requests), width, width), dtype=np.uint8)
        for row, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            chain = [request.tokens[-1], *draft]
            ids[row, : len(chain)] = chain
            masks[row, : len(chain), : len(chain)] = np.tri(len(chain), dtype=np.uint8)
            masks[row, len(chain) :, 0] = 1
            masks[row][np.diag_indices(width)] = 1
        return ids.reshape(-1), masks.reshape(-1)

    def batch_put(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Does nothing: responses are recorded with their rewards, :meth:`History.record`."""

    def synchronize(self) -> None:
        """Does nothing: a record is complete when it returns."""

    def erase_match_state(self, req_ids: Sequence[str]) -> None:
        """Drops requests that left the batch."""
        self._proposer.end(req_ids)
        for name in req_ids:
            self._prompts.pop(name, None)

    def reset(self) -> None:
        """Drops all requests. The history stays."""
        self.erase_match_state(list(self._prompts))
