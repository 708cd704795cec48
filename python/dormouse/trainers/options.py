"""Keyword arguments of an adapter's ``share()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from ..errors import ArgumentError
from ..hf import SharedPrefix
from ..hf.scored_model import AUTO, check_graphs
from ..runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``share()`` of the adapters takes by name; Megatron's has no ``prompt_dropout``."""

    runtime: Runtime | None = None
    """Manages the memory that sleeps. None: the one that the adapter's ``share()`` names."""
    sleep: bool = True
    """Of :class:`dormouse.hf.SharedPrefix`."""
    prompt_dropout: bool = True
    """Of :class:`dormouse.hf.SharedPrefix`."""
    microbatch_tokens: int | None = None
    """Of :meth:`dormouse.hf.SharedPrefix.score`. None: its default, or the adapter's own."""
    graphs: str = AUTO
    """Of :meth:`dormouse.hf.SharedPrefix.score`."""

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Options:
        """Returns the options of a call's keyword arguments.

        Raises :class:`dormouse.ArgumentError` for a name or a value that is not accepted: here, and
        not in a worker's first batch.
        """
        names = [each.name for each in fields(cls)]
        if unknown := sorted(given.keys() - names):
            raise ArgumentError(f"share() got {', '.join(unknown)}; accepted: {', '.join(names)}")
        return cls(**given)

    def __post_init__(self):
        if not isinstance(self.runtime, Runtime | None):
            raise ArgumentError(
                f"runtime is of {type(self.runtime).__name__}; accepted: dormouse.Runtime, or None"
            )
        for name in ("sleep", "prompt_dropout"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ArgumentError(f"{name} is {value!r}; accepted: True, False")
        tokens = self.microbatch_tokens
        if not (tokens is None or isinstance(tokens, int) and tokens > 0):
            raise ArgumentError(f"microbatch_tokens is {tokens!r}; accepted: 1 and above, or None")
        check_graphs(self.graphs)

    def shared_prefix(self, model: torch.nn.Module, runtime: Runtime) -> SharedPrefix:
        """Returns what scores the rows of a trainer's model."""
        return SharedPrefix(model, runtime, sleep=self.sleep, prompt_dropout=self.prompt_dropout)

    @property
    def score(self) -> dict:
        """Arguments of :meth:`SharedPrefix.score` and its kin."""
        return {"microbatch_tokens": self.microbatch_tokens, "graphs": self.graphs}
