"""Contexts in which one thing of several ranks counts too often or not at all, once in a call of
the schedule. See test_multiplicity.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dormouse.hf import step
from dormouse.hf.prefix import PlannedForward
from dormouse.megatron.balancing import NO_OWNER, Balancing
from dormouse.megatron.context_ring import ShardRing
from dormouse.megatron.forward_backward import SharedForwardBackward
from dormouse.megatron.replicas import Dealt
from dormouse.megatron.shared_gpt import SharedGPT
from dormouse.megatron.stage_step import StageStep

# The rank that counts wrongly where all could, and the other one.
WRONG_RANK, OTHER_RANK = 0, 1
# Of the losses of a call, those of a token are about this part.
TOKEN_WEIGHT = 1 / 40

Counts = Callable[[int], contextlib.AbstractContextManager]
"""Given how often something counts, returns the context, which yields how many calls it changed."""


class _Calls:
    """Finds the first time in a call of the schedule, outside probes and checks, which would refuse
    the model."""

    def __init__(self):
        self.changed: list[bool] = []
        """Of each call, whether something was changed in it."""
        self._is_apart = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[_Calls]:
        """Context of the calls."""
        own = SharedForwardBackward._shared_call

        def begin(*args, **named):
            self.changed.append(False)
            return own(*args, **named)

        with (
            mock.patch.object(SharedForwardBackward, "_shared_call", begin),
            mock.patch.object(SharedGPT, "_check", self._apart(SharedGPT._check)),
            mock.patch.object(SharedGPT, "_run_probe", self._apart(SharedGPT._run_probe)),
        ):
            yield self

    def _apart(self, run: Callable) -> Callable:
        def unwatched(*args, **named):
            before, self._is_apart = self._is_apart, True
            try:
                return run(*args, **named)
            finally:
                self._is_apart = before

        return unwatched

    def take_first(self) -> bool:
        """Returns whether this is the first time in a call."""
        if self._is_apart or self.changed[-1]:
            return False
        self.changed[-1] = True
        return True


@contextlib.contextmanager
def gathered(times: int) -> Iterator[_Calls]:
    """The owner of K and V of a layer adds the other rank's gradients so often."""
    own = dist.all_to_all_single

    def collective(output, given, *args, **named):
        group = parallel_state.get_context_parallel_group()
        result = own(output, given, *args, **named)
        if named["group"] is group and group.rank() == WRONG_RANK and calls.take_first():
            output.view(group.size(), -1)[OTHER_RANK] *= times
        return result

    with _Calls().watched() as calls, mock.patch.object(dist, "all_to_all_single", collective):
        yield calls


@contextlib.contextmanager
def ringed(times: int) -> Iterator[_Calls]:
    """A rank adds its gradients to the passing sums of the other rank's block so often."""
    own = ShardRing.collect

    def collect(self, block, add):
        def add_often(owner, pair, sums):
            before = [each.clone() for each in sums]
            add(owner, pair, sums)
            # The gradient of a response that no loss reads is zero.
            adds = any(not torch.equal(*each) for each in zip(sums, before, strict=True))
            is_wrong = adds and self._rank == WRONG_RANK and owner == OTHER_RANK
            if is_wrong and calls.take_first():
                for each, had in zip(sums, before, strict=True):
                    each.copy_(had + times * (each - had))

        return own(self, block, add_often)

    with _Calls().watched() as calls, mock.patch.object(ShardRing, "collect", collect):
        yield calls


@contextlib.contextmanager
def of_dummies(times: int) -> Iterator[_Calls]:
    """A dummy microbatch has the gradient of a token so often."""
    own = step._backward_of_zeros

    def backward(logits: torch.Tensor) -> None:
        if not calls.take_first():
            return own(logits)
        row = torch.log_softmax(logits.flatten(0, -2)[0], -1)
        row[0].backward(torch.full_like(row[0], -times * TOKEN_WEIGHT))

    with _Calls().watched() as calls, mock.patch.object(step, "_backward_of_zeros", backward):
        yield calls


@contextlib.contextmanager
def of_dummy_routers(times: int) -> Iterator[_Calls]:
    """Routers count a dummy microbatch so often for the first of the trainer's rows."""
    own = Balancing.count

    def count(self, layer, owners, *counted):
        own(self, layer, owners, *counted)
        is_dummy = self._counting and bool((owners == NO_OWNER).all())
        if is_dummy and calls.take_first():
            for _ in range(times):
                own(self, layer, torch.full_like(owners, NO_OWNER + 1), *counted)

    with _Calls().watched() as calls, mock.patch.object(Balancing, "count", count):
        yield calls


@contextlib.contextmanager
def of_chunks(times: int) -> Iterator[_Calls]:
    """K or V of a prompt's chunk gets the gradient of a chunk that follows so often."""
    own, is_chunk = (PlannedForward.accumulate, StageStep.prefix_backward), False

    def prefix_backward(self, *args):
        nonlocal is_chunk
        is_chunk = True
        try:
            return own[1](self, *args)
        finally:
            is_chunk = False

    def accumulate(self, layer, slot, grad):
        for _ in range(times if is_chunk and calls.take_first() else 1):
            own[0](self, layer, slot, grad)

    with (
        _Calls().watched() as calls,
        mock.patch.object(StageStep, "prefix_backward", prefix_backward),
        mock.patch.object(PlannedForward, "accumulate", accumulate),
    ):
        yield calls


@contextlib.contextmanager
def moved(times: int) -> Iterator[_Calls]:
    """A row that another replica reads gets its gradient so often."""
    own = Dealt.to_runners

    def to_runners(self, *args):
        found, rank = own(self, *args), self.group.rank()
        # Rows come in the order of the replicas that read them.
        other = next(number for number in range(len(self._sent)) if number != rank)
        if self._sent[other] and calls.take_first():
            found[sum(self._sent[:other])] *= times
        return found

    with _Calls().watched() as calls, mock.patch.object(Dealt, "to_runners", to_runners):
        yield calls


@contextlib.contextmanager
def selected(times: int) -> Iterator[_Calls]:
    """The experts that the rows of a pass go to count so often."""
    own = Balancing.count_selected

    def count_selected(self, *args):
        is_first = self._counting and calls.take_first()
        for _ in range(times if is_first else 1):
            own(self, *args)

    with (
        _Calls().watched() as calls,
        mock.patch.object(Balancing, "count_selected", count_selected),
    ):
        yield calls
