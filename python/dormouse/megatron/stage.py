"""The passes of one pipeline stage over the groups of a call.

First all forwards without a graph, which give the last stage its values. Once it has their
gradients, the planner's list of the stage: prefixes and microbatches forward and backward, groups
as one stream. A stage's prefix backward has several roots: K and V of its layers, and the hidden
states that it sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state

from .. import _native as native
from .. import queries
from ..hf.batch import GroupBatch
from ..hf.microbatch import microbatch_output, pack_members
from ..hf.padded import Places
from ..hf.prefix import PlannedForward, PrefixForward
from ..hf.sharding import ReplicatedWeights
from ..hf.step import Step
from ..hf.twins import Twins
from ..schedule import Op, Plan
from .lists import Message, Neighbours, carry_out
from .view import GPTView

# A backward pass takes about twice as long as a forward pass.
BACKWARD_OVER_FORWARD = 2


class _ToEnd:
    """A prefix whose hidden states a later stage reads."""

    @property
    def _is_last(self) -> bool:
        return self.view.model.post_process and super()._is_last


class StagePrefix(_ToEnd, PrefixForward):
    """A prefix without a graph."""


class StageForward(_ToEnd, PlannedForward):
    """A prefix that may sleep. Its hidden states are a root of its graph."""

    def ended(self, layer, roots):
        is_end = layer == len(self.view.layers) - 1 and not self.view.model.post_process
        super().ended(layer, [*roots, self.view.hidden.returned] if is_end else roots)


@dataclass(frozen=True)
class _SentRows:
    """In the place of rows that losses read: what the next stage read, and its gradient."""

    live: list[torch.Tensor]
    gradients: list[torch.Tensor]

    def seeds(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.live, self.gradients, strict=True))


class StageStep(Step):
    """A step whose ops run one by one, with hidden states from and for other stages."""

    forward_kind = StageForward

    def probe(self) -> None:
        """Finds the probe of the prefix: its passes have hidden states of their own."""
        self._find_probe(False, self._batch.request)

    def prefix_forward(self, op: Op) -> None:
        """Runs phase A."""
        self._prefix_forward(op)

    def microbatch_forward(self, op: Op):
        """Returns what the stage computes for the rows of a microbatch, and where its scores are in
        it."""
        return self._packed_output(op)

    def microbatch_backward(self, op: Op, roots: list, seeds: list) -> None:
        """Runs the backward of a microbatch."""
        with self._accepting(op.reads):
            torch.autograd.backward(roots, seeds)

    def prefix_backward(self, op: Op, roots: list, seeds: list) -> None:
        """Runs phase C. ``roots``: what it begins with beside K and V."""
        if roots:
            self._live[op.node].forward.rows = _SentRows(roots, seeds)
        self._prefix_backward(op.node, is_last=False)


@dataclass
class _Run:
    """A group between its forward and its backward."""

    places: Places
    batch: GroupBatch
    step: StageStep
    prefix: Op
    microbatches: list[Op]
    end: Op
    received: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """Hidden states of an earlier stage, by kind and number of the op."""
    returned: dict[tuple[str, int], tuple[list, list]] = field(default_factory=dict)
    """What the op's backward begins with, and its gradients as far as they are known."""


