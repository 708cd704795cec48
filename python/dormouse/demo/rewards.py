"""Rule-based rewards over the text of a response."""

from __future__ import annotations

import re

# Reward of an answer that ends within the limit.
FINISHED_REWARD = 0.25

# Only the first mention of each fact counts, and all facts together are worth 1.
FACTS_REWARD = 1.0

REWARD_DECIMALS = 6


def reward(text: str, facts: list[list[str]], *, finished: bool) -> float:
    """Returns ``FACTS_REWARD`` times the share of ``facts`` in ``text``, plus ``FINISHED_REWARD``.

    A fact is a list of spellings, any of which counts as a whole word or words; a plural ``s``
    is accepted. Case and punctuation are ignored.
    """
    plain = _plain(text)
    named = sum(any(_mentions(plain, spelling) for spelling in fact) for fact in facts)
    share = named / len(facts)
    return round(FACTS_REWARD * share + (FINISHED_REWARD if finished else 0.0), REWARD_DECIMALS)


def _mentions(plain: str, spelling: str) -> bool:
    return re.search(rf"\b{re.escape(_plain(spelling))}s?\b", plain) is not None


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))
