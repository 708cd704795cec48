"""Megatron's schedule with the model's losses from shared passes."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator

import torch
from megatron.core.models.gpt import GPTModel

from ..hf.padded import Places
from ..hf.window import Window
from ..runtime import Runtime
from ..trainers.refusals import UnsupportedTrainerError
from ..trainers.runtimes import runtime_of
from ..trainers.sharing import Sharing
from .batches import Microbatch, Read, places_of, shape_of
from .refusals import arguments_of, check_call, unwrapped
from .shared_gpt import SharedGPT

_log = logging.getLogger(__name__)


class SharedForwardBackward:
    """Called like Megatron's ``forward_backward_func``; see :func:`dormouse.megatron.share`."""

    def __init__(
        self,
        own: Callable,
        *,
        runtime: Runtime | None,
        read: Read,
        sleep: bool,
        score_options: dict,
    ):
        functools.update_wrapper(self, own)
        self._own, self._runtime, self._read = own, runtime, read
        self._sleep, self._score_options = sleep, score_options
        self._models: dict[GPTModel, SharedGPT] = {}
        self._noticed = False
        self.sharing = Sharing()
        """Counts since the construction."""

    def __call__(
        self,
        *,
        data_iterator,
        model,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **named,
    ):
        run = functools.partial(
            self._own,
            model=model,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            **named,
        )
        gpt = unwrapped(model)
        if collect_non_loss_data:
            return run(data_iterator=data_iterator)
        batches = _taken(data_iterator, num_microbatches)
        microbatches = list(map(self._read, batches))
        places = self._shared_places(microbatches)
        if places is None:
            return run(data_iterator=iter(batches))
        window = functools.partial(
            self._shared(gpt).window,
            places,
            shape_of(microbatches),
            **self._options(microbatches, places),
        )
        with _Calls(gpt, microbatches, window, has_graph=not forward_only).in_place():
            result = run(data_iterator=iter(batches))
        self.sharing.rows += sum(len(each.rows) for each in places)
        self.sharing.prompts += len(places)
        return result

    def _shared_places(self, microbatches: list[Microbatch]) -> list[Places] | None:
        """Returns the groups of all rows; None if no prompt is shared."""
        places = places_of(microbatches)
        if places is not None and len(places) < sum(len(each.rows) for each in places):
            return places
        if not self._noticed:
            self._noticed = True
            _log.warning(
                "no prompt is shared by the rows of %d microbatches, so they run as in Megatron: "
                "rows share a prompt if they are equal up to the first label with a loss",
                len(microbatches),
            )
        return None

    def _options(self, microbatches: list[Microbatch], places: list[Places]) -> dict:
        """Returns the options of a window. A microbatch has as many tokens as the trainer's."""
        of_row = [i for i, each in enumerate(microbatches) for _ in range(len(each.tokens))]
        tokens = [0] * len(microbatches)
        for each in places:
            for row, response in zip(each.rows, each.group.responses, strict=True):
                tokens[of_row[row]] += len(response)
        return {"microbatch_tokens": max(tokens), **self._score_options}

    def _shared(self, gpt: GPTModel) -> SharedGPT:
        if gpt not in self._models:
            runtime = self._runtime or runtime_of(next(gpt.parameters()).device)
            self._models[gpt] = SharedGPT(gpt, runtime, sleep=self._sleep)
        return self._models[gpt]


def _taken(data_iterator, count: int) -> list:
    """Returns the next batches of a data iterator."""
    if isinstance(data_iterator, list):
        (data_iterator,) = data_iterator
    if data_iterator is None:
        raise UnsupportedTrainerError(
            "data_iterator is None on this rank; accepted: the same batches on every rank of a "
            "tensor-parallel group"
        )
    return [next(data_iterator) for _ in range(count)]


class _Calls:
    """The trainer's calls of the model in one call of the schedule."""

    def __init__(
        self,
        gpt: GPTModel,
        microbatches: list[Microbatch],
        find_window: Callable[[], Window],
        *,
        has_graph: bool,
    ):
        self._gpt, self._left = gpt, list(microbatches)
        self._find_window, self._has_graph = find_window, has_graph
        self._window: Window | None = None
        self._row = 0

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context of the schedule: calls of the model get their part of the window."""

        # Passes find the model without it: it wraps the forward (trainers.own_forward).
        @functools.wraps(type(self._gpt).forward)
        def forward(*args, **named):
            return self._losses(*args, **named)

        self._gpt.forward = forward
        try:
            yield
        finally:
            del self._gpt.forward
            self._window = None
        if self._left:
            raise UnsupportedTrainerError(
                f"the model was not called for the last {len(self._left)} batches; accepted: one "
                "call for each batch of the data iterator"
            )

    def _losses(self, *args, **named) -> torch.Tensor:
        given = arguments_of(args, named)
        if not self._left:
            raise UnsupportedTrainerError(
                "the model is called more often than there are microbatches; accepted: one call "
                "for each batch of the data iterator"
            )
        own = self._left.pop(0)
        check_call(given, own.tokens, own.labels)
        has_graph = self._has_graph and torch.is_grad_enabled()
        with torch.set_grad_enabled(has_graph):
            if self._window is None:
                self._window = self._find_window()
            rows, columns = own.tokens.shape
            part = slice(self._row, self._row + rows)
            self._row += rows
            found = self._window.part(part, is_last=not self._left)
            return -found.log_probabilities[:, :columns]
