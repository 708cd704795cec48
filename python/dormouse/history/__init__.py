"""Drafts of responses from those of earlier epochs, and their verification.

A prompt that is rolled out again in each epoch gets much the same responses. :class:`History` keeps
them and drafts what comes next; a model verifies a draft in one forward, so a rollout takes fewer of
them. What is sampled keeps its distribution: :mod:`.verification`.

- :class:`History`: responses by prompt; :class:`Rollout`: one of them.
- :class:`Drafter`: drafts of one sequence, with its window.
- :func:`verify_greedy`, :func:`verify_sampled`: how many tokens of a draft a model accepts.
- :func:`dormouse.history.generation.generate`: drafts in transformers' ``generate``.
- :mod:`.proposer`: drafts in the shape of vLLM's and SGLang's draft proposers.
"""

from .histories import History, Rollout
from .drafters import Drafter
from .verification import verify_greedy, verify_sampled

__all__ = ["Drafter", "History", "Rollout", "verify_greedy", "verify_sampled"]
