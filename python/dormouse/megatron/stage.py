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
import functools
import itertools
from collections.abc import Iterator

import torch
from megatron.core import parallel_state

from .chunks import cut_of, described, ends_of
from .held import Held, gathered, planned_lists
from .lists import Message, Neighbours, carry_out
from .part import Part
from .shared_gpt import largest, waits_in_passes


class Stage:
    """A context manager: leaving it frees everything."""

    def __init__(
        self, parts: list[Part], held: Held, prompt_chunks: int | None, microbatch_tokens: int
    ):
        """``parts``: of this stage, in the order of the model. ``held``: of the calls before.
        ``prompt_chunks``: see :func:`dormouse.megatron.share`."""
        self._prompt_chunks, self._microbatch_tokens = prompt_chunks, microbatch_tokens
        self._parts, self.device, self._held = parts, parts[0].device, held
        group = parallel_state.get_pipeline_model_parallel_group()
        self._number, self._count = group.rank(), group.size()
        self.neighbours = Neighbours(group)

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part)
            self._rows = self._most_rows()
            self._cut = self._chosen_cut()
            ends = ends_of(self._rows, **self._cut)
            for part in self._parts:
                part.cut(ends)
            self._stack = stack.pop_all()
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
        stage. With experts that are balanced collective of replicas, too."""
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
                        received = part.empty(part.rows_of(op))
                        messages.append(Message(before, received, False))
                self.neighbours.exchange(messages)
                if found is not None:
                    sent = part.forward(group, op, received, values)
                    to_send = [] if sent is None else [Message(after, sent, True)]
        for part in self._parts:
            part.settle()
        return values

    def backward(self, gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Runs the step of every group; returns the gradient of each of :attr:`parameters`.
        ``gradients``: of the values, on the last stage."""
        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.stepping(gradients))
            own = self._planned()["stages"][self._number]
            self.planned_bytes = sum(map(self._sent_bytes, own["ops"]))
            self.planned_peak = own["peak"]
            self._held.begin(self._parts, own["ops"])
            carry_out(own, self._run_op, self.neighbours, self._room_for)
            self._held.end()
        return [gradient for part in self._parts for gradient in part.take()]

    @property
    def _shape(self) -> dict[str, int]:
        """What the planner's query has of stages."""
        return {"stages": self._count, "virtual_stages": len(self._parts)}

    def _most_rows(self) -> list[list[int]]:
        """Returns the rows of each group's forwards. Ranks whose passes wait for each other need
        equal lists, so these are the most that any has."""
        first = self._parts[0]
        rows = first.rows()
        if not waits_in_passes(first.gpt):
            return rows
        most = iter(largest(first.gpt, list(itertools.chain.from_iterable(rows))))
        return [list(itertools.islice(most, len(each))) for each in rows]

    def _chosen_cut(self) -> dict[str, int]:
        """Returns what the planner's query has of chunks."""
        rows_min = self._parts[0].own_rows(self._microbatch_tokens)
        return cut_of(self._rows, self._prompt_chunks, rows_min, **self._shape)

    def _planned(self) -> dict:
        """Returns the planner's lists of all stages, of which each carries out its own."""
        first = self._parts[0]
        saved = {"boundary": 0, "prefix_saved": 0, "microbatch_saved": 0}
        of_ranks = functools.partial(largest, first.gpt)
        return planned_lists(
            list(map(described, self._rows)),
            gathered(self._held, self._number, self._count, of_ranks),
            **self._shape,
            **self._cut,
            order="stream",
            row_bytes={"activation": first.empty(1).nbytes} | saved,
        )

    def _run_op(self, op: dict, received: torch.Tensor | None) -> torch.Tensor | None:
        part = self._parts[op["virtual_stage"]]
        return self._held.measured(part, op, received, part.run_op)

    def _sent_bytes(self, op: dict) -> int:
        """Returns the bytes that an op of the list sends: its part of those that are planned for
        the most rows of any replica."""
        sends, part = op["sends"], self._parts[op["virtual_stage"]]
        return 0 if sends is None else sends["bytes"] * part.rows_in(op) // sends["rows"]

    def _room_for(self, op: dict) -> torch.Tensor:
        part = self._parts[op["virtual_stage"]]
        return part.empty(part.rows_in(op))


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
