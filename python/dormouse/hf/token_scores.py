"""Values of a padded or packed batch with a graph: the way into a trainer that has its own loss.

The trainer computes its loss from the values and calls its own ``backward``; the shared step runs
inside one node of that graph. Two ways, ``graphs``:

- ``"kept"``: one forward. Graphs of prompts and microbatches live until the backward, and sleep
  meanwhile where they may. They end at the hidden states if the model's head runs apart
  (:mod:`.head`).
- ``"twice"``: a forward without a graph, and in the backward an ordinary step whose losses have the
  known gradients of the values: one microbatch's graph at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.autograd.function import once_differentiable

from ..activations.forwards import Forwards
from ..group import PROMPT_TOKENS_MIN
from ..runtime import Runtime
from ..schedule import Plan
from .batch import Batch, GroupBatch
from .check import Checked, undisturbed
from .embedding_rows import EmbeddingRows
from .filter.choice import Chosen
from .filter.graph import FilterReport
from .filter.microbatch import Choose, masked
from .fingerprint import BUFFER_BYTES_MAX
from .head import Head
from .held_step import HeldStep
from .outputs import Losses, Output
from .padded import RowPlaces
from .score import COUNTS, score_batches
from .score_trees import TreePlaces
from .score_values import Asked, Layout, Measure, Tensors, Values, example
from .sharding import ReplicatedWeights
from .step import Step
from .support import ModelView, UnsupportedModelError, logits_of
from .twins import Twins

KEPT, TWICE = "kept", "twice"
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of the layouts of responses and of prompts."""


