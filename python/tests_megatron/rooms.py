"""Budgets with room for K and V of prompts in one way."""

from __future__ import annotations

import contextlib
from unittest import mock

from megatron.core.models.gpt import GPTModel

import dormouse
from dormouse.megatron.context import is_context_parallel
from dormouse.megatron import context_shards
from dormouse.megatron.context_shards import RING


def plan_of_readers(gpt: GPTModel, tokens: int, way: str | None = None) -> dict:
    """Returns the planner's answer for microbatches of whole responses that read a prompt.
    ``way``: None: chosen where there is room."""
    sizes = context_shards._sizes(gpt)
    return context_shards._plan(tokens, None, way=way, room_bytes=None, **sizes)


def room_of(
    gpt: GPTModel, prompt_tokens: int, *, is_ring: bool
) -> contextlib.AbstractContextManager:
    """Returns the context in which runtimes have as much room as K and V of such a prompt need that
    pass round a ring, if they do."""
    if not is_ring or not is_context_parallel(gpt):
        return contextlib.nullcontext()
    # The last token of a prompt runs with the responses.
    prices = plan_of_readers(gpt, prompt_tokens - 1)["exchange"]["prices"]
    (ring,) = (price for price in prices if price["way"] == RING)
    return budget_of(ring["held_bytes"])


def budget_of(room_bytes: int) -> contextlib.AbstractContextManager:
    """Returns the context in which runtimes say that they have this budget."""
    own = dormouse.Runtime.info

    def info(self):
        return own(self) | {"alloc_budget_bytes": room_bytes}

    return mock.patch.object(dormouse.Runtime, "info", info)
