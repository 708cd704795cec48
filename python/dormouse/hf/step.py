"""One shared-prefix step over a plan: phases A, B and C of each prefix (docs/method.md §1 and §8).

A group's prompt is one prefix; each inner node of a tree is one. The plan defines the order of ops,
the runtime's prefix what may sleep and when. This module runs the model and reports the begin and
end of layers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from .. import _native as native
from ..asleep import warn_if_awake
from ..runtime import Prefix
from ..schedule import Op, Plan, Score
from . import graph, support
from .accumulation import Accumulation, accumulating, modules_of
from .batch import Batch
from .filter.graph import FilterReport
from .filter.microbatch import Choose, Dropped, FilteredLoss
from .filter.model import marked_layers
from .microbatch import Pack, dummy_pack, microbatch_output, pack_members
from .outputs import PLAIN, Output, Request
from .prefix import PlannedForward, PrefixForward
from .probe import Probe
from .prompt_rows import PromptRows
from .sharding import ReplicatedWeights
from .step_report import StepReport


@dataclass
class LivePrefix:
    """A prefix between its forward and its backward."""

    handle: Prefix
    forward: PlannedForward
    again: PrefixForward | None = None
    """Its second forward, if the first kept no graph."""

    @property
    def graph(self) -> PrefixForward:
        """The forward that kept its graph."""
        return self.again or self.forward

    def release(self) -> None:
        """Frees the graph."""
        self.forward = self.again = None

    def backward(self, weights: ReplicatedWeights, *, is_last: bool = False) -> dict:
        """Runs phase C; returns the runtime's report of the prefix and closes it. ``is_last``: see
        :meth:`Step.run`."""
        self.handle.enter(native.Phase.C)
        run_backward(self, weights, is_last)
        report = self.handle.report()
        if self.forward.is_to_sleep:
            warn_if_awake(report, self.handle.runtime)
        self.release()
        self.handle.close()
        return report


class ExchangedPrefix(Protocol):
    """A prefix of an exchange: it is live before the step and after it."""

    @property
    def forward(self) -> PrefixForward:
        """Its K, V and states, complete."""


class Step:
    """One A/B/C step over one batch. A context manager: leaving it frees everything."""

    forward_kind: type[PlannedForward] = PlannedForward

    def __init__(
        self,
        view: support.ModelView,
        weights: ReplicatedWeights,
        batch: Batch,
        plan: Plan,
        device: torch.device,
        open_prefix: Callable[[int], Prefix],
        find_probe: Callable[[bool, Request], Probe | None],
        exchanged: Mapping[int, ExchangedPrefix] | None = None,
    ):
        """``open_prefix``: creates the runtime's prefix of a node. ``find_probe``: returns the
        probe of a prefix that follows another (``is_inner``) and of which losses read
        ``request``. ``exchanged``: prefixes that an exchange runs, by node."""
        self._view = view
        self._weights = weights
        self._batch = batch
        self._plan = plan
        self._nodes = plan.nodes()
        self._scores = scores_of_prefixes(plan)
        self._open_prefix = open_prefix
        self._find_probe = find_probe
        self._selects_logits = view.selects_logits
        self._exchanged = exchanged or {}
        self._live: dict[int, LivePrefix | ExchangedPrefix] = {}
        self._on_phase = None
        self._phase = ""
        # Summed on the device, and read once after the last phase.
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._report = StepReport(0.0, exchanged_prefixes=len(self._exchanged))
        self.choose: Choose | None = None
        """Chooses the kept tokens of a group's responses; None: all are kept."""
        self.filter_reports: list[FilterReport] = []
        """Of the microbatches, where tokens are chosen."""
        self._accumulation = Accumulation(device)
        modules = modules_of(view.model) if weights.accumulate_in_place else []
        self._adding = accumulating(modules, self._accumulation)
        # The graph of a prefix has what the probed one has, but for where tokens are embedded.
        embeddings = [each for each in modules if each is view.embedding]
        self._adding_embedded = accumulating(embeddings, self._accumulation)
        self.has_gradient = False
        """Whether any loss depends on something trainable."""
        batch.to(device)

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *exc):
        stack = contextlib.ExitStack()
        for node, prefix in self._live.items():
            if node in self._exchanged:
                continue
            stack.push(prefix.handle)
            # A graph, asleep or not, is freed before its prefix is closed.
            stack.callback(prefix.release)
        self._live.clear()
        return stack.__exit__(*exc)

    def run(
        self,
        *,
        microbatches: int = 0,
        is_last: bool = False,
        on_phase: Callable[[str], None] | None = None,
    ) -> StepReport:
        """Runs the plan's ops in order, and dummy microbatches up to ``microbatches`` before the
        backward of a root.

        ``is_last``: its last backward is the last one of the step.
        """
        self._on_phase = on_phase
        for op in self._plan:
            if op.kind is native.OpKind.PREFIX_FORWARD:
                self._prefix_forward(op)
            elif op.kind is native.OpKind.FORWARD_AGAIN:
                self._forward_again(op)
            elif op.kind is native.OpKind.MICROBATCH:
                is_end = self._ends_with_microbatch(op.reads, microbatches, is_last)
                self._microbatch(op, is_end)
            elif op.kind is native.OpKind.PREFIX_BACKWARD:
                while op.reads is None and self._microbatches_run < microbatches:
                    is_end = self._ends_with_microbatch(op.node, microbatches, is_last)
                    self._dummy_microbatch(op.node, is_end)
                self._prefix_backward(op.node, is_last and op.reads is None)
        self._enter("end")
        self._report.loss = float(self._loss)
        return self._report

    def _enter(self, phase: str) -> None:
        if self._on_phase is not None and phase != self._phase:
            self._on_phase(phase)
        self._phase = phase

    def _path(self, node: int | None) -> list[LivePrefix | ExchangedPrefix]:
        """Returns the prefixes that a reader of ``node`` follows, the root first."""
        path = []
        while node is not None:
            path.append(self._live[node])
            node = self._nodes[node].parent
        return path[::-1]

    @contextlib.contextmanager
    def _accepting(self, node: int | None) -> Iterator[None]:
        """Context of the step's own backward of a reader of ``node``."""
        with (
            accepting([each.forward for each in self._path(node)]),
            self._accumulation.opened(),
        ):
            yield

    def _accumulating(self) -> contextlib.AbstractContextManager:
        """Context of the forward of a microbatch. Rules that drop rows know torch's own operations
        alone."""
        is_filtered = self.choose is not None
        return contextlib.nullcontext() if is_filtered else self._adding.in_place()

    def _prefix_forward(self, op: Op) -> None:
        if op.node in self._exchanged:
            self._live[op.node] = self._exchanged[op.node]
            return
        request = PLAIN if op.without_graph else self._request_of(op.node)
        path = self._path(op.reads)
        handle = self._open_prefix(op.node)
        try:
            handle.enter(native.Phase.A)
            self._enter("A")
            probe = None
            if op.residency == "sleep":
                probe = self._find_probe(bool(path), request)
            forward = self.forward_kind(
                self._view, self._weights, handle, probe, [each.forward for each in path]
            )
        except BaseException:
            handle.close()
            raise
        prefix = LivePrefix(handle, forward)
        self._live[op.node] = prefix
        with torch.set_grad_enabled(not op.without_graph):
            self._run_prefix(op.node, forward, request)
        self._report.notes += forward.notes
        self._report.counts["prefix_tokens"] += len(op.tokens)
        handle.enter(native.Phase.B)
        self._enter("B")

    def _forward_again(self, op: Op) -> None:
        prefix = self._live[op.node]
        prefix.again = PrefixForward(self._view, self._weights, prefix.forward.path)
        self._run_prefix(op.node, prefix.again, self._request_of(op.node))
        prefix.again.states.take_gradients(prefix.forward.states)
        self._report.counts["recomputed_tokens"] += len(op.tokens)

    def _request_of(self, node: int) -> Request:
        """Returns what losses read of a prefix and of what follows it."""
        request = self._batch.request
        return request.of_labels if node in self._scores else request

    def _run_prefix(self, node: int, forward: PrefixForward, request: Request) -> None:
        """Runs a prefix forward. Its losses run backward at once, down to the output embedding's
        input: logits are the largest tensor of a step."""
        at = self._nodes[node]
        tokens = self._batch.tokens(at.sequence, at.rows)
        scores = self._scores.get(node, ()) if request.has_prompt_loss else ()
        kept = self._kept(scores, tokens)

        def read(rows: PromptRows) -> None:
            if scores:
                self._read_labels(node, rows, scores, kept)
            elif request.has_prompt_loss:
                _run_losses(rows, self._prompt_loss(node, rows))

        with self._adding_embedded.in_place():
            forward.forward(
                tokens,
                at.rows.start,
                request,
                read,
                logits_rows=kept.index,
                experts=self._batch.experts(at.sequence, at.rows),
            )

    def _read_labels(
        self, node: int, rows: PromptRows, scores: Sequence[Score], kept: KeptRows
    ) -> None:
        """Runs the losses of a prefix's own labels."""
        output = replace(rows.output(), logits=rows.take_logits())
        _run_losses(rows, self._losses(output, scores, kept))

    def _prompt_loss(self, node: int, rows: PromptRows) -> torch.Tensor:
        """Returns the loss of a group's prompt."""
        at = self._nodes[node]
        # Row r predicts token r + 1. A copy: losses mask labels in place, and responses begin with
        # the last one.
        labels = self._batch.tokens(at.sequence, range(at.rows.start + 1, at.rows.stop + 1)).clone()
        prompt = rows.output()
        versions = _versions(prompt)
        given = self._batch.request.given(replace(prompt, logits=_changeable(rows.take_logits())))
        loss = self._batch.prompt_loss(given, labels)
        _check_versions(prompt, versions, "prompt_loss_fn changed its output")
        self._loss += loss.detach()
        self.has_gradient |= loss.requires_grad
        return loss

    @property
    def _microbatches_run(self) -> int:
        counts = self._report.counts
        return counts["microbatches"] + counts["dummy_microbatches"]

    def _ends_with_microbatch(self, node: int | None, microbatches: int, is_last: bool) -> bool:
        """Returns whether the next microbatch's backward is the last one: phase C has none if no K
        or V needs a gradient."""
        if not is_last or node is None or self._microbatches_run != microbatches - 1:
            return False
        return not self._live[node].forward.needs_backward

    def _microbatch(self, op: Op, is_last: bool) -> None:
        if not self._batch.has_loss:
            self._dummy_microbatch(op.reads, is_last)
            return
        self._enter("B")
        request = self._batch.request
        dropped = self._dropped(op)
        with self._marking(dropped):
            output, kept = self._packed_output(op)
        if is_last:
            self._weights.reduce_in_next_backward()
        total = self._losses(output, op.scores, kept, self._prompt_of(op.reads))
        with self._accepting(op.reads):
            if not total.requires_grad:
                # Every loss is constant. The backward still runs: it may hold collectives.
                _backward_of_zeros(output.logits)
            elif dropped is not None:
                graph = FilteredLoss(total, output, dropped)
                del output
                self.filter_reports.append(graph.backward())
            elif self._weights.passes_hold_collectives and request.has_outputs:
                # A loss that reads no logits must reduce the gradients that other ranks reduce.
                zeros = torch.zeros_like(output.logits)
                torch.autograd.backward((total, output.logits), (torch.ones_like(total), zeros))
            else:
                del output
                total.backward()

    def _dropped(self, op: Op) -> Dropped | None:
        """Returns the tokens of a microbatch whose losses count and which have no backward."""
        if self.choose is None:
            return None
        dropped = Dropped(op.scores, [self.choose(score, None) for score in op.scores])
        if not dropped.is_all_kept:
            return dropped
        self.filter_reports.append(dropped.report)
        return None

    def _marking(self, dropped: Dropped | None) -> contextlib.AbstractContextManager:
        """Context of the forward of a microbatch some of whose rows will have no backward."""
        if dropped is None:
            return contextlib.nullcontext()
        return marked_layers(self._view.layers)

    def _packed_output(self, op: Op) -> tuple[Output, KeptRows]:
        """Runs the forward of a microbatch."""
        pack = pack_members(self._batch, op.members)
        kept = self._kept(op.scores, pack.tokens)
        output = self._output(op.reads, pack, self._batch.request, kept.index)
        self._report.counts["microbatch_tokens"] += len(pack.tokens)
        self._report.counts["microbatches"] += 1
        return output, kept

    def _dummy_microbatch(self, node: int, is_last: bool) -> None:
        """Runs one token after the prefix, so that passes match those of other ranks."""
        self._enter("B")
        logits = self._dummy_logits(node)
        if is_last:
            self._weights.reduce_in_next_backward()
        with self._accepting(node):
            # Not a loss times zero, which is NaN if the loss is not finite.
            _backward_of_zeros(logits)
        self._report.counts["dummy_microbatches"] += 1

    def _dummy_logits(self, node: int) -> torch.Tensor:
        """Runs the forward of a dummy microbatch that follows ``node``."""
        at = self._nodes[node]
        return self._output(node, dummy_pack(self._batch, at.sequence, at.rows.stop)).logits

    def _output(self, node: int | None, pack: Pack, *read) -> Output:
        path = [each.forward for each in self._path(node)]
        return microbatch_output(self._view, path, pack, *read, around=self._accumulating)

    def _prompt_of(self, node: int | None) -> Output | None:
        """Returns the rows of the prompt that losses of responses read."""
        return self._live[node].forward.rows.output() if self._batch.request.prompt else None

    def _kept(self, scores: Sequence[Score], tokens: torch.Tensor) -> KeptRows:
        return KeptRows(scores, tokens, selects=self._selects_logits)

    def _losses(
        self,
        output: Output,
        scores: Sequence[Score],
        kept: KeptRows,
        prompt: Output | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of the losses of an op's rows. ``prompt``: what they read of
        the prompt."""
        total = torch.zeros((), dtype=torch.float32, device=output.logits.device)
        versions = _versions(prompt)
        for score, own in zip(scores, kept.parts(output, scores), strict=True):
            positions = range(score.first_label, score.first_label + len(score.rows))
            given = self._batch.request.given(replace(own, prompt=prompt))
            total = total + score.weight * self._batch.loss(score.sequence, given, positions)
            _check_versions(prompt, versions, "loss_fn changed output.prompt")
        self._loss += total.detach()
        self.has_gradient |= total.requires_grad
        return total

    def _prefix_backward(self, node: int, is_last: bool) -> None:
        prefix = self._live[node]
        if node not in self._exchanged:
            self._enter("C")
            with self._accumulation.opened():
                self._report.prefixes.append(prefix.backward(self._weights, is_last=is_last))
        del self._live[node]


@contextlib.contextmanager
def accepting(path: Sequence[PrefixForward]) -> Iterator[None]:
    """Context of a backward of the step's own that adds to the gradients of ``path``."""
    for forward in path:
        forward.accepts_gradients = True
    try:
        yield
    finally:
        for forward in path:
            forward.accepts_gradients = False


def run_backward(prefix: LivePrefix, weights: ReplicatedWeights, is_last: bool) -> None:
    """Runs a prefix's graph backward, seeded with the gradients of its boundary tensors."""
    forward = prefix.graph
    path = forward.path
    last = len(forward.live) - 1
    roots, seeds = [], []
    for layer, pair in enumerate(forward.live):
        for slot, live in enumerate(pair):
            if live.requires_grad:
                roots.append(live)
                seeds.append(prefix.forward.gradient(layer, slot, live))
    for live, seed in forward.rows.seeds() if forward.rows is not None else ():
        roots.append(live)
        seeds.append(seed)
    marks = _BackwardMarks(prefix.handle)
    for layer, hidden in forward.outputs.items():
        hidden.grad_fn.register_prehook(marks.hook(layer))
    # After the last layer that makes K and V of its own, outputs get no gradient: such a layer
    # begins with its K and V. Reversed: later layers may hold the same tensors.
    owners = {x.grad_fn: layer for layer, x in reversed(_numbered(forward.live)) if x.grad_fn}
    for layer, live, seed in forward.states.seeds():
        roots.append(live)
        seeds.append(seed)
        owners.setdefault(live.grad_fn, layer)
    for owner, layer in owners.items():
        owner.register_prehook(marks.hook(layer))
    # From here the graph alone owns what A saved: each layer is freed as it is consumed.
    forward.clear()
    marks.begin(last)
    if roots:
        if is_last:
            weights.reduce_in_next_backward()
        with accepting(path):
            torch.autograd.backward(roots, seeds)
    marks.end()


def _run_losses(rows: PromptRows, total: torch.Tensor) -> None:
    """Runs the backward of a prefix's own losses."""
    with rows.scoring():
        if total.requires_grad:
            total.backward()


def scores_of_prefixes(plan: Plan) -> dict[int, list[Score]]:
    """Returns the labels of each prefix that carries loss, by node."""
    ops = json.loads(plan.to_json())["ops"]
    found = {}
    for op in ops:
        if op["kind"] == "prefix_backward" and op.get("scores"):
            found[op["node"]] = [
                Score(
                    it["sequence"],
                    range(it["rows"]["begin"], it["rows"]["end"]),
                    it["first_label"],
                    it["weight"],
                )
                for it in op["scores"]
            ]
    return found


class KeptRows:
    """The rows of an op whose logits are computed: those with labels, if the model can select."""

    def __init__(self, scores: Sequence[Score], tokens: torch.Tensor, *, selects: bool):
        """``tokens``: of the op's rows. ``selects``: whether the model can select."""
        self.index: torch.Tensor | None = None
        """The rows, where ``tokens`` are; None for all."""
        scored = sorted({row for score in scores for row in score.rows}) if selects else []
        if 0 < len(scored) < len(tokens):
            self._places = {row: place for place, row in enumerate(scored)}
            # The copy does not wait for the device.
            index = torch.tensor(scored, device="cpu")
            self.index = index.to(tokens.device, non_blocking=True)

    def check(self, logits: torch.Tensor) -> None:
        """Raises :class:`UnsupportedModelError` if the model computed other rows."""
        if self.index is not None and len(self.index) != len(logits):
            raise support.UnsupportedModelError(
                f"the model returns logits of {len(logits)} rows, and {len(self.index)} were "
                f"selected by {support.LOGITS_ROWS}; accepted: as many"
            )

    def of(self, output: Output) -> Output:
        """Returns an output of the kept rows, of whose fields the logits alone were selected."""
        if self.index is None:
            return output
        kept = output.without_logits().mapped(lambda x: x[self.index])
        return replace(kept, logits=output.logits)

    def parts(self, output: Output, scores: Sequence[Score]) -> Sequence[Output]:
        """Returns the rows of each score in what the model computed. A loss may change its own
        logits in place."""
        self.check(output.logits)
        output = self.of(replace(output, logits=_changeable(output.logits)))
        return _split(output, [self.place(score.rows) for score in scores])

    def place(self, rows: range) -> range:
        """Returns where consecutive rows with labels are among those that are kept."""
        if self.index is None:
            return rows
        start = self._places[rows.start]
        return range(start, start + len(rows))


def _backward_of_zeros(logits: torch.Tensor) -> None:
    # Those of a frozen model have no graph.
    if logits.requires_grad:
        logits.backward(torch.zeros_like(logits))


def _split(output: Output, rows: Sequence[range]) -> Sequence[Output]:
    """Returns the given rows of the output. A loss may change its own logits in place."""
    edges = [0, *(each.stop for each in rows)]
    if edges[-1] == len(output.logits) and all(
        each.start == edge for each, edge in zip(rows, edges, strict=False)
    ):
        return output.split([len(each) for each in rows])
    # Rows that several sequences score: each gets its own.
    return [output.rows(each.start, each.stop).mapped(torch.clone) for each in rows]


def _changeable(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits that a loss may change in place: not those that the model's backward reads."""
    return logits if graph.is_overwritable(logits) else logits.clone()


def _versions(prompt: Output | None) -> list[int]:
    """Returns how often each tensor was changed in place."""
    return [] if prompt is None else [tensor._version for _, tensor in prompt.tensors()]


def _check_versions(prompt: Output | None, versions: list[int], what: str) -> None:
    if _versions(prompt) != versions:
        raise RuntimeError(
            f"{what} in place, and other losses read it; accepted: operations out of place, except "
            "of logits"
        )


class _BackwardMarks:
    """Marks layers as backward reaches them; layers without a graph are never reached."""

    def __init__(self, prefix: Prefix):
        self._prefix = prefix
        self._open: int | None = None

    def begin(self, layer: int) -> None:
        if self._open == layer:
            return
        self.end()
        self._prefix.mark(native.Edge.BACKWARD_BEGIN, layer)
        self._open = layer

    def end(self) -> None:
        if self._open is not None:
            self._prefix.mark(native.Edge.BACKWARD_END, self._open)
            self._open = None

    def hook(self, layer: int):
        """Returns a prehook for the graph node of the layer's output: its gradient is complete."""
        return lambda grads: self.begin(layer)


def _numbered(live) -> list[tuple[int, torch.Tensor]]:
    return [(layer, tensor) for layer, pair in enumerate(live) for tensor in pair]