@dataclass
class TokenScores:
    """Values of the responses of a batch, in its layout, on the model's device."""

    log_probabilities: torch.Tensor
    """``[rows, keep]``, of a packed batch ``[tokens]``; FP64 for FP64 models, else FP32; 0 where
    there is no response. With a graph, unless gradients are disabled or nothing is trainable."""
    entropies: torch.Tensor | None
    """Entropies of the distributions that the tokens were drawn from, in nats, likewise; None if
    not asked for."""
    graphs: str
    """``"kept"`` or ``"twice"``; ``"none"`` without a graph."""
    counts: dict = field(default_factory=dict)
    """Number of groups, of those that are trees, of different prompts, of responses, of tokens and
    of microbatches of the forward. As many groups as responses: nothing is shared."""
    checked: Checked | None = None
    """The last check of the model."""
    filtered: list[FilterReport] = field(default_factory=list)
    """Of each microbatch of a call with a ``token_filter``, in the order of the forward; the mode
    "twice" fills it in the backward, which runs those with a gradient alone."""
    chosen_logits: torch.Tensor | None = None
    """Logits of the tokens themselves, not divided by the temperature, in the layout and dtype of
    :attr:`log_probabilities`; None if not asked for, as the following."""
    last_hidden_state: torch.Tensor | None = None
    """After the last norm, of the rows that predict the tokens: ``[rows, keep, hidden_size]``, of a
    packed batch ``[tokens, hidden_size]``, in the model's dtype; 0 where there is no response."""
    router_logits: tuple[torch.Tensor, ...] | None = None
    """Of each layer with a router, of these rows: ``[rows, keep, experts]``, of a packed batch
    ``[tokens, experts]``."""
    prompt: Output | None = None
    """The same of prompts, its logits None: ``[rows, columns - keep, ...]``, of a packed batch
    ``[tokens, ...]``. Each at the place of the token that its row predicts, so 0 at the first."""

    @classmethod
    def of(
        cls,
        values: Values,
        asked: Asked,
        graphs: str,
        counts: dict,
        checked: Checked | None,
        filtered: list[FilterReport],
    ) -> TokenScores:
        """``values``: in the layout of a batch."""
        log_probabilities, *more = values.of_logits
        both = [more.pop(0) if asked_for else None for asked_for in asked[:2]]
        output = _output(values.of_rows, asked.request.response)
        return cls(
            log_probabilities,
            both[0],
            graphs,
            counts,
            checked,
            filtered,
            both[1],
            output.last_hidden_state,
            output.router_logits,
            _output(values.of_prompt, asked.request.prompt) if asked.request.prompt else None,
        )

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenScores:
        """Returns scores with ``change(tensor)`` in the place of each."""

        def changed(value):
            if isinstance(value, Output):
                return value.mapped(change)
            if isinstance(value, tuple):
                return tuple(map(change, value))
            return None if value is None else change(value)

        return replace(self, **{name: changed(getattr(self, name)) for name in _VALUES})

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Returns all values, in the order in which :meth:`mapped` changes them."""
        found: list[torch.Tensor] = []
        self.mapped(found.append)
        return tuple(found)


_VALUES = (
    "log_probabilities",
    "entropies",
    "chosen_logits",
    "last_hidden_state",
    "router_logits",
    "prompt",
)


def _output(tensors: Tensors, names: Collection[str]) -> Output:
    """Returns an output of these fields."""
    has_hidden = "last_hidden_state" in names
    routers = tuple(tensors[has_hidden:]) if "router_logits" in names else None
    return Output(None, tensors[0] if has_hidden else None, routers)


@dataclass(frozen=True)
class Passes:
    """What runs the passes of a call."""

    weights: ReplicatedWeights
    device: torch.device
    plan_of: Callable[[Batch, RowPlaces], Plan]
    """Called before the passes of a group."""
    step_of: Callable[..., Step]
    """``(batch, plan, kind)``: a step of the class ``kind``."""
    measure: Measure
    chosen: Chosen | None
    """The tokens that have a backward; None: all."""
    context: Callable[[], contextlib.AbstractContextManager]
    """Around the passes of the backward; those of the forward run in it already."""
    check_state: Callable[[], None]
    """Raises :class:`UnsupportedModelError` if the model is not in the state of the forward. Called
    in the context."""

    @property
    def view(self) -> ModelView:
        """The model as the passes run it."""
        return self.measure.view

    def losses(self, loss_fn: Callable | None = None) -> Losses:
        """Returns the losses of a batch."""
        return Losses(loss_fn, request=self.measure.asked.request)


class ScoreCall:
    """One differentiable call over the groups of a batch. Its backward runs once."""

    def __init__(self, passes: Passes, places: Sequence[RowPlaces], shapes: Shapes):
        self._passes, self._places, self._shapes = passes, places, shapes
        self._value_counts = (0, 0)
        self._weights = passes.weights.receivers(list(passes.view.model.parameters()))
        self._twins = Twins(passes.view.model, sums_wide=passes.weights.sums_wide)
        self._kind = passes.device.type
        self._autocast = (
            torch.is_autocast_enabled(self._kind),
            torch.get_autocast_dtype(self._kind),
        )
        self.filtered: list[FilterReport] = []
        """Of the microbatches, where tokens are chosen."""
        responses = sum(len(each.rows) for each in places)
        self.counts = {
            "groups": len(places),
            "prompts": sum(each.prompts for each in places),
            "trees": sum(isinstance(each, TreePlaces) for each in places),
            "responses": responses,
            **dict.fromkeys(COUNTS, 0),
        }

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainer's parameters that receive a gradient."""
        return self._passes.weights.receivers(self._twins.trainable)

    def versions(self) -> list[int]:
        """Returns numbers that grow when weights change, frozen ones too."""
        return [self._passes.weights.updates, *map(_version, self._weights)]

    def forward(self) -> Values:
        """Returns values in the layout of the batch."""
        layout = Layout(*self._shapes, self._passes.device)
        self._forward(layout)
        if layout.values is None:
            layout.begin(example(self._passes.measure, self._passes.device))
        self._value_counts = layout.values.counts()
        return layout.values

    def split(self, tensors: Tensors) -> Values:
        """Returns tensors in the order of the values by kind."""
        return Values.split(tensors, self._value_counts)

    def _forward(self, layout: Layout) -> None:
        """Runs the forwards, and puts values into the layout."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raises :class:`UnsupportedModelError` if the backward would compute otherwise than the
        forward did."""

    def _backward(self, gradients: Values) -> None:
        """Runs the passes that the gradients of the values need. Twins collect the result."""
        raise NotImplementedError

    def gradients(self, of_values: Tensors) -> list[torch.Tensor | None]:
        """Returns the gradient of each of :attr:`parameters`."""
        enabled, dtype = self._autocast
        with (
            self._passes.context(),
            torch.enable_grad(),
            torch.autocast(self._kind, dtype=dtype, enabled=enabled),
        ):
            self._check()
            with self._twins.in_place():
                self._backward(self.split(of_values))
                if self._passes.weights.needs_zeros and not self._twins.gradient_bytes:
                    self._backward_of_zeros()
        return self._passes.weights.handed(self._twins)

    def _backward_of_zeros(self) -> None:
        """Runs a few tokens, so that what a dense run reaches has zeros, and nothing else does."""
        tokens = torch.zeros(PROMPT_TOKENS_MIN, dtype=torch.int64, device=self._passes.device)
        with undisturbed(self._passes.device):
            logits = logits_of(self._passes.view.run_dense(tokens))
            # Not a loss times zero, which is NaN if the logits are not finite.
            if logits.requires_grad:
                logits.backward(torch.zeros_like(logits))

    def _choose(self, places: RowPlaces) -> Choose | None:
        """Returns what chooses the tokens of a group's responses that have a backward."""
        chosen = self._passes.chosen
        if chosen is None:
            return None
        return lambda score, values: chosen.of(places, score.sequence, values)

    def _count(self, counts: dict) -> None:
        for name in COUNTS:
            self.counts[name] += counts[name]


