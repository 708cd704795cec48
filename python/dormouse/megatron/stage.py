"""The passes of one pipeline stage over the groups of a call.

First all forwards without a graph, which give the last part its values. Once it has their
gradients, the planner's list of the stage: prefixes and microbatches forward and backward, groups
as one stream. A part's prefix backward has several roots: K and V of its layers, and the hidden
states that it sent.

The model is cut into as many parts for each stage as Megatron has chunks of it there, in turns:
part ``p`` is on stage ``p mod stages``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core import parallel_state

from .held import Held, gathered, planned_lists
from .lists import Message, Neighbours, carry_out
from .part import Part, rows_of


class Stage:
    """A context manager: leaving it frees everything."""

    def __init__(self, parts: list[Part], held: Held):
        """``parts``: of this stage, in the order of the model. ``held``: of the calls before."""
        self._parts, self.device, self._held = parts, parts[0].device, held
        group = parallel_state.get_pipeline_model_parallel_group()
        self._number, self._count = group.rank(), group.size()
        self.neighbours = Neighbours(group)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        for part in self._parts:
            self._stack.enter_context(part)
        return self

    def __exit__(self, *exc):
        return self._stack.__exit__(*exc)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that receive a gradient."""
        return [parameter for part in self._parts for parameter in part.parameters]

    @torch.no_grad()
    def values(self, shape: tuple[int, int]) -> torch.Tensor | None:
        """Runs all forwards; returns the log-probabilities of labels, ``shape``, on the last
        stage."""
        values = None
        if self._parts[-1].is_last:
            dtype = torch.promote_types(self._parts[0].dtype, torch.float32)
            values = torch.zeros(shape, dtype=dtype, device=self.device)
        before, after = (self._number - 1) % self._count, (self._number + 1) % self._count
        with contextlib.ExitStack() as stack:
            ops = [part.forwards(stack) for part in self._parts]
            to_send: list[Message] = []
            for found in turns(self._number, self._count, len(ops), len(ops[0])):
                messages, to_send = to_send, []
                received = None
                if found is not None:
                    part, (group, op) = self._parts[found[0]], ops[found[0]][found[1]]
                    if not part.is_first:
                        received = part.empty(rows_of(op))
                        messages.append(Message(before, received, False))
                self.neighbours.exchange(messages)
                if found is not None:
                    sent = part.forward(group, op, received, values)
                    to_send = [] if sent is None else [Message(after, sent, True)]
        return values

    def backward(self, gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Runs the step of every group; returns the gradient of each of :attr:`parameters`.
        ``gradients``: of the values, on the last stage."""
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.stepping(gradients))
            model = parallel_state.get_model_parallel_group()
            lists = planned_lists(
                self._parts[0].described(),
                gathered(self._held, model, self._number, self._count),
                stages=self._count,
                virtual_stages=len(self._parts),
                chunks=1,
                order="stream",
                row_bytes=self._row_bytes(),
            )
            own = lists["stages"][self._number]
            self.planned_bytes = sum(op["sends"]["bytes"] for op in own["ops"] if op["sends"])
            self.planned_peak = own["peak"]
            self._held.begin(self._parts, own["ops"])
            carry_out(own, self._run_op, self.neighbours, self._room_for)
            self._held.end()
        return [gradient for part in self._parts for gradient in part.take()]

    def _run_op(self, op: dict, received: torch.Tensor | None) -> torch.Tensor | None:
        part = self._parts[op["virtual_stage"]]
        return self._held.measured(part, op, received, part.run_op)

    def _room_for(self, op: dict) -> torch.Tensor:
        return self._parts[0].empty(op["receives"]["rows"])

    def _row_bytes(self) -> dict:
        activation = self._parts[0].empty(1).nbytes
        return {"activation": activation, "boundary": 0, "prefix_saved": 0, "microbatch_saved": 0}


def turns(stage: int, stages: int, parts: int, ops: int) -> Iterator[tuple[int, int] | None]:
    """Yields which part of a stage runs which op in each turn; None: none does.

    As many ops as there are stages pass through a part, then through the next. What a stage
    computes in a turn, the next one reads in the turn after, so stages that send and receive
    between two turns at once never wait for each other in a circle.
    """
    rounds = -(-ops // stages)
    for turn in range(rounds * parts * stages + stages - 1):
        number, place = divmod(turn - stage, stages)
        which, part = divmod(number, parts)
        op = which * stages + place
        yield (part, op) if 0 <= which < rounds and op < ops else None
