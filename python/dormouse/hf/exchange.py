"""Runs the prefixes that ranks share: the owner's phases A and C, and the transfers around them.

All forwards come first, in the order of the plan; all backwards last, in reverse. Every rank makes
its transfers in that order, so none waits for one that waits for it. Between them ranks run their
own passes without communication.

A rank that fails goes on with the transfers, of zeros, so that the others reach the end of the
step, where the error raises on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import _native as native
from .. import ranks
from ..exchange import Beginnings, ExchangedNode, as_bytes
from ..runtime import Prefix, Runtime
from ..schedule import Plan
from . import graph, support
from .batch import Batch
from .outputs import PLAIN, Request
from .prefix import PlannedForward, PrefixForward, owned_storages
from .probe import Probe
from .sharding import ReplicatedWeights
from .step import LivePrefix
from .step_report import StepReport

# The prefix whose boundary tensors are measured.
_LAYOUT_TOKENS = 2


@dataclass
class ExchangeReport:
    """What one rank exchanged in a step."""

    computed_tokens: int = 0
    """Prefix tokens that this rank computed for itself and others."""
    received_tokens: int = 0
    """Prefix tokens that another rank computed."""
    sent_bytes: int = 0
    """K, V, states, indexers' keys and gradients that this rank sent."""
    prefixes: list[dict] = field(default_factory=list)
    """The runtime's report of each computed prefix, in the order of their backwards."""
    notes: list[str] = field(default_factory=list)
    """One sentence per layer of a computed prefix that stayed awake, with the reason."""


