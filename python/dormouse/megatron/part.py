"""A part of the model on a pipeline stage, with the groups of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from .. import _native as native
from ..hf.batch import GroupBatch
from ..hf.microbatch import microbatch_output, pack_members
from ..hf.padded import Places
from ..hf.sharding import ReplicatedWeights
from ..hf.twins import Twins
from ..schedule import Op, Plan
from .stage_step import StagePrefix, StageStep
from .view import GPTView

# A backward pass takes about twice as long as a forward pass.
BACKWARD_OVER_FORWARD = 2


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
    """Hidden states of the part before, by kind and number of the op."""
    returned: dict[tuple[str, int], tuple[list, list]] = field(default_factory=dict)
    """What the op's backward begins with, and its gradients as far as they are known."""
    report: dict = field(default_factory=dict)
    """The runtime's, of the prefix, after its backward."""


def rows_of(op: Op) -> int:
    """Returns the rows of a forward."""
    if op.kind is native.OpKind.PREFIX_FORWARD:
        return len(op.tokens)
    return sum(len(member.rows) for member in op.members)


class Part:
    """Consecutive layers of the model. A context manager: leaving it frees everything."""

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
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *exc):
        # Those of a pass that failed are of no later one.
        self._view.hidden.received = self._view.hidden.returned = None
        return self._stack.__exit__(*exc)

    @property
    def is_first(self) -> bool:
        """Whether tokens are embedded here."""
        return self._view.model.pre_process

    @property
    def is_last(self) -> bool:
        """Whether losses are computed here."""
        return self._view.model.post_process

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that receive a gradient."""
        return self._twins.trainable

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return next(self._view.layers[0].parameters()).dtype

    def empty(self, rows: int) -> torch.Tensor:
        """Returns a place for hidden states or their gradient."""
        shape = (rows, 1, self._view.config.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def forwards(self, stack: contextlib.ExitStack) -> list[tuple[int, Op]]:
        """Returns the number of the group and the op of every forward, in their order. ``stack``:
        ends them."""
        for batch in self._batches:
            batch.to(self.device)
        plans = [stack.enter_context(self._plan_of(batch)) for batch in self._batches]
        kinds = (native.OpKind.PREFIX_FORWARD, native.OpKind.MICROBATCH)
        return [(group, op) for group, plan in enumerate(plans) for op in plan if op.kind in kinds]

    def forward(
        self, group: int, op: Op, received: torch.Tensor | None, values: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Runs a forward without a graph; returns what it sends. ``values``: on the last part, the
        place of all log-probabilities."""
        batch = self._batches[group]
        self._view.hidden.received = received
        if op.kind is native.OpKind.PREFIX_FORWARD:
            self._prefix = StagePrefix(self._view, self._weights)
            self._prefix.forward(batch.tokens(0, op.tokens))
        else:
            pack = pack_members(batch, op.members)
            output = microbatch_output(self._view, [self._prefix], pack).logits
            for score in op.scores if self.is_last else ():
                own = self._scored(batch, output, score)
                number = batch.numbers[score.sequence]
                self._places[group].of_response(values, number).copy_(own)
        return None if self.is_last else self._view.hidden.returned.contiguous()

    @contextlib.contextmanager
    def stepping(self, gradients: torch.Tensor | None) -> Iterator[None]:
        """Context of the ops of a list. ``gradients``: of the values, on the last part."""
        self._gradients = gradients
        with self._twins.in_place():
            pairs = zip(self._places, self._batches, strict=True)
            self._runs = [self._opened(*each) for each in pairs]
            yield

    def take(self) -> list[torch.Tensor | None]:
        """Returns the gradient of each of :attr:`parameters`, after the ops."""
        return self._twins.take()

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that :meth:`take` would return."""
        return self._twins.gradient_bytes

    @property
    def accumulator_ratio(self) -> float:
        """Bytes of a boundary tensor's accumulator over those of the tensor: FP32, or FP64."""
        return max(self.dtype.itemsize, torch.float32.itemsize) / self.dtype.itemsize

    def prefix_report(self, op: dict) -> dict:
        """Returns the runtime's report of the prefix of an op of a list, after its backward."""
        return self._runs[op["group"]].report

    def described(self) -> list[dict]:
        """Returns the groups as the planner's query has them."""
        return [_described(run) for run in self._runs]

    def run_op(self, op: dict, received: torch.Tensor | None) -> torch.Tensor | None:
        """Runs an op of a list with what it receives; returns what it sends."""
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
            run.report = run.step.prefix_backward(run.end, roots, seeds)
        else:
            run.step.microbatch_backward(run.microbatches[number], roots, seeds)
        read = run.received.pop(key, None)
        if read is None:
            return None
        # No gradient reaches them if nothing after them is trained.
        return torch.zeros_like(read) if read.grad is None else read.grad.contiguous()

    def _opened(self, places: Places, batch: GroupBatch) -> _Run:
        plan = self._stack.enter_context(self._plan_of(batch))
        step = self._stack.enter_context(self._step_of(batch, plan))
        step.probe()
        prefix, *microbatches, end = plan
        return _Run(places, batch, step, prefix, microbatches, end)

    def _scored(self, batch: GroupBatch, logits: torch.Tensor, score) -> torch.Tensor:
        rows = logits[score.rows.start : score.rows.stop].clone()
        return self._view.log_probabilities(rows, batch.labels(score.sequence), 1.0)

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


def _described(run: _Run) -> dict:
    def costs(rows: int) -> dict:
        return {"rows": rows, "forward_ns": rows, "backward_ns": BACKWARD_OVER_FORWARD * rows}

    rows = rows_of(run.prefix)
    return {
        "prefix_rows": rows,
        "forward": {"linear_ns": rows},
        "backward": {"linear_ns": BACKWARD_OVER_FORWARD * rows},
        "microbatches": [costs(rows_of(op)) for op in run.microbatches],
    }