class KeptCall(ScoreCall):
    """Graphs of all microbatches live until the backward."""

    def __init__(
        self,
        *arguments,
        head: Head | None,
        holds_logits: bool,
        asleep: Forwards | None,
        filtered_in: Runtime | None,
    ):
        """``head``: of the model, if it runs apart. ``holds_logits``: whether logits are kept too;
        without a head they are. ``asleep``: lets what microbatches save sleep; None: it stays
        awake. ``filtered_in``: where what filtered ones save sleeps."""
        super().__init__(*arguments)
        self._head, self._holds_logits, self._asleep = head, holds_logits, asleep
        self._filtered_in = filtered_in
        self._rows = EmbeddingRows(self._passes.view, self._twins)
        self._stack = contextlib.ExitStack()
        self._steps: list[tuple[RowPlaces, HeldStep]] = []

    def _forward(self, layout):
        with torch.enable_grad(), self._twins.in_place(), contextlib.ExitStack() as stack:
            for places in self._places:
                batch = places.batch(self._passes.losses())
                plan = stack.enter_context(self._passes.plan_of(batch, places))
                step = stack.enter_context(self._passes.step_of(batch, plan, HeldStep))

                step.choose, step.sleeps_in = self._choose(places), self._filtered_in
                head = self._head if isinstance(batch, GroupBatch) else None
                own = (self._passes.measure, head, self._rows, self._asleep)
                for score, values in step.forward(*own, holds_logits=self._holds_logits):
                    layout.put(places, score.sequence, score.first_label, values)
                self._count(step.counts)
                self.filtered += step.filter_reports
                self._steps.append((places, step))
            self._stack = stack.pop_all()

    def _backward(self, gradients):
        with self._stack:
            if self._asleep is not None:
                # While the heads run.
                self._asleep.wake_ahead()
            for places, step in self._steps:
                step.backward_of_heads(
                    lambda score, places=places: gradients.of_response(
                        places, score.sequence, score.first_label, len(score.rows)
                    )
                )
            while self._steps:
                _, step = self._steps.pop()
                step.backward()
            self._rows.backward()
        if self._asleep is not None:
            self._asleep.finish()

    def __del__(self):
        # Without a backward: the prefixes are closed, and what sleeps is dropped.
        self._steps.clear()
        self._stack.close()


class TwiceCall(ScoreCall):
    """The forward keeps nothing but the state of the random generators, and buffers."""

    def _forward(self, layout):
        self._random = _RandomState(self._passes)
        self._buffers = _Buffers(self._passes.view.read_buffers())
        # Kept tokens of each response, by group and number.
        self._kept: list[dict[int, torch.Tensor]] = []
        for places in self._places:
            kept: dict[int, torch.Tensor] = {}

            def put(number, first, values, places=places, kept=kept):
                layout.put(places, number, first, values)
                if self._passes.chosen is not None:
                    kept[number] = self._passes.chosen.of(places, number, values.of_logits[0])

            self._kept.append(kept)
            counts = score_batches(
                self._passes.view,
                self._passes.weights,
                [places.batch(self._passes.losses())],
                lambda batch, places=places: self._passes.plan_of(batch, places),
                self._passes.device,
                self._passes.measure,
                put,
                microbatches=places.microbatches,
            )
            self._count(counts)
        self._buffers.leave_out_written()

    def _check(self):
        self._passes.check_state()
        self._buffers.check()

    def _backward(self, gradients):
        with self._random.again():
            for places, kept in zip(self._places, self._kept, strict=True):
                self._step(places, kept, gradients)

    def _step(
        self, places: RowPlaces, kept: dict[int, torch.Tensor], gradients: Values
    ) -> None:
        own = [gradients.of_response(places, i) for i in range(len(places.rows))]
        if kept:
            own = [masked(each, kept[i]) for i, each in enumerate(own)]
        weights = None
        if not self._random.matters and not places.microbatches:
            # What no loss depends on is not run again.
            weights = [
                float(any(each is not None and bool(each.any()) for each in of_row.tensors()))
                for of_row in own
            ]
            if not any(weights):
                return

        measure = self._passes.measure
        kinds = zip(*(of_row.of_logits for of_row in own), strict=True)
        needed = [any(each is not None for each in kind) for kind in kinds]

        def loss_fn(given, labels, i, positions=None):
            """Returns the products of values and gradients: of a group's response their sum, of
            labels in a tree that of each row."""
            output = given if isinstance(given, Output) else Output(given)
            of_logits = measure.differentiable_values(output.logits, labels, needed)
            values, grads = Values.of(of_logits, output, output.prompt), own[i]
            if positions is not None:
                grads = gradients.of_response(places, i, positions.start, len(positions))
            pairs = zip(values.tensors(), grads.tensors(), strict=True)
            weighed = [value * grad for value, grad in pairs if grad is not None]
            if positions is None:
                return sum(map(torch.sum, weighed), labels.new_zeros((), dtype=torch.float32))
            rows = [each.reshape(len(labels), -1).sum(1) for each in weighed]
            return sum(rows, labels.new_zeros(len(labels), dtype=torch.float32))

        batch = places.batch(self._passes.losses(loss_fn), weights)
        with (
            self._passes.plan_of(batch, places) as plan,
            self._passes.step_of(batch, plan, Step) as step,
        ):
            if kept:
                step.choose = lambda score, _: kept[batch.numbers[score.sequence]]
            step.run(microbatches=places.microbatches)
            self.filtered += step.filter_reports