class Layout:
    """Shapes of boundary tensors, which do not depend on the prefix but for its number of
    tokens."""

    def __init__(self, view: support.ModelView, weights: ReplicatedWeights, device: torch.device):
        self.forward = PrefixForward(view, weights)
        with torch.no_grad():
            self.forward.forward(torch.zeros(_LAYOUT_TOKENS, dtype=torch.int64, device=device))

    def boundary(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        """Returns K and V of each layer, uninitialised."""
        return [
            tuple(each.new_empty(*each.shape[:2], tokens, each.shape[3]) for each in pair)
            for pair in self.forward.leaves
        ]

    def indexers(self, tokens: int) -> dict[int, torch.Tensor]:
        """Returns the keys by which layers select others, uninitialised. They have no gradient."""
        return {
            index: each.new_empty(each.shape[0], tokens, *each.shape[2:])
            for index, each in self.forward.indexers.items()
        }


class ReceivedForward(PrefixForward):
    """A prefix that another rank computes. What is received of it has no graph."""

    def __init__(self, layout: Layout, rows: range):
        like = layout.forward
        super().__init__(like.view, like.weights)
        self.accepts_gradients = False
        self.mixers, self.layer_of = like.mixers, like.layer_of
        self.end = rows.stop
        self.leaves = layout.boundary(len(rows))
        self.live = self.leaves
        self.states = like.states.empty_like()
        self.indexers = layout.indexers(len(rows))
        self._gradients = [
            tuple(torch.zeros_like(each, dtype=_wide(each)) for each in pair)
            for pair in self.leaves
        ]

    @property
    def protected_below(self) -> set[int]:
        leaves = [*_flat(self.leaves), *self.states.leaves()]
        return owned_storages(self.view).union(map(graph.storage_address, leaves))

    def accumulate(self, layer, slot, grad):
        self.check_accepts()
        self._gradients[layer][slot].add_(grad)

    def boundary(self) -> list[torch.Tensor]:
        """Returns what is received, in order."""
        states = (leaf.data for leaf in self.states.leaves())
        return [*_flat(self.leaves), *states, *self.indexers.values()]

    def gradients(self) -> list[torch.Tensor]:
        """Returns what is sent back, in the same order: none of the last, the indexers' keys."""
        return [*_flat(self._gradients), *self.states.gradients()]


class Received:
    """A received prefix; its transfers run while nothing reads it."""

    def __init__(self, forward: ReceivedForward, works: list):
        self._forward, self._works = forward, works

    @property
    def forward(self) -> ReceivedForward:
        for work in self._works:
            work.wait()
        self._works = []
        return self._forward


class Batches(NamedTuple):
    """What a rank runs."""

    batches: Sequence[Batch]
    find_probes: Sequence[Callable[[bool, Request], Probe | None]]
    """Of each batch, see :class:`.step.Step`."""
    model: native.ModelShape
    microbatch_tokens: int


RunBatch = Callable[[int, Plan, dict[int, "LivePrefix | Received"]], StepReport]
"""Runs a batch by its number, with its plan and the exchanged prefixes by node of the plan."""


class Exchange:
    """The exchanged prefixes of one step on one rank. A context manager: leaving it frees them."""

    def __init__(
        self,
        view: support.ModelView,
        weights: ReplicatedWeights,
        runtime: Runtime,
        nodes: Sequence[ExchangedNode],
        batches: Batches,
        process_group,
        plans: contextlib.ExitStack,
    ):
        """``nodes``: those of all ranks. ``batches``: of this one. ``plans`` owns their plans."""
        self._view, self._weights, self._runtime = view, weights, runtime
        self._group, self._rank = process_group, ranks.rank(process_group)
        self._nodes = [(at, node) for at, node in enumerate(nodes) if self._rank in node.ranks]
        self._all = nodes
        self._batches = batches
        beginnings = Beginnings(self._nodes)
        self._plans: list[Plan] = []
        # By batch: places of exchanged nodes, by node of its plan.
        self._places: list[dict[int, int]] = []
        for batch in batches.batches:
            own = {at: nodes[at] for stem in batch.stems() for at in beginnings.of(stem.tokens)}
            cuts = [node.tokens for node in own.values()]
            plan = batch.plan(batches.model, batches.microbatch_tokens, cuts)
            self._plans.append(plans.enter_context(plan))
            self._places.append(places(plan, batch, own))
        self._layout = Layout(view, weights, runtime.device) if self._nodes else None
        self._live: dict[int, LivePrefix | Received] = {}
        # By place of the prefix. Tensors in flight are kept until they have arrived.
        self._sends: dict[int, list[tuple[object, torch.Tensor]]] = {}
        self.error: Exception | None = None
        """What failed on this rank."""
        self.report = ExchangeReport()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exc):
        stack = contextlib.ExitStack()
        for prefix in self._live.values():
            if isinstance(prefix, LivePrefix):
                stack.push(prefix.handle)
                # A graph, asleep or not, is freed before its prefix is closed.
                stack.callback(prefix.release)
        self._live.clear()
        return stack.__exit__(*exc)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Context of passes: an error in them is kept for the end of the step."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def run(self, run_batch: RunBatch) -> dict[int, StepReport]:
        """Runs all phases; returns the report of each batch that ran. An error of this rank is in
        :attr:`error`; one of a transfer is raised."""
        reports = {}
        try:
            self._run_forwards()
            # Those that wait for no other rank first.
            for index in sorted(range(len(self._plans)), key=self._waits):
                if self.error is None:
                    live = {node: self._live[at] for node, at in self._places[index].items()}
                    with self.working():
                        reports[index] = run_batch(index, self._plans[index], live)
            self._run_backwards()
        except Exception as error:
            # The rank's own error says more.
            raise self.error or error from error
        return reports

    def _waits(self, index: int) -> bool:
        """Returns whether a batch reads what other ranks compute."""
        return any(self._all[at].owner != self._rank for at in self._places[index].values())

    def _run_forwards(self) -> None:
        """Runs phase A of owned prefixes, and begins to send and receive."""
        for at, node in self._nodes:
            if node.owner != self._rank:
                forward = ReceivedForward(self._layout, node.rows)
                works = [self._receive(each, node.owner) for each in forward.boundary()]
                self._live[at] = Received(forward, works)
                self.report.received_tokens += len(node.rows)
                continue
            if self.error is None:
                with self.working():
                    self._forward(at, node)
            self._send_boundary(at, node)

    def _run_backwards(self) -> None:
        """Returns gradients to owners, and runs phase C of owned prefixes."""
        for at, node in reversed(self._nodes):
            if node.owner != self._rank:
                # Also waits for what was received.
                for gradient in self._live[at].forward.gradients():
                    self._send(at, gradient, node.owner)
                continue
            for rank in node.ranks:
                if rank != self._rank:
                    self._receive_gradients(at, node, rank)
            # Who sent gradients had received K and V.
            self._finish_sends(at)
            if self.error is None:
                with self.working():
                    self.report.prefixes.append(self._live[at].backward(self._weights))
                    del self._live[at]
        for at in list(self._sends):
            self._finish_sends(at)

    def _path(self, node: ExchangedNode) -> list[LivePrefix | Received]:
        path, at = [], node.parent
        while at is not None:
            path.append(self._live[at])
            at = self._all[at].parent
        return path[::-1]

    def _forward(self, at: int, node: ExchangedNode) -> None:
        path = [prefix.forward for prefix in self._path(node)]
        index = next(i for i, own in enumerate(self._places) if at in own.values())
        number = next(number for number, place in self._places[index].items() if place == at)
        handle = Prefix(self._runtime, self._plans[index], len(self._view.layers), number)
        try:
            handle.enter(native.Phase.A)
            probe = self._batches.find_probes[index](bool(path), PLAIN)
            forward = PlannedForward(self._view, self._weights, handle, probe, path)
        except BaseException:
            handle.close()
            raise
        self._live[at] = LivePrefix(handle, forward)
        tokens = node.tokens[node.rows.start : node.rows.stop].to(self._runtime.device)
        forward.forward(tokens, node.rows.start)
        self.report.computed_tokens += len(node.rows)
        self.report.notes += forward.notes
        handle.enter(native.Phase.B)

    def _send_boundary(self, at: int, node: ExchangedNode) -> None:
        tensors = self._zeros(node) if self.error else self._live[at].forward.boundary()
        for tensor in tensors:
            own = tensor.detach().contiguous()
            for rank in node.ranks:
                if rank != self._rank:
                    self._send(at, own, rank)

    def _zeros(self, node: ExchangedNode) -> list[torch.Tensor]:
        forward = ReceivedForward(self._layout, node.rows)
        return [torch.zeros_like(each) for each in forward.boundary()]

    def _receive_gradients(self, at: int, node: ExchangedNode, rank: int) -> None:
        """Adds the gradients of another rank: one tensor of it exists at a time."""
        for layer, pair in enumerate(self._layout.boundary(len(node.rows))):
            for slot, like in enumerate(pair):
                gradient = torch.empty_like(like, dtype=_wide(like))
                self._receive(gradient, rank).wait()
                if self.error is None:
                    forward = self._live[at].forward
                    forward.accepts_gradients = True
                    with self.working():
                        forward.accumulate(layer, slot, gradient)
                    forward.accepts_gradients = False
        for place, like in enumerate(self._layout.forward.states.leaves()):
            gradient = torch.empty_like(like, requires_grad=False)
            self._receive(gradient, rank).wait()
            if self.error is None:
                self._live[at].forward.states.add_gradient(place, gradient)

    def _send(self, at: int, tensor: torch.Tensor, rank: int) -> None:
        work = dist.isend(tensor, self._peer(rank), group=self._group)
        self._sends.setdefault(at, []).append((work, tensor))
        self.report.sent_bytes += tensor.nbytes

    def _finish_sends(self, at: int) -> None:
        for work, _ in self._sends.pop(at, []):
            work.wait()

    def _receive(self, tensor: torch.Tensor, rank: int):
        # NCCL writes rows in a contiguous order, whatever the strides.
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of strides {tensor.stride()} to receive; accepted: a contiguous one"
            )
        return dist.irecv(tensor, self._peer(rank), group=self._group)

    def _peer(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def places(plan: Plan, batch: Batch, nodes: Mapping[int, ExchangedNode]) -> dict[int, int]:
    """Returns which nodes of a plan are exchanged, as places. ``nodes``: by place, those that the
    batch begins with."""
    known = {(node.rows, as_bytes(node.tokens)): at for at, node in nodes.items()}
    rows = {node.rows for node in nodes.values()}
    found = {}
    for number, node in enumerate(plan.nodes()):
        if node.rows in rows:
            tokens = batch.beginning(node.sequence, node.rows.stop + 1)
            at = known.get((node.rows, as_bytes(tokens)))
            if at is not None:
                found[number] = at
    return found


def _flat(pairs) -> list[torch.Tensor]:
    return [each for pair in pairs for each in pair]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
