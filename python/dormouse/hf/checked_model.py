"""A model whose steps are checked: what is known of it, and the steps that it runs."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from .. import _native as native
from ..errors import ArgumentError
from ..group import records_of
from ..runtime import Prefix, Runtime
from ..schedule import Plan
from . import (
    adapters,
    check,
    compiled_layers,
    dropout,
    media,
    miniature,
    mixers,
    one_thread,
    routing,
    share,
    sharding,
    support,
)
from .batch import DEFAULT_MICROBATCH_TOKENS, Batch, Sample, batch_of, has_tree, recorded_experts
from .check import Checked
from .fingerprint import Fingerprint
from .known import Known, KnownModels
from .miniature import Miniature, Reach
from .model_shape import dtype_of, model_shape
from .outputs import PLAIN, Losses, Request
from .probe import Probe
from .probe_step import probe_step
from .sharding import ReplicatedWeights
from .step import Step

# Of the first prefix of a check, and down: no step's residency is planned from them.
CHECK_PREFIX_ID = (1 << 32) - 1


def _run_in(context_of: Callable[[CheckedModel], contextlib.AbstractContextManager]):
    """Returns the decorator of methods of a :class:`CheckedModel` that run in a context of it."""

    def decorate(method):
        @functools.wraps(method)
        def run(self: CheckedModel, *arguments, **options):
            with context_of(self):
                return method(self, *arguments, **options)

        return run

    return decorate


# No other thread runs passes of the model meanwhile.
alone = _run_in(lambda model: model._alone())
# The same, with the model as its passes find it.
in_passes = _run_in(lambda model: model._passes())


class CheckedModel:
    """A model that is checked before its first step, and before the first after any change of it."""

    def __init__(
        self,
        model: torch.nn.Module,
        runtime: Runtime,
        *,
        sleep: bool = True,
        prompt_dropout: bool = True,
    ):
        if not isinstance(runtime, Runtime):
            raise ArgumentError(
                f"runtime is of {type(runtime).__name__}; accepted: dormouse.Runtime, as "
                "dormouse.install().runtime"
            )
        self._wrapped = model
        # Whether what is around the model prepares to reduce gradients.
        self._is_reduced = True
        self._model = sharding.unwrapped(model)
        self._runtime = runtime
        self._sleep = sleep
        self._prompt_dropout = prompt_dropout
        self._view = self._resolve()
        # By dtype of weights, which `fully_shard` gathers in another.
        self._shapes: dict[torch.dtype, native.ModelShape] = {}
        # The same for every wrapper of the model, and whatever becomes of its layers.
        inner = (each for each in self._model.modules() if isinstance(each, PreTrainedModel))
        self._held = next(inner, self._model)
        self._known = KnownModels(self._model)
        # The state that the view belongs to; None if the model is in one that was not checked.
        self._state: Known | None = None

    @property
    def device(self) -> torch.device:
        """Of passes, and of the values that they return."""
        return self._runtime.device

    @property
    def view(self) -> support.ModelView:
        """The model as passes run it."""
        return self._view

    @property
    def _shape(self) -> native.ModelShape:
        """The figures of the model as it is now."""
        dtype = dtype_of(self._view)
        if dtype not in self._shapes:
            self._shapes[dtype] = model_shape(self._view)
        return self._shapes[dtype]

    def _alone(self, *, in_backward: bool = False) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which no other thread may run passes of the model."""
        return one_thread.holding(self._held, in_backward=in_backward)

    @contextlib.contextmanager
    def _passes(self, *, in_backward: bool = False) -> Iterator[None]:
        """Context of passes, with the model as they find it. ``in_backward``: in a node of one."""
        around = sharding.around_passes(self._wrapped, in_backward=in_backward)
        with self._alone(in_backward=in_backward), around:
            yield

    def _plan(
        self, batch: Batch, microbatch_tokens: int, cuts: Sequence[torch.Tensor] = ()
    ) -> Plan:
        """``cuts``: see :meth:`.batch.Batch.plan`."""
        return batch.plan(self._shape, microbatch_tokens, cuts)

    def _rows_of(self, microbatch_tokens: int | None) -> int:
        """Returns the rows of a microbatch: those asked for, else the device's default."""
        if microbatch_tokens is None:
            return DEFAULT_MICROBATCH_TOKENS[self._runtime.device.type]
        return microbatch_tokens

    def _request(self, batches, outputs=(), prompt_outputs=(), prompt_loss_fn=None) -> Request:
        """Returns what losses of these groups and trees read."""
        request = Request.of(outputs, prompt_outputs, prompt_loss_fn)
        if not isinstance(batches, Sequence):
            # Refused later; an iterator must stay as it is.
            return request
        records = [experts for each in batches for experts in recorded_experts(each)]
        if records_of(records) is None:
            return request
        routing.check_ids(self._view, records)
        return replace(request, replays_experts=True)

    def _ready(self) -> ReplicatedWeights:
        """Looks at the model as it is now; returns the placement of its weights."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a shared-prefix step needs autograd; inference mode is on; accepted: a "
                "call outside it, and torch.no_grad() for scores without a graph"
            )
        sharding.reshard(self._model)
        state = self._known.current()
        if state is None or state is not self._state:
            self._state = None
            view = self._resolve()
            self._use(view if state is None else replace(view, way=state.way))
            self._refuse_known_causes()
        self._state = state
        return self._weights()

    def _resolve(self) -> support.ModelView:
        return support.resolve(self._model, self._prompt_dropout)

    def _refuse_known_causes(self) -> None:
        """Raises :class:`UnsupportedModelError` for what is known to be inexact."""
        adapters.check(self._model)
        dropout.check(self._model, self._prompt_dropout)
        support.check_step(self._model, self._view, self._runtime.device)

    def _weights(self) -> ReplicatedWeights:
        """Returns the placement of the weights."""
        return sharding.of(self._wrapped, self._view)

    def _outdated(
        self,
        batches: Sequence[Batch],
        microbatch_tokens: int,
        request: Request,
        *,
        is_tree: bool = False,
    ) -> str | None:
        """Returns why the model must be checked before ``batches``; None if it need not.

        Raises :class:`UnsupportedModelError` for tokens that no check draws.
        """
        media.check(self._held, batches)
        if self._state is None:
            return self._known.difference()
        checked = self._checked(batches, request, is_tree=is_tree)
        if checked is None:
            if is_tree or has_tree(batches):
                return "the first step with a tree"
            return (
                f"the first step with autocast to {self._autocast} and losses that read "
                f"{request.description}"
            )
        if self._length_matters:
            reach = reach_of(batches, microbatch_tokens)
            if reach.tokens > checked.tokens:
                return "longer sequences"
            if reach.rows > checked.rows:
                return "longer microbatches"
        return None

    @property
    def _probes(self) -> dict[tuple, Probe]:
        """Of the model as it is."""
        return {} if self._state is None else self._state.probes

    @property
    def _autocast(self) -> torch.dtype | None:
        kind = self._runtime.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _checked(
        self, batches: Sequence[Batch], request: Request, *, is_tree: bool = False
    ) -> Checked | None:
        """Returns the last check of such batches with losses that read this, under the autocast
        that is active now."""
        if self._state is None:
            return None
        return self._state.checks.get((self._autocast, request, is_tree or has_tree(batches)))

    def _check_if_needed(
        self,
        weights: ReplicatedWeights,
        batches: Sequence[Batch],
        microbatch_tokens: int,
        request: Request,
    ) -> None:
        reason = self._outdated(batches, microbatch_tokens, request)
        (is_needed,) = weights.agreed([reason is not None])
        if is_needed:
            reason = reason or "the check of another rank"
            reach = reach_of(batches, microbatch_tokens)
            self._check(weights, reach, reason, request, is_tree=has_tree(batches))

    def _check_alone(
        self,
        weights: ReplicatedWeights,
        batches: Sequence[Batch],
        microbatch_tokens: int,
        request: Request,
        *,
        is_tree: bool,
    ) -> Reach | None:
        """Checks the model if the other ranks need not take part; returns how far all ranks must
        check it together. ``is_tree``: batches run as trees whatever they are."""
        reason = self._outdated(batches, microbatch_tokens, request, is_tree=is_tree)
        if reason is None:
            return None
        reach = reach_of(batches, microbatch_tokens)
        if weights.passes_hold_collectives:
            return reach
        self._check(weights, reach, reason, request, is_tree=is_tree or has_tree(batches))
        return None

    def _check(
        self,
        weights: ReplicatedWeights,
        reach: Reach,
        reason: str,
        request: Request,
        *,
        is_tree: bool = False,
    ) -> Checked:
        """Checks the model in the cheapest way that it passes. ``reach``: how far, if lengths
        matter."""
        first, arguments = self._view, (weights, reach, reason, request)
        ways = mixers.ways_of(first)
        (cheapest,) = weights.agreed([ways.index(mixers.way_of(first))])
        ways = ways[cheapest:]
        if weights.passes_hold_collectives:
            # Ranks that check together may not run different passes.
            ways = ways[:1]
        refusal: support.UnsupportedModelError | None = None
        for way in ways:
            self._use(replace(first, way=way))
            try:
                return self._check_view(*arguments, is_tree=is_tree)
            except support.UnsupportedModelError as error:
                for each in (error, error.__cause__):
                    if each is not None:
                        # What the passes left in their frames.
                        traceback.clear_frames(each.__traceback__)
                refusal = refusal or error
        self._use(first)
        raise refusal

    def _use(self, view: support.ModelView) -> None:
        self._view = view
        self._shapes.clear()
        self._length_matters = check.unknown_code(view) is not None

    def _check_view(
        self,
        weights: ReplicatedWeights,
        reach: Reach,
        reason: str,
        request: Request,
        *,
        is_tree: bool,
    ) -> Checked:
        device = self._runtime.device
        if not self._length_matters:
            reach = Reach()
        reach = Reach(*weights.agreed(reach))

        def run_step(own: Miniature, losses: Losses) -> None:
            batch = batch_of(own.batch, losses)
            with (
                self._plan(batch, own.microbatch_tokens, own.cuts) as plan,
                self._step(weights, batch, plan, awake, is_check=True) as step,
            ):
                step.run(microbatches=share.microbatches_of(plan), is_last=True)

        before = Fingerprint(self._model)
        miniatures = self._miniatures(reach, request, is_tree=is_tree)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(weights.stepping())
                if is_tree:
                    stack.enter_context(weights.gathered())
                check.let_hooks_register(self._view, weights, device, miniatures[0])
                before.restore()
                before = Fingerprint(self._model)
                checked = check.Check(self._view, weights, run_step, device, miniatures).run(reason)
            sharding.reshard(self._model)
        except BaseException:
            before.restore()
            raise
        # What every forward changes is no change of the model.
        volatile = before.volatile()
        before.restore()
        fingerprint = Fingerprint(self._model, volatile)
        self._state = self._known.put(fingerprint, self._state, self._view.way)
        self._state.checks[self._autocast, request, is_tree] = checked
        return checked

    def _miniatures(self, reach: Reach, request: Request, *, is_tree: bool) -> list[Miniature]:
        """Returns what a check runs."""
        lengths = miniature.lengths_up_to(reach, self._view.config)
        if is_tree and reach.tokens == 0:
            lengths = []
        found = [miniature.group(self._view, each, request) for each in lengths]
        return found + ([miniature.tree(self._view, request)] if is_tree else [])

    def _step(
        self,
        weights: ReplicatedWeights,
        batch: Batch,
        plan: Plan,
        find_probe: Callable[[bool, Request], Probe | None],
        *,
        is_check: bool = False,
        exchanged: dict | None = None,
        kind: type[Step] = Step,
    ) -> Step:
        layers = len(self._view.layers)

        def open_prefix(node: int) -> Prefix:
            if is_check:
                return Prefix(self._runtime, None, layers, CHECK_PREFIX_ID - node)
            return Prefix(self._runtime, plan, layers, node)

        device = self._runtime.device
        return kind(self._view, weights, batch, plan, device, open_prefix, find_probe, exchanged)

    def _probe_key(
        self,
        batch: Batch,
        microbatch_tokens: int,
        is_inner: bool,
        request: Request,
    ) -> tuple:
        return (
            batch.prefix_is_longer(microbatch_tokens),
            is_inner,
            request,
            self._model.training,
            tuple((p.dtype, p.requires_grad) for p in self._model.parameters()),
            self._autocast,
        )

    @property
    def _runs_probes(self) -> bool:
        """Whether steps run probes of their prefixes."""
        return self._sleep

    def _probe_finder(
        self, weights: ReplicatedWeights, batch: Batch, microbatch_tokens: int
    ) -> Callable[[bool, Request], Probe | None]:
        """Returns the function with which a step finds the probes of its prefixes."""

        def find(is_inner: bool, request: Request) -> Probe | None:
            if not self._runs_probes:
                return None
            key = self._probe_key(batch, microbatch_tokens, is_inner, request)
            probe = self._known_probe(key)
            (is_missing,) = weights.agreed([probe is None])
            if is_missing:
                probe = self._run_probe(weights, batch.sample(), *key[:3])
                self._probes[key] = probe
            return probe if self._sleep else None

        return find

    def _known_probe(self, key: tuple) -> Probe | None:
        return self._probes.get(key)

    @torch.compiler.disable
    def _run_probe(
        self,
        weights: ReplicatedWeights,
        sample: Sample,
        prefix_is_longer: bool,
        is_inner: bool = False,
        request: Request = PLAIN,
    ) -> Probe:
        # The probe is a dispatch mode; torch 2.11 never again compiles code that it met under one.
        # Its passes draw masks that no pass of the step may miss.
        eager, device = compiled_layers.EAGER, self._runtime.device
        with eager, check.undisturbed(device), support.explained("the probe of a shared step"):
            return probe_step(
                self._view,
                weights,
                sample,
                device,
                prefix_is_longer=prefix_is_longer,
                is_inner=is_inner,
                request=request,
            )


def reach_of(batches: Sequence[Batch], microbatch_tokens: int) -> Reach:
    return Reach(
        max((batch.longest_tokens for batch in batches), default=0),
        max((batch.longest_rows(microbatch_tokens) for batch in batches), default=0),
    )


def awake(is_inner: bool, request: Request) -> None:
    """The probe of a step in which nothing sleeps."""
