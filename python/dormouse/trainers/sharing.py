"""Counts of what an adapter shared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Sharing:
    """Counts of the rows that were computed, in updates and without a graph."""

    rows: int = 0
    """Those with a response."""
    prompts: int = 0
    """Different prompts of each batch."""
