"""A part of the model on a pipeline stage, with the groups of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel

from .. import _native as native
from ..hf.batch import GroupBatch
from ..hf.microbatch import dummy_pack, microbatch_output, pack_members
from ..hf.padded import Places
from ..hf.prefix import PrefixForward
from ..hf.sharding import ReplicatedWeights
from ..hf.twins import Twins
from ..schedule import Op, Plan
from .balancing import Balancing
from .stage_step import StageStep
from .view import GPTView

PREFIX = "prefix"
FORWARDS = (native.OpKind.PREFIX_FORWARD, native.OpKind.MICROBATCH)


@dataclass
class _Run:
    """A group between its forward and its backward."""

    places: Places
    batch: GroupBatch
    step: StageStep
    prefixes: list[Op]
    """Of the chunks of the prompt."""
    microbatches: list[Op | None]
    """None: a dummy."""
    ends: list[Op]
    """Backwards of the chunks."""
    received: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    """Hidden states of the part before, by kind and number of the op."""
    returned: dict[tuple[str, int], tuple[list, list]] = field(default_factory=dict)
    """What the op's backward begins with, and its gradients as far as they are known."""
    reports: dict[int, dict] = field(default_factory=dict)
    """The runtime's, of each chunk, after its backward."""

    @property
    def last_node(self) -> int:
        """The node that microbatches read."""
        return self.prefixes[-1].node


