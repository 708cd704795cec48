"""What loss functions read of a model: logits, and on demand hidden states and routers' logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from .support import UnsupportedModelError, logits_of, rows_of

# Names of fields beside the logits, with the argument by which transformers returns them.
ARGUMENTS = {
    "last_hidden_state": "output_hidden_states",
    "router_logits": "output_router_logits",
}


@dataclass(frozen=True)
class Output:
    """What a model computed for the rows of one response, or for those of the prompt."""

    logits: torch.Tensor | None
    """``[rows, vocab]``; None in :attr:`prompt`."""
    last_hidden_state: torch.Tensor | None = None
    """After the last norm, as ``hidden_states[-1]`` of transformers: ``[rows, hidden_size]``."""
    router_logits: tuple[torch.Tensor, ...] | None = None
    """Of each layer with a router, ``[rows, experts]``."""
    prompt: Output | None = None
    """The prompt's rows, all but its last token, with which the response continues."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each tensor with the name of its field."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Output):
                yield from ((f"prompt's {name}", tensor) for name, tensor in value.tensors())
            elif isinstance(value, tuple):
                yield from ((field.name, tensor) for tensor in value)
            elif value is not None:
                yield field.name, value

    def with_only(self, names: Collection[str]) -> Output:
        """Returns the logits, and the other fields that ``names`` has."""
        return replace(self, **{name: None for name in ARGUMENTS if name not in names})

    def without_logits(self) -> Output:
        """Returns the other fields."""
        return replace(self, logits=None)

    def detached(self) -> Output:
        """Returns the values without their graph."""
        prompt = None if self.prompt is None else self.prompt.detached()
        return replace(self.mapped(torch.Tensor.detach), prompt=prompt)

    def rows(self, start: int, end: int) -> Output:
        """Returns a range of rows."""
        return self.mapped(lambda tensor: tensor[start:end])

    @staticmethod
    def joined(parts: Sequence[Output]) -> Output:
        """Returns the rows of all parts, whose fields are the same."""
        logits, hidden, routers = zip(
            *((each.logits, each.last_hidden_state, each.router_logits) for each in parts),
            strict=True,
        )
        return Output(
            torch.cat(logits),
            None if hidden[0] is None else torch.cat(hidden),
            None if routers[0] is None else tuple(map(torch.cat, zip(*routers, strict=True))),
        )

    def split(self, lengths: Sequence[int]) -> list[Output]:
        """Returns consecutive ranges of rows.

        Split, not sliced: the gradients of the parts are then joined in one copy. The logits have
        no other use, so a loss may change its part in place, which a checked split forbids.
        """
        lengths = list(lengths)
        absent = [None] * len(lengths)
        hidden, routers = absent, absent
        if self.last_hidden_state is not None:
            hidden = self.last_hidden_state.split(lengths)
        if self.router_logits is not None:
            routers = zip(*(layer.split(lengths) for layer in self.router_logits), strict=True)
        logits = torch.unsafe_split_with_sizes(self.logits, lengths)
        return [Output(*parts) for parts in zip(logits, hidden, routers, strict=True)]

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Output:
        """Returns an output of ``change(tensor)`` for every tensor of these rows."""
        return Output(
            None if self.logits is None else change(self.logits),
            None if self.last_hidden_state is None else change(self.last_hidden_state),
            None if self.router_logits is None else tuple(map(change, self.router_logits)),
        )


