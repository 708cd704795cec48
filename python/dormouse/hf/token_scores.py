"""Log-probabilities of a padded or packed batch with a graph: the way into a trainer that has its own loss.

The trainer computes its loss from the values and calls its own ``backward``; the shared step runs
inside one node of that graph. Two modes:

- *kept*: one forward. Graphs of prompts and microbatches live until the backward, and sleep meanwhile
  where they may. They end at the hidden states if the model's head runs apart (:mod:`.head`).
- *twice*: a forward without a graph, and in the backward an ordinary step whose losses have the
  known gradients of the values: one microbatch's graph at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.function import once_differentiable

from ..activations.forwards import Forwards
from ..group import Group
from ..schedule import Plan
from .batch import GroupBatch
from .check import Checked
from .embedding_rows import EmbeddingRows
from .head import Head
from .held_step import Gradients, HeldStep, Values
from .likelihood import Norms, entropies, overwrite_with_gradient, values_of
from .outputs import Losses
from .padded import Places
from .score import COUNTS, score_group
from .sharding import ReplicatedWeights
from .step import Step
from .support import ModelView, UnsupportedModelError
from .twins import Twins

KEPT, TWICE = "kept", "twice"


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
    """Number of groups, of their responses, of tokens and of microbatches of the forward. As many
    groups as responses: no prompt is shared."""
    checked: Checked | None = None
    """The last check of the model."""


@dataclass(frozen=True)
class Passes:
    """What runs the passes of a call."""

    view: ModelView
    weights: ReplicatedWeights
    device: torch.device
    plan_of: Callable[[GroupBatch, Places], Plan]
    """Called before the passes of a group."""
    step_of: Callable[..., Step]
    """``(batch, plan, kind)``: a step of the class ``kind``."""
    temperature: float
    with_entropies: bool
    context: Callable[[], contextlib.AbstractContextManager]
    """Around the passes of the backward; those of the forward run in it already."""

    def values(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[Values, Norms]:
        """Returns what is computed from the logits of a response, without a graph."""
        return values_of(logits, labels, self.temperature, with_entropies=self.with_entropies)

    def differentiable_values(
        self, logits: torch.Tensor, labels: torch.Tensor, needed: Sequence[bool] = (True, True)
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns these values with a graph; None for values that no caller needs."""
        found = (None,)
        if needed[0]:
            found = (self.view.log_probabilities(logits, labels, self.temperature),)
        if not self.with_entropies:
            return found
        return (*found, entropies(logits, self.temperature) if needed[1] else None)

    def overwrite_with_gradient(
        self, logits: torch.Tensor, labels: torch.Tensor, norms: Norms, gradients: Gradients
    ) -> None:
        """Overwrites the logits of a response with their gradient."""
        both = (*gradients, None)[:2]
        overwrite_with_gradient(logits, labels, self.temperature, norms, *both)