class Part:
    """Consecutive layers of the model. A context manager: leaving it frees everything."""

    def __init__(
        self,
        view: GPTView,
        weights: ReplicatedWeights,
        device: torch.device,
        places: list[Places],
        batches: list[GroupBatch],
        balancing: Balancing | None,
        plan_of: Callable[[GroupBatch, Sequence[int]], Plan],
        step_of: Callable[[GroupBatch, Plan], StageStep],
    ):
        """``balancing``: of a call whose routers balance experts. ``plan_of``: returns the plan of
        a group; its second argument has the end of each chunk of the prompt but the last, in
        tokens."""
        self._view, self._weights, self.device = view, weights, device
        self._places, self._batches, self._balancing = places, batches, balancing
        self._plan_of, self._step_of = plan_of, step_of
        self._twins = Twins(view.model, sums_wide=weights.sums_wide)
        self._stack = contextlib.ExitStack()
        self._chunk_ends: list[list[int]] = [[] for _ in batches]
        # Chunks of the prompt that forwards without a graph follow.
        self._path: list[PrefixForward] = []

    def __enter__(self) -> Part:
        self._view.hidden.is_sent = True
        self._stack.enter_context(self._view.own_mixers.routers.of(self._balancing))
        return self

    def __exit__(self, *exc):
        hidden = self._view.hidden
        # Those of a pass that failed are of no later one.
        hidden.received = hidden.returned = None
        hidden.is_sent = False
        return self._stack.__exit__(*exc)

    @property
    def gpt(self) -> GPTModel:
        """The part of the model."""
        return self._view.model

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

    def rows_of(self, op: Op | None) -> int:
        """Returns the rows of a forward that this rank has: by sequence parallelism a part. None: a
        dummy microbatch."""
        if op is None:
            return self.own_rows(1)
        return rows_of_forward(self._view, op)

    def rows_in(self, op: dict) -> int:
        """Returns the rows of an op of a list that this rank has."""
        run, is_prefix = self._runs[op["group"]], op["kind"].startswith(PREFIX)
        return self.rows_of((run.prefixes if is_prefix else run.microbatches)[op["index"]])

    def own_rows(self, rows: int) -> int:
        """Returns this rank's share of ``rows``: with sequence parallelism a part, rounded up."""
        return own_rows(self._view, rows)

    def empty(self, rows: int) -> torch.Tensor:
        """Returns a place for hidden states or their gradient."""
        shape = (rows, 1, self._view.config.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def rows(self) -> list[list[int]]:
        """Returns the rows of each group's forwards, with whole prompts."""
        found = []
        for batch, places in zip(self._batches, self._places, strict=True):
            with self._plan_of(batch, ()) as plan:
                forwards = [op for op in plan if op.kind in FORWARDS]
            found.append(list(map(self.rows_of, _padded(forwards, places))))
        return found

    def cut(self, chunk_ends: Sequence[Sequence[int]]) -> None:
        """Cuts the prompts, before any pass of the call. ``chunk_ends``: of each group the last
        row of each chunk, exclusive, as :meth:`rows_of` counts rows."""
        ways = self._view.own_mixers.sequence_ways
        # The last one is that of the prompt.
        self._chunk_ends = [[end * ways for end in ends[:-1]] for ends in chunk_ends]

    def forwards(self, stack: contextlib.ExitStack) -> list[tuple[int, Op | None]]:
        """Returns the number of the group and the op of every forward, in their order; None: a
        dummy microbatch. ``stack``: ends them."""
        for batch in self._batches:
            batch.to(self.device)
        stack.callback(self._path.clear)
        pairs = zip(self._batches, self._chunk_ends, strict=True)
        plans = [stack.enter_context(self._plan_of(*each)) for each in pairs]
        return [
            (group, op)
            for group, plan in enumerate(plans)
            for op in _padded([op for op in plan if op.kind in FORWARDS], self._places[group])
        ]

    def forward(
        self, group: int, op: Op | None, received: torch.Tensor | None, values: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Runs a forward without a graph; returns what it sends. ``values``: on the last part, the
        place of all log-probabilities."""
        batch = self._batches[group]
        self._begin_pass(group, op)
        self._view.hidden.received = received
        if op is None:
            microbatch_output(self._view, self._path, dummy_pack(batch, 0, self._path[-1].end))
        elif op.kind is native.OpKind.PREFIX_FORWARD:
            if op.reads is None:
                self._path.clear()
            chunk = PrefixForward(self._view, self._weights, self._path)
            chunk.forward(batch.tokens(0, op.tokens), op.tokens.start)
            self._path.append(chunk)
        else:
            pack = pack_members(batch, op.members)
            output = microbatch_output(self._view, self._path, pack).logits
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
            groups = zip(self._places, self._batches, self._chunk_ends, strict=True)
            self._runs = [self._opened(*each) for each in groups]
            yield

    def settle(self) -> None:
        """Called between the forwards and the ops of a list: finds what balances experts, as
        :meth:`.balancing.Balancing.settle`."""
        if self._balancing is not None:
            self._balancing.settle()

    def take(self) -> list[torch.Tensor | None]:
        """Returns the gradient of each of :attr:`parameters`, after the ops."""
        return self._twins.take()

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients so far."""
        return self._twins.gradient_bytes

    @property
    def gradient_bytes_max(self) -> int:
        """Of the gradients of all parameters."""
        return self._twins.gradient_bytes_max

    @property
    def accumulator_ratio(self) -> float:
        """Bytes of a boundary tensor's accumulator over those of the tensor: FP32, or FP64."""
        return max(self.dtype.itemsize, torch.float32.itemsize) / self.dtype.itemsize

    def prefix_report(self, op: dict) -> dict:
        """Returns the runtime's report of the chunk of an op of a list, after its backward."""
        return self._runs[op["group"]].reports[op["index"]]

    def run_op(self, op: dict, received: torch.Tensor | None) -> torch.Tensor | None:
        """Runs an op of a list with what it receives; returns what it sends."""
        run, number = self._runs[op["group"]], op["index"]
        what, _, direction = op["kind"].rpartition("_")
        key = (what, number)
        if direction == "forward":
            if received is not None:
                run.received[key] = self._view.hidden.received = received.requires_grad_()
            forward = (run.prefixes if what == PREFIX else run.microbatches)[number]
            self._begin_pass(op["group"], forward)
            if what == PREFIX:
                run.step.prefix_forward(forward)
            elif forward is None:
                self._dummy_forward(run, key)
            else:
                self._microbatch_forward(run, number, key)
            return self._returned(run, key)
        roots, seeds = run.returned.pop(key, ([], []))
        if received is not None:
            seeds = [received]
        if what == PREFIX:
            run.reports[number] = run.step.prefix_backward(run.ends[number], roots, seeds)
        else:
            run.step.microbatch_backward(run.last_node, roots, seeds)
        read = run.received.pop(key, None)
        if read is None:
            return None
        # No gradient reaches them if nothing after them is trained.
        return torch.zeros_like(read) if read.grad is None else read.grad.contiguous()

    def _begin_pass(self, group: int, op: Op | None) -> None:
        if self._balancing is not None:
            self._balancing.begin_op(group, op)

    def _opened(self, places: Places, batch: GroupBatch, chunk_ends: Sequence[int]) -> _Run:
        plan = self._stack.enter_context(self._plan_of(batch, chunk_ends))
        step = self._stack.enter_context(self._step_of(batch, plan))
        step.probe(is_cut=len(chunk_ends) > 0)
        ops, chunks = list(plan), 1 + len(chunk_ends)
        prefixes, microbatches, ends = ops[:chunks], ops[chunks:-chunks], ops[-chunks:]
        microbatches = _padded(microbatches, places)
        return _Run(places, batch, step, prefixes, microbatches, ends[::-1])

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

    def _dummy_forward(self, run: _Run, key) -> None:
        logits = run.step.dummy_forward(run.last_node)
        if self.is_last:
            run.returned[key] = [logits], [torch.zeros_like(logits)]

    def _returned(self, run: _Run, key) -> torch.Tensor | None:
        """Returns what a forward op sends."""
        if self.is_last:
            return None
        returned, self._view.hidden.returned = self._view.hidden.returned, None
        run.returned[key] = [returned], []
        return returned.detach().contiguous()


def own_rows(view: GPTView, rows: int) -> int:
    """Returns :meth:`Part.own_rows`."""
    return -(-rows // view.own_mixers.sequence_ways)


def rows_of_forward(view: GPTView, op: Op) -> int:
    """Returns the rows of a prefix or a microbatch that a rank has."""
    if op.kind is native.OpKind.PREFIX_FORWARD:
        return own_rows(view, view.own_mixers.rows_of_prompt(len(op.tokens)))
    return own_rows(view, sum(len(member.rows) for member in op.members))


def _padded(forwards: list[Op], places: Places) -> list[Op | None]:
    """Returns the microbatches of a group, or its forwards, with dummies behind them."""
    microbatches = sum(op.kind is native.OpKind.MICROBATCH for op in forwards)
    return [*forwards, *[None] * (places.microbatches - microbatches)]
