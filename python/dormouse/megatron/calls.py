"""The trainer's calls of the model in one call of the schedule."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from ..trainers.own_forward import own_forward
from ..trainers.refusals import UnsupportedTrainerError, refuse
from .batches import Microbatch
from .context import is_context_parallel
from .refusals import arguments_of, check_call

Part = Callable[[slice, bool], torch.Tensor]
"""Returns log-probabilities of labels of some rows, given whether they are the last."""


class Calls:
    """In place of the model's forward: each call gets the losses of its microbatch."""

    def __init__(
        self,
        gpt: GPTModel,
        microbatches: list[Microbatch],
        part: Part,
        columns_of: Callable[[int], torch.Tensor],
        *,
        without_loss: torch.Tensor | None,
        has_backward: bool,
    ):
        """``columns_of(count)``: of whole rows, those in ``count`` columns of this rank's.
        ``without_loss``: see :attr:`.work.Work.without_loss`. ``has_backward``: of the schedule;
        then calls without gradients are evaluations, which are of no microbatch."""
        self._gpt, self._left, self._part = gpt, list(microbatches), part
        self._columns_of, self._has_backward = columns_of, has_backward
        self._without_loss = without_loss
        self._row = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context of the schedule.

        Raises :class:`UnsupportedTrainerError` at its end if the model was not called for every
        microbatch.
        """

        # Passes find the model without it: it wraps the forward (trainers.own_forward).
        @functools.wraps(type(self._gpt).forward)
        def forward(*args, **named):
            if self._has_backward and not torch.is_grad_enabled():
                return self._evaluated(*args, **named)
            return self._losses(*args, **named)

        self._gpt.forward = forward
        try:
            yield
        finally:
            del self._gpt.forward
        if self._left:
            raise UnsupportedTrainerError(
                f"the model was not called for the last {len(self._left)} batches; accepted: one "
                "call for each batch of the data iterator"
            )

    def _evaluated(self, *args, **named) -> torch.Tensor:
        """Returns what the model's own forward does."""
        refuse(
            (
                parallel_state.get_pipeline_model_parallel_world_size() > 1,
                "the model of a pipeline is evaluated within a call, where one stage is alone",
                "an evaluation between two calls",
            ),
            (
                is_context_parallel(self._gpt),
                "the model is evaluated within a call with context_parallel_size above 1, where it "
                "runs in shared passes alone",
                "forward_only=True in a call of its own",
            ),
        )
        with own_forward(self._gpt):
            return self._gpt.forward(*args, **named)

    def _losses(self, *args, **named) -> torch.Tensor:
        given = arguments_of(args, named)
        if not self._left:
            raise UnsupportedTrainerError(
                "the model is called more often than there are microbatches; accepted: one call "
                "for each batch of the data iterator"
            )
        own = self._left.pop(0)
        rows, count = own.tokens.shape
        columns = self._columns_of(count)
        check_call(given, own, columns)
        part = slice(self._row, self._row + rows)
        self._row += rows
        values = self._part(part, not self._left)
        if self._without_loss is not None:
            values = values.masked_fill(self._without_loss[part].to(values.device), 0)
        return -values.index_select(1, columns.to(values.device))
