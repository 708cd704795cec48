"""Shared-prefix steps of a transformers model: :class:`SharedPrefix`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import ranks
from ..group import Group
from ..runtime import Prefix, Runtime
from ..schedule import Plan
from . import adapters, check, dropout, share, sharding, support
from .check import Checked
from .fingerprint import Fingerprint
from .model_shape import model_shape
from .probe import Probe
from .probe_step import probe_step
from .sharding import ReplicatedWeights
from .step import GroupStep, GroupTokens, LossFn, StepReport

# Of the prefixes of a check, so that no step's residency is planned from them.
CHECK_PREFIX_ID = (1 << 32) - 1

GroupLossFn = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


@dataclass
class RanksReport:
    """Results of one rank in a step of all ranks."""

    loss: float
    """This rank's sum over its own groups."""
    groups: list[StepReport]
    """Results of the rank's groups, in their order."""
    dummy_microbatches: int
    """Microbatches run only to match other ranks: one token each, no loss, zero gradients."""
    dummy_groups: int
    """Groups run only to match other ranks; ``dummy_microbatches`` includes their microbatches."""
    microbatch_tokens: int
    """The minimum over ranks."""
    ranks: int


class SharedPrefix:
    """Computes a group's prompt once, forward and backward, for all its responses.

    ``model``: a causal language model of transformers on the runtime's device, adapters and frozen
    parameters included; plain, or, for :meth:`step`, in DistributedDataParallel or under
    ``fully_shard``. The first step, and the first after any change of the model, checks that a
    shared step equals the dense one (:meth:`check`). The model is not modified, and its attention
    outside a step is its own. ``runtime``: manages the memory that sleeps. ``sleep=False`` runs the
    same schedule with everything awake. On a GPU only memory allocated by dormouse can sleep: call
    ``dormouse.install()`` before the first CUDA tensor. ``prompt_dropout=False`` chooses an
    objective without dropout in the rows that responses share: the prompt's, all but its last
    token. Otherwise a model with dropout is refused.

    Not thread-safe: one step at a time per model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        runtime: Runtime,
        *,
        sleep: bool = True,
        prompt_dropout: bool = True,
    ):
        self._wrapped = model
        self._model = sharding.unwrapped(model)
        self._runtime = runtime
        self._sleep = sleep
        self._prompt_dropout = prompt_dropout
        self._view = support.resolve(self._model, prompt_dropout)
        self._probes: dict[tuple, Probe] = {}
        self._fingerprint: Fingerprint | None = None
        self._checks: dict[torch.dtype | None, Checked] = {}

    def check(self, group: Group | None = None) -> Checked:
        """Runs a miniature group densely and shared, and compares logits and all gradients.

        Every step does this by itself the first time and after any change of the model. It changes
        neither weights, buffers, ``.grad`` nor the state of random generators. It runs about 60
        tokens densely, and as many again shared. A model with code from outside torch, transformers
        and peft runs longer groups too, about eight times the longest sequence of ``group``.
        Dropout drops by fixed masks meanwhile.

        Raises :class:`UnsupportedModelError` naming what differs. Under ``fully_shard`` a check is
        part of :meth:`step`, and this method is refused.
        """
        weights = self._ready()
        if weights.passes_hold_collectives:
            raise support.UnsupportedModelError(
                "check() runs one rank alone, and this model's weights are gathered over ranks; "
                "accepted: step(), which runs the check on every rank"
            )
        groups = [] if group is None else [group]
        return self._check(weights, self._check_tokens(groups), "a call of check()")

    def backward(
        self,
        group: Group,
        loss_fn: LossFn,
        *,
        microbatch_tokens: int = 256,
        on_phase: Callable[[str], None] | None = None,
    ) -> StepReport:
        """Adds the gradients of the group to every parameter's ``.grad``, as the dense loop would.

        ``loss_fn(logits, labels, i)`` receives response ``i``'s logits ``[len(S_i), vocab]`` and
        labels ``[len(S_i)]`` (the response's own tokens) on the model's device and returns a
        scalar; the total loss is ``Σ weights[i] · loss_fn(...)``. ``microbatch_tokens``: response
        rows per microbatch. ``on_phase`` is called with ``"A"``, ``"B"``, ``"C"`` at the begin of
        each phase and with ``"end"`` after the last.

        Raises :class:`UnsupportedModelError` before any pass. A :class:`DormouseError` during the
        step leaves gradients partly added: zero them before the next attempt.
        """
        weights = self._ready()
        if weights.passes_hold_collectives or self._wrapped is not self._model:
            raise support.UnsupportedModelError(
                "backward() runs one rank alone, and this model's gradients are reduced over "
                "ranks; accepted: step() with this rank's groups, on every rank"
            )
        self._check_if_needed(weights, [group])
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            plan = stack.enter_context(self._plan(group, microbatch_tokens))
            probe = self._probe(weights, group, microbatch_tokens) if self._sleep else None
            step = self._step(stack, weights, group, plan, loss_fn, probe)
            report = step.run(plan, on_phase=on_phase)
        report.checked = self._checked
        return report

    def step(
        self,
        groups: Sequence[Group],
        loss_fn: GroupLossFn,
        *,
        process_group=None,
        microbatch_tokens: int = 256,
    ) -> RanksReport:
        """Adds to every parameter's ``.grad`` the mean over ranks of their groups' gradients.

        Collective: every rank of ``process_group`` calls it with its own groups, any number of any
        size. ``loss_fn(logits, labels, i, g)``: as for :meth:`backward`, for response ``i`` of
        ``groups[g]``. ``microbatch_tokens``: the minimum over ranks applies. ``process_group``: the
        data-parallel ranks; defaults to DDP's group, else to the default group, else to this
        process alone.

        Gradients are reduced once, after the last backward: by the reduce-scatter of
        ``fully_shard`` with its own divisor, or as the mean of ``.grad`` over ranks. Until then a
        sharded model holds unsharded gradients on each rank.

        Raises :class:`dormouse.ranks.RanksDifferError` on every rank before any pass if the ranks
        cannot run the step together; the rank that caused it raises its own error. After a later
        error the other ranks wait until the timeout of the process group, and gradients are partly
        added or lost: zero them.
        """
        with contextlib.ExitStack() as stack:
            if process_group is None:
                process_group = sharding.process_group_of(self._wrapped)
            offer, agreement = self._agree(stack, groups, process_group, microbatch_tokens)
            stack.enter_context(torch.enable_grad())
            if agreement.check_tokens is not None:
                reason = self._outdated(groups) or "the check of another rank"
                self._check(offer.weights, agreement.check_tokens, reason)
            stack.enter_context(offer.weights.stepping())
            self._run_probes(offer, agreement.probes)
            slots = agreement.slots
            reports = [
                self._run_slot(offer, slot, groups, loss_fn, is_last=slot is slots[-1])
                for slot in slots
            ]
            offer.weights.average(process_group, self._runtime.device)
        ours = {slot.group: report for slot, report in zip(slots, reports, strict=True)}
        return RanksReport(
            loss=sum(report.loss for report in reports),
            groups=[ours[index] for index in range(len(groups))],
            dummy_microbatches=sum(report.counts["dummy_microbatches"] for report in reports),
            dummy_groups=len(slots) - len(groups),
            microbatch_tokens=agreement.budgets["microbatch_tokens"],
            ranks=agreement.ranks,
        )

    def predict(self, group: Group, *, microbatch_tokens: int = 256) -> dict:
        """Returns the plan's prediction for a step (:meth:`Plan.predict`) without running it."""
        with self._plan(group, microbatch_tokens) as plan:
            return plan.predict()

    def _plan(self, group: Group, microbatch_tokens: int) -> Plan:
        shape = model_shape(self._view)
        return Plan.of_group(group, microbatch_rows=microbatch_tokens, model=shape)

    def _ready(self) -> ReplicatedWeights:
        """Looks at the model as it is now; returns the placement of its weights."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a shared-prefix step needs autograd; inference mode is on")
        sharding.reshard(self._model)
        if self._fingerprint is None or not self._fingerprint.matches():
            self._view = support.resolve(self._model, self._prompt_dropout)
            adapters.check(self._model)
            dropout.check(self._model, self._prompt_dropout)
            support.check_step(self._model, self._view, self._runtime.device)
        return sharding.of(self._wrapped, self._view)

    def _outdated(self, groups: Sequence[Group]) -> str | None:
        """Returns why the model must be checked before ``groups``; None if it need not."""
        if self._fingerprint is None:
            return "the first step"
        if not self._fingerprint.matches():
            return self._fingerprint.difference()
        if self._checked is None:
            return f"the first step with autocast to {self._autocast}"
        if self._length_matters and check.longest_sequence(groups) > self._checked.tokens:
            return "longer groups"
        return None

    @property
    def _autocast(self) -> torch.dtype | None:
        kind = self._runtime.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    @property
    def _checked(self) -> Checked | None:
        """The last check under the autocast that is active now."""
        return self._checks.get(self._autocast)

    def _check_if_needed(self, weights: ReplicatedWeights, groups: Sequence[Group]) -> None:
        reason = self._outdated(groups)
        if reason is not None:
            self._check(weights, self._check_tokens(groups), reason)

    def _check_alone(self, weights: ReplicatedWeights, groups: Sequence[Group]) -> int | None:
        """Checks the model if the other ranks need not take part; returns the length up to which
        all ranks must check it together."""
        if weights.passes_hold_collectives and self._outdated(groups) is not None:
            return self._check_tokens(groups)
        self._check_if_needed(weights, groups)
        return None

    def _check_tokens(self, groups: Sequence[Group]) -> int:
        """Returns the length up to which the model must be checked; 0 if lengths do not matter."""
        self._length_matters = check.unknown_code(self._view) is not None
        return check.longest_sequence(groups) if self._length_matters else 0

    def _check(self, weights: ReplicatedWeights, tokens: int, reason: str) -> Checked:
        if self._fingerprint is None or not self._fingerprint.matches():
            self._fingerprint, self._checks, self._probes = None, {}, {}
        device = self._runtime.device

        def run_step(group, microbatch_tokens, loss_fn):
            with contextlib.ExitStack() as stack:
                plan = stack.enter_context(self._plan(group, microbatch_tokens))
                microbatches = share.microbatches_of(plan)
                step = self._step(
                    stack, weights, group, plan, loss_fn, None, is_check=True
                )
                step.run(plan, microbatches=microbatches, is_last=True)

        before = Fingerprint(self._model)
        lengths = check.lengths_up_to(tokens, self._view.config)
        try:
            with weights.stepping():
                checked = check.Check(self._view, weights, run_step, device, lengths).run(reason)
            sharding.reshard(self._model)
        except BaseException:
            before.restore()
            raise
        # What every forward changes is no change of the model.
        volatile = before.volatile()
        before.restore()
        self._fingerprint = Fingerprint(self._model, volatile)
        self._checks[self._autocast] = checked
        return checked

    def _agree(self, stack, groups, process_group, microbatch_tokens: int):
        """Returns this rank's :class:`_Offer` and the agreement; ``stack`` owns the plans."""
        device = self._runtime.device
        offer = self._offer(stack, groups, process_group, microbatch_tokens)
        agreement = ranks.agree(process_group, offer.share, device)
        if not agreement.settled:
            microbatch_tokens = agreement.budgets["microbatch_tokens"]
            offer = self._offer(stack, groups, process_group, microbatch_tokens)
            agreement = ranks.agree(process_group, offer.share, device)
        ranks.confirm(process_group, agreement.sequence(), device)
        return offer, agreement

    def _offer(self, stack, groups, process_group, microbatch_tokens: int) -> _Offer:
        try:
            if not isinstance(groups, Sequence):
                # The groups are read several times, the last time while other ranks wait.
                raise TypeError(f"groups is a {type(groups).__name__}; accepted: a list of Group")
            weights = self._ready()
            if weights.passes_hold_collectives:
                sharding.check_group(self._model, ranks.world_size(process_group))
            plans = [stack.enter_context(self._plan(group, microbatch_tokens)) for group in groups]
            # Groups with equal keys share a probe.
            missing = {}
            for group in groups if self._sleep else ():
                key = self._probe_key(group, microbatch_tokens)
                if key not in self._probes:
                    missing[key] = group.prompt
            offered = share.of(
                self._model,
                self._view,
                weights,
                plans,
                microbatch_tokens=microbatch_tokens,
                probes=len(missing),
                check_tokens=self._check_alone(weights, groups),
            )
        except Exception as error:
            ranks.refuse(process_group, error, self._runtime.device)
            raise
        return _Offer(offered, weights, plans, missing)

    def _run_probes(self, offer: _Offer, count: int) -> None:
        """Runs this rank's probes, and dummies up to ``count``: a probe gathers weights too."""
        for key, prompt in offer.probes.items():
            self._probes[key] = self._run_probe(offer.weights, prompt, key[0])
        for _ in range(count - len(offer.probes)):
            self._run_probe(offer.weights, share.dummy_group().prompt, False)

    def _run_slot(self, offer: _Offer, slot: ranks.GroupSlot, groups, loss_fn, *, is_last: bool):
        with contextlib.ExitStack() as stack:
            if slot.group is None:
                group, own_loss, probe = share.dummy_group(), None, None
                plan = stack.enter_context(self._plan(group, microbatch_tokens=1))
            else:
                group, plan = groups[slot.group], offer.plans[slot.group]
                own_loss = functools.partial(_of_group, loss_fn, slot.group)
                microbatch_tokens = offer.share.budgets["microbatch_tokens"]
                probe = (
                    self._probe(offer.weights, group, microbatch_tokens) if self._sleep else None
                )
            step = self._step(stack, offer.weights, group, plan, own_loss, probe)
            report = step.run(plan, microbatches=slot.microbatches, is_last=is_last)
        report.checked = self._checked
        return report

    def _step(
        self,
        stack,
        weights: ReplicatedWeights,
        group: Group,
        plan: Plan,
        loss_fn,
        probe,
        *,
        is_check: bool = False,
    ) -> GroupStep:
        """Creates a step over one group; ``stack`` owns its prefix."""
        of_plan = (None, CHECK_PREFIX_ID) if is_check else (plan, 0)
        layers = len(self._view.layers)
        prefix = stack.enter_context(Prefix(self._runtime, of_plan[0], layers, of_plan[1]))
        tokens = GroupTokens(group, self._runtime.device)
        step = GroupStep(self._view, weights, tokens, loss_fn, prefix, probe)
        # Frees what the step still holds, asleep or not, before the prefix is closed.
        stack.callback(step.release)
        return step

    def _probe_key(self, group: Group, microbatch_tokens: int) -> tuple:
        longest = max(len(response) for response in group.responses)
        return (
            len(group.prompt) - 1 >= max(longest, microbatch_tokens),
            self._model.training,
            tuple((p.dtype, p.requires_grad) for p in self._model.parameters()),
            self._autocast,
        )

    def _probe(self, weights: ReplicatedWeights, group: Group, microbatch_tokens: int) -> Probe:
        key = self._probe_key(group, microbatch_tokens)
        if key not in self._probes:
            self._probes[key] = self._run_probe(weights, group.prompt, key[0])
        return self._probes[key]

    def _run_probe(
        self, weights: ReplicatedWeights, prompt: torch.Tensor, prefix_is_longer: bool
    ) -> Probe:
        with support.explained("the probe of a shared step"):
            return probe_step(self._view, weights, prompt, prefix_is_longer, self._runtime.device)


class _Offer(NamedTuple):
    """A rank's share and the objects it was created from."""

    share: ranks.Share
    weights: ReplicatedWeights
    plans: list[Plan]
    probes: dict[tuple, torch.Tensor]
    """Prompts of missing probes, by key."""


def _of_group(loss_fn: GroupLossFn, group: int, logits, labels, i: int):
    return loss_fn(logits, labels, i, group)
