"""Model geometries, and the cells of the grid in order of importance."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

EAGER, COMPILED = WAYS = ("eager", "compiled")

# Prompt and response tokens, in units of 1,024.
LENGTHS = ("10k/2k", "8k/4k", "6k/6k", "2k/10k")
RESPONSES = (32, 8, 16, 2)


@dataclass(frozen=True)
class Geometry:
    """A Llama-style decoder. ``k``: tokens of a cell's ``k``; ``microbatch_tokens``: response rows
    of a microbatch."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    k: int
    microbatch_tokens: int

    @property
    def head_dim(self) -> int:
        """Returns the width of a head."""
        return self.hidden // self.heads


LLAMA3_8B = Geometry("llama3-8b", 4096, 14336, 32, 32, 8, 128256, k=1024, microbatch_tokens=4096)
# A tiny model that runs all code in seconds on any device. Its figures are meaningless.
TINY = Geometry("tiny", 64, 128, 4, 4, 2, 256, k=64, microbatch_tokens=256)
GEOMETRIES = {geometry.name: geometry for geometry in (LLAMA3_8B, TINY)}


@dataclass(frozen=True)
class Cell:
    """A cell of the grid: lengths such as ``10k/2k``, responses, and eager or compiled."""

    lengths: str
    responses: int
    way: str

    def __str__(self) -> str:
        return f"{self.lengths} N={self.responses} {self.way}"

    def tokens(self, geometry: Geometry) -> tuple[int, int]:
        """Returns the tokens of the prompt and of each response."""
        prompt, response = (int(part.removesuffix("k")) for part in self.lengths.split("/"))
        return prompt * geometry.k, response * geometry.k


HEADLINE = tuple(Cell(LENGTHS[0], RESPONSES[0], way) for way in WAYS)


def by_importance() -> list[Cell]:
    """Returns all cells: the headline, then eager before compiled, long prompts first."""
    every = itertools.product(WAYS, LENGTHS, RESPONSES)
    cells = [Cell(lengths, responses, way) for way, lengths, responses in every]
    return [*HEADLINE, *(cell for cell in cells if cell not in HEADLINE)]


def choose(wanted: list[str]) -> list[Cell]:
    """Returns the cells that match any of ``wanted`` (``lengths[:responses[:way]]``), or all if it
    is empty.

    Raises :class:`ValueError` for a pattern that matches no cell.
    """
    cells = by_importance()
    if not wanted:
        return cells
    chosen = []
    for text in wanted:
        found = [cell for cell in cells if _matches(cell, text.split(":"))]
        if not found:
            raise ValueError(
                f"{text!r} matches no cell; accepted: LENGTHS[:RESPONSES[:WAY]] of "
                f"{', '.join(LENGTHS)}; {', '.join(map(str, RESPONSES))}; {', '.join(WAYS)}"
            )
        chosen += [cell for cell in found if cell not in chosen]
    return chosen


def _matches(cell: Cell, parts: list[str]) -> bool:
    own = (cell.lengths, str(cell.responses), cell.way)
    return len(parts) <= len(own) and own[: len(parts)] == tuple(parts)