@dataclass(frozen=True)
class Request:
    """What loss functions read. Steps with equal requests have equal passes."""

    response: frozenset[str] = frozenset()
    """Fields of the responses' rows, beside logits."""
    prompt: frozenset[str] = frozenset()
    """Fields of the prompt's rows, beside logits."""
    has_prompt_loss: bool = False
    """Whether there is a loss of the prompt's rows, which reads their logits."""
    replays_experts: bool = False
    """Whether routers select recorded experts, on which what losses read depends."""

    @classmethod
    def of(cls, outputs: Collection[str], prompt_outputs: Collection[str], prompt_loss_fn):
        """Raises :class:`dormouse.ArgumentError` for names that are no fields."""
        for argument, names in (("outputs", outputs), ("prompt_outputs", prompt_outputs)):
            unknown = [names] if isinstance(names, str) else set(names) - ARGUMENTS.keys()
            if unknown:
                raise ArgumentError(
                    f"{argument} has {', '.join(map(repr, unknown))}; accepted: a list of "
                    f"{', '.join(map(repr, ARGUMENTS))}"
                )
        return cls(frozenset(outputs), frozenset(prompt_outputs), prompt_loss_fn is not None)

    @property
    def description(self) -> str:
        """Text that is equal on all ranks with the same passes."""
        read = [f"{name} of responses" for name in sorted(self.response)]
        read += [f"{name} of prompts" for name in sorted(self.prompt)]
        return ", ".join(["logits", *read, *["logits of prompts"] * self.has_prompt_loss])

    @property
    def runs_prompt_to_end(self) -> bool:
        """Whether the prompt runs beyond the last layer's K and V."""
        return self.has_prompt_loss or bool(self.prompt)

    @property
    def has_outputs(self) -> bool:
        """Whether loss functions receive an :class:`Output`, not the logits alone."""
        return bool(self.response or self.prompt)

    @property
    def of_labels(self) -> Request:
        """What losses read of a prefix of a tree that has labels, and of what follows it."""
        return replace(self, prompt=self.response, has_prompt_loss=True)

    def given(self, output: Output) -> torch.Tensor | Output:
        """Returns what a loss function receives."""
        return output if self.has_outputs else output.logits


PLAIN = Request()
"""Losses of responses that read logits."""


class Losses(NamedTuple):
    """The loss functions of a batch, and what they read."""

    loss_fn: Callable | None = None
    """None if every microbatch is a dummy."""
    prompt_loss_fn: Callable | None = None
    request: Request = PLAIN

    def of_group(self, group: int) -> Losses:
        """Returns those of one group of several, whose functions receive its number last."""

        def loss_fn(*arguments):
            return self.loss_fn(*arguments, group)

        def prompt_loss_fn(*arguments):
            return self.prompt_loss_fn(*arguments, group)

        has_prompt_loss = self.prompt_loss_fn is not None
        return Losses(loss_fn, prompt_loss_fn if has_prompt_loss else None, self.request)


def arguments_of(names: Collection[str]) -> dict[str, bool]:
    """Returns the arguments with which a model returns these fields."""
    return {ARGUMENTS[name]: True for name in sorted(names)}


def read(output, names: Collection[str], rows: int) -> Output:
    """Returns the fields of a model's output for one row of ``rows`` tokens.

    Raises :class:`UnsupportedModelError` if it lacks one.
    """
    result = Output(rows_of(logits_of(output)))
    if "last_hidden_state" in names:
        states = getattr(output, "hidden_states", None) or (None,)
        hidden = _rows("hidden_states[-1]", output, states[-1], rows)
        result = replace(result, last_hidden_state=hidden)
    if "router_logits" in names:
        # Layers without experts may have None.
        present = [x for x in getattr(output, "router_logits", None) or () if x is not None]
        routers = tuple(_rows("router_logits", output, x, rows) for x in present or [None])
        result = replace(result, router_logits=routers)
    return result


def _rows(name: str, output, value, rows: int) -> torch.Tensor:
    """Returns ``value`` as ``[rows, ...]``."""
    if isinstance(value, torch.Tensor) and value.dim() >= 2:
        flat = value.flatten(0, -2)
        if len(flat) == rows:
            return flat
    seen = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise UnsupportedModelError(
        f"{name} of {type(output).__name__} is {seen} for {rows} tokens; accepted: a tensor with a "
        "row per token"
    )
