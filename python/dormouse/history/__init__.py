"""Drafts of responses from those of earlier epochs, and turns that later ones read.

A prompt that is rolled out again in each epoch gets much the same responses. :class:`History` keeps
them and drafts what comes next; a model verifies a draft in one forward, so a rollout takes fewer of
them. What is sampled keeps its distribution: :mod:`.verification`.

- :class:`History`: responses by prompt; :class:`Rollout`: one of them.
- :class:`Drafter`: drafts of one sequence, with its window; :func:`draft_all`,
  :func:`feedback_all`: of several in one call.
- :func:`verify_greedy`, :func:`verify_sampled`: how many tokens of a draft a model accepts.
- :func:`dormouse.history.generation.generate`: drafts in transformers' ``generate``.
- :mod:`.proposer`: drafts in the shape of vLLM's and SGLang's draft proposers.
- :class:`Dialogue`: turns of dialogues; :class:`Turn`, :class:`Found`: one of them, recorded and
  retrieved.
- :func:`order_for_sharing`: the order of retrieved passages in which prompts share the most;
  :func:`distinct_tokens`: what is then computed.
"""

from .dialogues import Dialogue, Found, Turn
from .histories import History, Rollout
from .drafters import Drafter, draft_all, feedback_all
from .order import distinct_tokens, order_for_sharing
from .verification import verify_greedy, verify_sampled

__all__ = [
    "Dialogue",
    "Drafter",
    "Found",
    "History",
    "Rollout",
    "Turn",
    "distinct_tokens",
    "draft_all",
    "feedback_all",
    "order_for_sharing",
    "verify_greedy",
    "verify_sampled",
]
