"""What a call computes of each response, and where it is in the layout of the batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..errors import ArgumentError
from . import outputs
from .likelihood import Norms, entropies, overwrite_with_gradient, values_of
from .outputs import ARGUMENTS, PLAIN, Output, Request
from .padded import RowPlaces
from .support import ModelView

CHOSEN_LOGITS = "chosen_logits"
OUTPUTS = (*ARGUMENTS, CHOSEN_LOGITS)
"""Names of what a call returns of responses on request."""

Tensors = tuple[torch.Tensor | None, ...]
"""Values, or their gradients: None for one that no loss depends on."""


class Asked(NamedTuple):
    """What a call returns beside log-probabilities."""

    entropies: bool = False
    chosen_logits: bool = False
    request: Request = PLAIN
    """What it reads of the model beside logits."""

    @classmethod
    def of(
        cls, entropy: bool, names: Collection[str] = (), prompt_names: Collection[str] = ()
    ) -> Asked:
        """Raises :class:`dormouse.ArgumentError` for names that are no outputs."""
        unknown = [names] if isinstance(names, str) else set(names) - set(OUTPUTS)
        if unknown:
            raise ArgumentError(
                f"outputs has {', '.join(map(repr, sorted(unknown)))}; accepted: a list of "
                f"{', '.join(map(repr, OUTPUTS))}"
            )
        request = Request.of(set(names) - {CHOSEN_LOGITS}, prompt_names, None)
        return cls(entropy, CHOSEN_LOGITS in names, request)


class Values(NamedTuple):
    """Of one response, or of all in the layout of a batch."""

    of_logits: Tensors
    """Log-probabilities, and as asked for entropies and chosen logits."""
    of_rows: Tensors = ()
    """Outputs of the rows that predict the response, in the order of :meth:`.Output.tensors`."""
    of_prompt: Tensors = ()
    """The same of the prompt's rows."""

    @classmethod
    def of(cls, of_logits: Tensors, output: Output, prompt: Output | None) -> Values:
        """``output``: of a response's rows. ``prompt``: what is read of its prompt."""
        own = replace(output, logits=None, prompt=None)
        return cls(of_logits, tensors_of(own), () if prompt is None else tensors_of(prompt))

    def tensors(self) -> Tensors:
        """Returns all in order."""
        return (*self.of_logits, *self.of_rows, *self.of_prompt)

    def counts(self) -> tuple[int, int]:
        """Returns the numbers of the first two kinds, by which :meth:`split` restores the order."""
        return len(self.of_logits), len(self.of_rows)

    @classmethod
    def split(cls, tensors: Sequence[torch.Tensor | None], counts: tuple[int, int]) -> Values:
        """Returns tensors in the order of :meth:`tensors` by kind."""
        first, last = counts[0], sum(counts)
        return cls(*map(tuple, (tensors[:first], tensors[first:last], tensors[last:])))

    def of_response(
        self, places: RowPlaces, number: int, first: int | None = None, count: int = 0
    ) -> Values:
        """Returns the parts of values in the layout of a batch that belong to a response; given
        ``first``, of ``count`` of its tokens from that position of its sequence on."""
        rows = slice(None)
        if first is not None:
            start = first - places.first_label(number)
            rows = slice(start, start + count)

        def parts(whole: Tensors) -> Tensors:
            return tuple(x if x is None else places.of_response(x, number)[rows] for x in whole)

        of_prompt = (x if x is None else places.of_prompt(x, number) for x in self.of_prompt)
        return Values(parts(self.of_logits), parts(self.of_rows), tuple(of_prompt))