class Stage:
    """A context manager: leaving it frees everything."""

    def __init__(
        self,
        view: GPTView,
        weights: ReplicatedWeights,
        device: torch.device,
        places: list[Places],
        batches: list[GroupBatch],
        plan_of: Callable[[GroupBatch], Plan],
        step_of: Callable[[GroupBatch, Plan], StageStep],
    ):
        self._view, self._weights, self.device = view, weights, device
        self._places, self._batches = places, batches
        self._plan_of, self._step_of = plan_of, step_of
        self._twins = Twins(view.model)
        group = parallel_state.get_pipeline_model_parallel_group()
        self._number, self._count = group.rank(), group.size()
        self.neighbours = Neighbours(group)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc):
        # Those of a pass that failed are of no later one.
        self._view.hidden.received = self._view.hidden.returned = None
        return self._stack.__exit__(*exc)

    @property
    def is_first(self) -> bool:
        """Whether tokens are embedded here."""
        return self._number == 0

    @property
    def is_last(self) -> bool:
        """Whether losses are computed here."""
        return self._number == self._count - 1

    @torch.no_grad()
    def values(self, shape: tuple[int, int]) -> torch.Tensor | None:
        """Runs all forwards; returns the log-probabilities of labels, ``shape``, on the last
        stage."""
        out = None
        if self.is_last:
            dtype = torch.promote_types(self._dtype, torch.float32)
            out = torch.zeros(shape, dtype=dtype, device=self.device)
        for places, batch in zip(self._places, self._batches, strict=True):
            batch.to(self.device)
            forward = StagePrefix(self._view, self._weights)
            with self._plan_of(batch) as plan:
                for op in plan:
                    if op.kind is native.OpKind.PREFIX_FORWARD:
                        self._receive(len(op.tokens))
                        forward.forward(batch.tokens(0, op.tokens))
                        self._send()
                    elif op.kind is native.OpKind.MICROBATCH:
                        pack = pack_members(batch, op.members)
                        self._receive(len(pack.tokens))
                        output = microbatch_output(self._view, [forward], pack).logits
                        self._send()
                        if out is None:
                            continue
                        for score in op.scores:
                            own = self._scored(batch, output, score)
                            number = batch.numbers[score.sequence]
                            places.of_response(out, number).copy_(own)
        return out

    def backward(self, gradients: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Runs the step of every group; returns the gradient of each of :attr:`parameters`.
        ``gradients``: of the values, on the last stage."""
        self._gradients = gradients
        with torch.enable_grad(), self._twins.in_place():
            pairs = zip(self._places, self._batches, strict=True)
            self._runs = [self._opened(*each) for each in pairs]
            lists = queries.pipeline(
                [self._described(each) for each in self._runs],
                stages=self._count,
                chunks=1,
                order="stream",
                row_bytes=self._row_bytes(),
            )
            self.planned_bytes = sum(
                op["sends"]["bytes"] for op in lists["stages"][self._number]["ops"] if op["sends"]
            )
            carry_out(lists["stages"][self._number], self._run_op, self.neighbours, self._room_for)
        return self._twins.take()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that receive a gradient."""
        return self._twins.trainable

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._view.layers[0].parameters()).dtype

    def _row_bytes(self) -> dict:
        activation = self._view.config.hidden_size * self._dtype.itemsize
        return {"activation": activation, "boundary": 0, "prefix_saved": 0, "microbatch_saved": 0}

    def _opened(self, places: Places, batch: GroupBatch) -> _Run:
        plan = self._stack.enter_context(self._plan_of(batch))
        step = self._stack.enter_context(self._step_of(batch, plan))
        step.probe()
        prefix, *microbatches, end = plan
        return _Run(places, batch, step, prefix, microbatches, end)

    @staticmethod
    def _described(run: _Run) -> dict:
        def costs(rows: int) -> dict:
            return {"rows": rows, "forward_ns": rows, "backward_ns": BACKWARD_OVER_FORWARD * rows}

        rows = len(run.prefix.tokens)
        return {
            "prefix_rows": rows,
            "forward": {"linear_ns": rows},
            "backward": {"linear_ns": BACKWARD_OVER_FORWARD * rows},
            "microbatches": [
                costs(sum(len(member.rows) for member in op.members)) for op in run.microbatches
            ],
        }

    def _room_for(self, op: dict) -> torch.Tensor:
        return self._empty(op["receives"]["rows"])

    def _empty(self, rows: int) -> torch.Tensor:
        shape = (rows, 1, self._view.config.hidden_size)
        return torch.empty(shape, dtype=self._dtype, device=self.device)

    def _receive(self, rows: int) -> None:
        if not self.is_first:
            self._view.hidden.received = self._empty(rows)
            message = Message(self._number - 1, self._view.hidden.received, False)
            self.neighbours.exchange([message])

    def _send(self) -> None:
        if not self.is_last:
            returned = self._view.hidden.returned.contiguous()
            self.neighbours.exchange([Message(self._number + 1, returned, True)])

    def _scored(self, batch: GroupBatch, logits: torch.Tensor, score) -> torch.Tensor:
        rows = logits[score.rows.start : score.rows.stop].clone()
        return self._view.log_probabilities(rows, batch.labels(score.sequence), 1.0)

    def _run_op(self, op: dict, received: torch.Tensor | None) -> torch.Tensor | None:
        run, number = self._runs[op["group"]], op["index"]
        what, _, direction = op["kind"].rpartition("_")
        key = (what, number)
        if direction == "forward":
            if received is not None:
                run.received[key] = self._view.hidden.received = received.requires_grad_()
            if what == "prefix":
                run.step.prefix_forward(run.prefix)
            else:
                self._microbatch_forward(run, number, key)
            return self._returned(run, key)
        roots, seeds = run.returned.pop(key, ([], []))
        if received is not None:
            seeds = [received]
        if what == "prefix":
            run.step.prefix_backward(run.end, roots, seeds)
        else:
            run.step.microbatch_backward(run.microbatches[number], roots, seeds)
        read = run.received.pop(key, None)
        if read is None:
            return None
        # No gradient reaches them if nothing after them is trained.
        return torch.zeros_like(read) if read.grad is None else read.grad.contiguous()

    def _microbatch_forward(self, run: _Run, number: int, key) -> None:
        op = run.microbatches[number]
        output, kept = run.step.microbatch_forward(op)
        if not self.is_last:
            return
        values, seeds = [], []
        for part, score in zip(kept.parts(output, op.scores), op.scores, strict=True):
            labels = run.batch.labels(score.sequence)
            values.append(self._view.log_probabilities(part.logits, labels, 1.0))
            of_response = run.places.of_response
            seeds.append(of_response(self._gradients, run.batch.numbers[score.sequence]))
        seeds = [seed.to(value.dtype) for seed, value in zip(seeds, values, strict=True)]
        run.returned[key] = values, seeds

    def _returned(self, run: _Run, key) -> torch.Tensor | None:
        """Returns what a forward op sends."""
        if self.is_last:
            return None
        returned, self._view.hidden.returned = self._view.hidden.returned, None
        run.returned[key] = [returned], []
        return returned.detach().contiguous()