class _Buffers:
    """Buffers that a forward reads and does not write."""

    def __init__(self, buffers: Iterable[torch.Tensor]):
        # DistributedDataParallel writes the values that are there before each of its forwards.
        self._read = [
            # Larger ones by whether they were written.
            (each, _version(each), each.clone() if each.nbytes <= BUFFER_BYTES_MAX else None)
            for each in buffers
        ]

    def leave_out_written(self) -> None:
        """Called after the forward."""
        self._read = [held for held in self._read if _version(held[0]) == held[1]]

    def check(self) -> None:
        """Raises :class:`UnsupportedModelError` if values are others now."""
        for buffer, version, copy in self._read:
            if _version(buffer) == version:
                continue
            if copy is None or not torch.equal(buffer, copy):
                raise UnsupportedModelError(
                    f"a buffer of shape {list(buffer.shape)} was changed between the call and its "
                    "backward, which runs the forward again; accepted: a change after the "
                    "backward, or graphs='kept'"
                )


class _RandomState:
    """The state of the random generators that a forward draws from."""

    def __init__(self, passes: Passes):
        self.matters = passes.view.model.training and not passes.view.prompt_dropout
        """Whether responses are dropped by masks that the backward must draw again."""
        device = passes.device
        self._devices = [device] if device.type == "cuda" else []
        self._host = torch.get_rng_state()
        self._states = [torch.cuda.get_rng_state(each) for each in self._devices]

    @contextlib.contextmanager
    def again(self):
        """Context in which the generators draw what they drew."""
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._host)
            for device, state in zip(self._devices, self._states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def _version(tensor: torch.Tensor) -> int:
    """Returns a number that grows when a tensor changes in place."""
    return 0 if tensor.is_inference() else tensor._version


def differentiable(call: ScoreCall) -> Values:
    """Runs the forward of a call; returns its values with a graph that ends at the parameters."""
    return call.split(_Node.apply(call, *call.parameters))


class _Node(torch.autograd.Function):
    """The node of a trainer's graph in which a call runs."""

    @staticmethod
    def forward(ctx, call, *parameters):
        ctx.call = call
        # Entropies that a trainer only logs have no gradient, and cost nothing in the backward.
        ctx.set_materialize_grads(False)
        before = call.versions()
        values = call.forward().tensors()
        # An adapter may write to a weight in every forward (:func:`.adapters.reregistered`).
        pairs = zip(before, call.versions(), strict=True)
        ctx.versions = [version if version == now else None for version, now in pairs]
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        call, ctx.call = ctx.call, None
        if call is None:
            raise RuntimeError(
                "a second backward through the values of one call; accepted: one backward, of the "
                "sum of all losses"
            )
        pairs = zip(ctx.versions, call.versions(), strict=True)
        if any(version not in (None, now) for version, now in pairs):
            raise UnsupportedModelError(
                "weights were changed between the call and its backward; accepted: the optimizer's "
                "step after the backward"
            )
        return (None, *call.gradients(gradients))