class Measure(NamedTuple):
    """What is computed from the logits of a response."""

    view: ModelView
    temperature: float
    asked: Asked

    def values(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[Tensors, Norms]:
        """Returns values of the labels without a graph, and the rows' norms."""
        with_entropies = self.asked.entropies
        found, norms = values_of(logits, labels, self.temperature, with_entropies=with_entropies)
        if self.asked.chosen_logits:
            found = (*found, _chosen(logits.detach(), labels))
        return found, norms

    def differentiable_values(
        self, logits: torch.Tensor, labels: torch.Tensor, needed: Sequence[bool] | None = None
    ) -> Tensors:
        """Returns the same values with their graph; None for values that no caller needs."""
        kinds = [lambda: self.view.log_probabilities(logits, labels, self.temperature)]
        if self.asked.entropies:
            kinds.append(lambda: entropies(logits, self.temperature))
        if self.asked.chosen_logits:
            kinds.append(lambda: _chosen(logits, labels))
        both = zip(kinds, needed or [True] * len(kinds), strict=True)
        return tuple(kind() if is_needed else None for kind, is_needed in both)

    def overwrite_with_gradient(
        self, logits: torch.Tensor, labels: torch.Tensor, norms: Norms, gradients: Tensors
    ) -> None:
        """Overwrites the logits of a response with their gradient."""
        of_log_probabilities, *others = gradients
        of_entropies = others.pop(0) if self.asked.entropies else None
        both = of_log_probabilities, of_entropies
        overwrite_with_gradient(logits, labels, self.temperature, norms, *both)
        if others and others[0] is not None:
            own = others[0].to(logits.dtype)
            logits.scatter_add_(1, labels.unsqueeze(1), own.unsqueeze(1))


class Layout:
    """Values of a batch in its layout, zeros where there is no response. They are made when the
    first response's are known."""

    def __init__(self, shape: Sequence[int], prompt_shape: Sequence[int], device: torch.device):
        """``shape``: of what has a number per token of responses. ``prompt_shape``: of prompts."""
        self._shape, self._prompt_shape, self._device = shape, prompt_shape, device
        self.values: Values | None = None

    def begin(self, like: Values) -> None:
        """Makes values like these, which may be of other rows."""
        of_response = (*like.of_logits, *like.of_rows)
        tensors = [
            *(self._zeros(self._shape, each) for each in of_response),
            *(self._zeros(self._prompt_shape, each) for each in like.of_prompt),
        ]
        self.values = Values.split(tensors, like.counts())

    def put(self, places: RowPlaces, number: int, first: int, values: Values) -> None:
        """Fills in values of a response from the position ``first`` of its sequence on."""
        if self.values is None:
            self.begin(values)
        own = self.values.of_response(places, number, first, len(values.of_logits[0]))
        for to, value in zip(own.tensors(), values.tensors(), strict=True):
            to.copy_(value.detach())

    def _zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.zeros((*shape, *like.shape[1:]), dtype=like.dtype, device=self._device)


@torch.no_grad()
def example(measure: Measure, device: torch.device) -> Values:
    """Returns values of one row, for a batch without responses. Runs the model on a token if it is
    asked for more than its logits."""
    view, request = measure.view, measure.asked.request
    if not request.has_outputs:
        parameters = measure.view.model.parameters()
        dtype = next(p.dtype for p in parameters if p.is_floating_point())
        logits = torch.zeros(1, 1, dtype=dtype, device="cpu")
        return Values(measure.values(logits, torch.zeros(1, dtype=torch.int64, device="cpu"))[0])
    names = request.response | request.prompt
    tokens = torch.zeros(1, dtype=torch.int64, device=device)
    output = outputs.read(view.run_dense(tokens, **outputs.arguments_of(names)), names, 1)
    of_logits = measure.differentiable_values(output.logits, tokens)
    prompt = output.with_only(request.prompt).without_logits()
    return Values.of(of_logits, output.with_only(request.response), prompt)


def tensors_of(output: Output) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of an output in order."""
    return tuple(tensor for _, tensor in output.tensors())


def _chosen(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the logits of the labels, ``[rows]``, in FP32 or FP64."""
    own = logits.gather(1, labels.unsqueeze(1))[:, 0]
    return own.to(torch.promote_types(logits.dtype, torch.float32))