class Call:
    """One differentiable call over the groups of a batch. Its backward runs once."""

    def __init__(self, passes: Passes, places: Sequence[Places], shape: tuple[int, ...]):
        """``shape``: of the values."""
        self._passes, self._places, self._shape = passes, places, shape
        self._twins = Twins(passes.view.model)
        self._kind = passes.device.type
        self._autocast = (
            torch.is_autocast_enabled(self._kind),
            torch.get_autocast_dtype(self._kind),
        )
        responses = sum(len(each.rows) for each in places)
        self.counts = {
            "groups": len(places),
            "responses": responses,
            **dict.fromkeys(COUNTS, 0),
        }

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that receive a gradient."""
        return self._twins.trainable

    def versions(self) -> list[int]:
        """Returns numbers that grow when weights change."""
        return [self._passes.weights.updates, *(each._version for each in self.parameters)]

    def forward(self) -> Values:
        """Returns values in the layout of the batch."""
        raise NotImplementedError

    def backward(self, gradients: Gradients) -> None:
        """Runs the passes that the gradients of the values need. Twins collect the result."""
        raise NotImplementedError

    def gradients(self, of_values: Gradients) -> list[torch.Tensor | None]:
        """Returns the gradient of each of :attr:`parameters`."""
        enabled, dtype = self._autocast
        with (
            self._passes.context(),
            torch.enable_grad(),
            torch.autocast(self._kind, dtype=dtype, enabled=enabled),
            self._twins.in_place(),
        ):
            self.backward(of_values)
        return self._twins.take()

    def _empty(self) -> Values:
        dtype = torch.promote_types(_dtype(self._passes.view), torch.float32)
        count = 1 + self._passes.with_entropies
        return tuple(
            torch.zeros(self._shape, dtype=dtype, device=self._passes.device)
            for _ in range(count)
        )

    @staticmethod
    def _put(out: Values, places: Places, number: int, values: Values) -> None:
        for to, value in zip(out, values, strict=True):
            places.of_response(to, number).copy_(value.detach())

    @staticmethod
    def _of(gradients: Gradients, places: Places, number: int) -> Gradients:
        return tuple(
            None if each is None else places.of_response(each, number) for each in gradients
        )

    def _count(self, counts: dict) -> None:
        for name in COUNTS:
            self.counts[name] += counts[name]


class KeptCall(Call):
    """Graphs of all microbatches live until the backward."""

    def __init__(
        self, *arguments, head: Head | None, holds_logits: bool, asleep: Forwards | None
    ):
        """``head``: of the model, if it runs apart. ``holds_logits``: whether logits are kept too;
        without a head they are. ``asleep``: lets what microbatches save sleep; None: it stays
        awake."""
        super().__init__(*arguments)
        self._head, self._holds_logits, self._asleep = head, holds_logits, asleep
        self._rows = EmbeddingRows(self._passes.view)
        self._stack = contextlib.ExitStack()
        self._steps: list[tuple[Places, GroupBatch, HeldStep]] = []

    def forward(self):
        out = self._empty()
        with torch.enable_grad(), self._twins.in_place(), contextlib.ExitStack() as stack:
            for places in self._places:
                batch = GroupBatch(places.group)
                plan = stack.enter_context(self._passes.plan_of(batch, places))
                step = stack.enter_context(self._passes.step_of(batch, plan, HeldStep))

                own = (self._passes, self._head, self._rows, self._asleep)
                for score, values in step.forward(*own, holds_logits=self._holds_logits):
                    self._put(out, places, batch.numbers[score.sequence], values)
                self._count(step.counts)
                self._steps.append((places, batch, step))
            self._stack = stack.pop_all()
        return out

    def backward(self, gradients):
        with self._stack:
            if self._asleep is not None:
                # While the heads run.
                self._asleep.wake_ahead()
            for places, batch, step in self._steps:
                step.backward_of_heads(
                    lambda score, places=places, batch=batch: self._of(
                        gradients, places, batch.numbers[score.sequence]
                    )
                )
            while self._steps:
                *_, step = self._steps.pop()
                step.backward()
            self._rows.backward()
        if self._asleep is not None:
            self._asleep.finish()

    def __del__(self):
        # Without a backward: the prefixes are closed, and what sleeps is dropped.
        self._steps.clear()
        self._stack.close()


class TwiceCall(Call):
    """The forward keeps nothing but the state of the random generators."""

    def forward(self):
        out = self._empty()
        self._random = _RandomState(self._passes)
        for places in self._places:
            scores = score_group(
                self._passes.view,
                self._passes.weights,
                places.group,
                lambda batch, places=places: self._passes.plan_of(batch, places),
                self._passes.device,
                temperature=self._passes.temperature,
                with_entropies=self._passes.with_entropies,
                microbatches=places.microbatches,
            )
            found = [scores.log_probabilities, *filter(None, [scores.entropies])]
            for number, values in enumerate(zip(*found, strict=True)):
                self._put(out, places, number, values)
            self._count(scores.counts)
        return out

    def backward(self, gradients):
        with self._random.again():
            for places in self._places:
                self._step(places, gradients)

    def _step(self, places: Places, gradients: Values) -> None:
        own = [self._of(gradients, places, i) for i in range(len(places.rows))]
        group = places.group
        if not self._random.matters and not places.microbatches:
            # What no loss depends on is not run again.
            weights = [
                float(any(each is not None and bool(each.any()) for each in of_row))
                for of_row in own
            ]
            if not any(weights):
                return
            group = Group(group.prompt, group.responses, weights)

        needed = [any(of_row[kind] is not None for of_row in own) for kind in range(len(own[0]))]

        def loss_fn(logits, labels, i):
            values = self._passes.differentiable_values(logits, labels, needed)
            pairs = zip(values, own[i], strict=True)
            weighed = ((value * grad).sum() for value, grad in pairs if grad is not None)
            return sum(weighed, torch.zeros((), device=logits.device))

        batch = GroupBatch(group, Losses(loss_fn))
        with (
            self._passes.plan_of(batch, places) as plan,
            self._passes.step_of(batch, plan, Step) as step,
        ):
            step.run(microbatches=places.microbatches)


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


def differentiable(call: Call) -> Values:
    """Runs the forward of a call; returns its values with a graph that ends at the parameters."""
    return _Node.apply(call, *call.parameters)


class _Node(torch.autograd.Function):
    """The node of a trainer's graph in which a call runs."""

    @staticmethod
    def forward(ctx, call, *parameters):
        ctx.call = call
        # Entropies that a trainer only logs have no gradient, and cost nothing in the backward.
        ctx.set_materialize_grads(False)
        ctx.versions = call.versions()
        return call.forward()

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        call, ctx.call = ctx.call, None
        if call is None:
            raise RuntimeError(
                "a second backward through the values of one call; accepted: one backward, of the "
                "sum of all losses"
            )
        if ctx.versions != call.versions():
            raise UnsupportedModelError(
                "weights were changed between the call and its backward; accepted: the optimizer's "
                "step after the backward"
            )
        return (None, *call.gradients(gradients))


def _dtype(view: ModelView) -> torch.dtype:
    return next(p.dtype for p in view.model.parameters() if p.is_floating_point())
