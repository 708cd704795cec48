"""Shared-prefix steps of a transformers model: :class:`SharedPrefix`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from .. import exchange as exchanging
from .. import ranks
from ..errors import ArgumentError
from ..group import Group
from ..schedule import Machine, Plan, predict_nothing
from ..tree import Conversation, Tree
from . import share, sharding, speed, support
from .batch import (
    Batch,
    GroupBatch,
    LossFn,
    PromptLossFn,
    Sample,
    TokenLossFn,
    TreeBatch,
    batch_of,
    tree_of,
)
from .check import Checked, undisturbed
from .checked_model import alone, awake, in_passes, reach_of
from .exchange import Batches, Exchange, ExchangeReport
from .miniature import Reach
from .outputs import PLAIN, Losses, Output
from .scored_model import ScoredModel
from .share import RanksReport
from .sharding import ReplicatedWeights
from .speed import Speed
from .step_report import StepReport

GroupLossFn = Callable[[torch.Tensor | Output, torch.Tensor, int, int], torch.Tensor]
GroupPromptLossFn = Callable[[torch.Tensor | Output, torch.Tensor, int], torch.Tensor]


class SharedPrefix(ScoredModel):
    """Computes a group's prompt once, forward and backward, for all its responses.

    ``model``: a causal language model of transformers on the runtime's device, adapters and frozen
    parameters included; plain, or, for :meth:`step` and :meth:`score`, in DistributedDataParallel or
    under ``fully_shard``; or, for :meth:`score`, an engine of DeepSpeed; or, for :meth:`score` and
    :meth:`backward`, split over ranks by DTensor, with the same batch on every rank of the mesh.
    The first step, and the first after any change of the model, checks that a shared step equals
    the dense one (:meth:`check`).
    The model is not modified, and its attention outside a step is its own. ``runtime``: manages the
    memory that sleeps. ``sleep=False`` runs the same schedule with everything awake. On a GPU only
    memory allocated by dormouse can sleep: call ``dormouse.install()`` before the first CUDA
    tensor. ``prompt_dropout=False`` chooses an objective without dropout in the rows that responses
    share: the prompt's, all but its last token; in a tree those of every node with children.
    Otherwise a model with dropout is refused.

    Not thread-safe: one thread at a time runs passes of a model. Calls on other threads raise
    :class:`dormouse.StateError` meanwhile, of other objects for the same model too. The backward of
    a :meth:`score` is such passes, but begins unchecked: do not run it beside those of others.
    """

    @in_passes
    def check(
        self, group: Group | None = None, *, microbatch_tokens: int | None = None
    ) -> Checked:
        """Runs a miniature group densely and shared, and compares logits and all gradients.

        Every step does this by itself the first time and after any change of the model. It changes
        neither weights, buffers, ``.grad`` nor the state of random generators. It runs about 60
        tokens densely, and as many again shared. A model with code from outside torch, transformers
        and peft runs longer groups too, about eight times the longest sequence of ``group``, and a
        microbatch of ``microbatch_tokens`` if its responses are as many. Dropout drops by fixed
        masks meanwhile. torch compiles compiled layers for three more lengths in FP32 and three in
        their own dtype. A step with ``dynamic=False`` has two of its own if its responses have one
        length; for more, raise torch's ``recompile_limit`` of 8, beyond which it runs eager code.

        Raises :class:`UnsupportedModelError` naming what differs. Under ``fully_shard`` a check is
        part of :meth:`step`, and this method is refused.
        """
        weights = self._ready()
        if weights.passes_hold_collectives:
            raise support.UnsupportedModelError(
                "check() runs one rank alone, and this model's weights are gathered over ranks; "
                "accepted: step(), which runs the check on every rank"
            )
        batches = [] if group is None else [GroupBatch(group)]
        reach = reach_of(batches, self._rows_of(microbatch_tokens))
        return self._check(weights, reach, "a call of check()", PLAIN)

    @alone
    def backward(
        self,
        batch: Group | Tree | Sequence[Conversation],
        loss_fn: LossFn | TokenLossFn,
        *,
        prompt_loss_fn: PromptLossFn | None = None,
        outputs: Collection[str] = (),
        prompt_outputs: Collection[str] = (),
        microbatch_tokens: int | None = None,
        on_phase: Callable[[str], None] | None = None,
        **tree_options,
    ) -> StepReport:
        """Adds the gradients of a group or a tree to every parameter's ``.grad``, as the dense loop
        would.

        Of a group: ``loss_fn(logits, labels, i)`` receives response ``i``'s logits ``[len(S_i),
        vocab]`` and labels ``[len(S_i)]`` (the response's own tokens) on the model's device and
        returns a scalar; the total loss is ``Σ weights[i] · loss_fn(...)``. Responses of weight 0
        are not run, and ``loss_fn`` is not called for them.

        ``prompt_loss_fn(logits, labels)``: a loss of the prompt's own rows, added to the total once
        (not once per response). Row r is that of prompt token r, and its label the next one: ``P -
        1`` rows. It runs, backward included, at the end of phase A.

        ``outputs``, ``prompt_outputs``: what losses read beside logits, of the rows of responses
        and of the prompt: ``"last_hidden_state"`` (for value heads), ``"router_logits"``. With
        either, loss functions receive an :class:`Output` instead of logits. In ``loss_fn``
        ``output.prompt`` has what ``prompt_outputs`` names. Modules outside the model that the
        losses use receive their gradients too. ``prompt_outputs``, and a loss of the prompt, run
        the prompt through its last layer, which otherwise ends at K and V.

        Of a tree (:class:`dormouse.Tree`, or a list of its conversations):
        ``loss_fn(logits, labels, i, positions)`` receives some labels of conversation ``i``, those
        of one node, at ``positions`` of the conversation, and returns the loss of each,
        ``[len(labels)]``. The total loss is ``Σ weight · Σ losses``: a mean over a conversation is
        in its weight. Tokens after a conversation's last label are not run. With ``outputs`` the
        loss function receives an :class:`Output` of its labels' rows. A tree has no prompt of its
        own: ``prompt_loss_fn`` and ``prompt_outputs`` are refused, labels on a prompt's tokens say
        the same.

        A group or a tree in which no token carries loss runs nothing: its loss is 0, and gradients
        stay as they are.

        ``microbatch_tokens``: rows per microbatch; None: 512 on the CPU, 4,096 on a GPU. The
        activations of one microbatch are in memory at a time. ``on_phase`` is called with ``"A"``, ``"B"``,
        ``"C"`` when the phase of the running op changes, and with ``"end"`` after the last.
        ``tree_options``: ``block_tokens``, ``machine``, ``device_bytes`` and ``plan`` (a
        :class:`dormouse.RankPlan` of these conversations, which is run as it is) of
        :class:`dormouse.hf.batch.TreeBatch`.

        Raises :class:`UnsupportedModelError` before any pass. A :class:`DormouseError` during the
        step leaves gradients partly added: zero them before the next attempt.
        """
        batch = batch if isinstance(batch, Group) else tree_of(batch)
        request = self._request([batch], outputs, prompt_outputs, prompt_loss_fn)
        weights = self._ready()
        weights.check_backward("backward()")
        support.check_hooks(self._model)
        if weights.passes_hold_collectives or self._wrapped is not self._model:
            raise support.UnsupportedModelError(
                "backward() runs one rank alone, and this model's gradients are reduced over "
                "ranks; accepted: step() with this rank's groups, on every rank"
            )
        if not self._prompt_dropout and self._model.training and tree_options.get("block_tokens"):
            raise support.UnsupportedModelError(
                "block_tokens with prompt_dropout=False: rows of blocks would drop nothing although "
                "they are not shared; accepted: one of the two"
            )
        own = batch_of(batch, Losses(loss_fn, prompt_loss_fn, request), **tree_options)
        if own.is_empty:
            if on_phase is not None:
                on_phase("end")
            return StepReport(0.0)
        microbatch_tokens = self._rows_of(microbatch_tokens)
        self._check_if_needed(weights, [own], microbatch_tokens, request)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            plan = stack.enter_context(self._plan(own, microbatch_tokens))
            find = self._probe_finder(weights, own, microbatch_tokens)
            step = stack.enter_context(self._step(weights, own, plan, find))
            report = step.run(on_phase=on_phase)
            if not step.has_gradient and not self._is_trainable:
                raise support.UnsupportedModelError(
                    "no parameter of the model and no loss require grad; accepted: a trainable "
                    "parameter of the model, or of a module that the losses use"
                )
        report.checked = self._checked([own], request)
        return report

    @alone
    def step(
        self,
        groups: Sequence[Group | Tree],
        loss_fn: GroupLossFn,
        *,
        prompt_loss_fn: GroupPromptLossFn | None = None,
        outputs: Collection[str] = (),
        prompt_outputs: Collection[str] = (),
        process_group=None,
        microbatch_tokens: int | None = None,
        exchange: bool | Machine = False,
    ) -> RanksReport:
        """Adds to every parameter's ``.grad`` the mean over ranks of their groups' gradients.

        Collective: every rank of ``process_group`` calls it with its own groups and trees, any
        number of any size. ``loss_fn(logits, labels, i, g)``: as for :meth:`backward`, for response
        ``i`` of ``groups[g]``; for a tree ``loss_fn(logits, labels, i, positions, g)``.
        ``prompt_loss_fn(logits, labels, g)``, ``outputs`` and ``prompt_outputs`` likewise, the same
        on all ranks; under ``fully_shard``, and with a tree, only ``outputs``.
        ``microbatch_tokens``: as for :meth:`backward`; the minimum over ranks applies.
        ``process_group``: the data-parallel ranks; defaults to DDP's group, else to the default
        group, else to this process alone.

        ``exchange``: a prefix that groups or trees of several ranks begin with is computed by one
        of them, which sends K, V, recurrent states and keys of indexers to the others, and receives
        gradients of all but the last; the same on all ranks. Prefixes end before the first label.
        Ranks find them from the token ids before first labels, which they send each other. With a
        :class:`dormouse.schedule.Machine` those are exchanged that the link transfers sooner than a
        rank computes them. Exchanged prefixes stay in memory, or asleep, for the whole step. An
        error in the losses or passes of one rank raises on every rank at the end of the step. Under
        ``fully_shard`` all weights are gathered once. Losses read logits of responses alone.

        Gradients are reduced once, after the last backward: by the reduce-scatter of
        ``fully_shard`` with its own divisor, or as the mean of ``.grad`` over ranks. Until then a
        sharded model holds unsharded gradients on each rank. If any rank has a tree, it also holds
        all weights, gathered once: the ranks' passes then differ.

        Raises :class:`dormouse.ranks.RanksDifferError` on every rank before any pass if the ranks
        cannot run the step together; the rank that caused it raises its own error. After a later
        error the other ranks wait until the timeout of the process group, and gradients are partly
        added or lost: zero them.
        """
        with contextlib.ExitStack() as stack:
            if process_group is None:
                process_group = sharding.process_group_of(self._wrapped)
            try:
                request = self._request(groups, outputs, prompt_outputs, prompt_loss_fn)
                if exchange and request != PLAIN:
                    raise support.UnsupportedModelError(
                        f"exchange with losses that read {request.description}"
                        + request.replays_experts * " after routers that select recorded experts"
                        + "; accepted: logits of responses, without routed_experts"
                    )
            except Exception as error:
                ranks.refuse(process_group, error, self._runtime.device)
                raise
            own = (groups, Losses(loss_fn, prompt_loss_fn, request), process_group, exchange)
            microbatch_tokens = self._rows_of(microbatch_tokens)
            offer, agreement = self._agree(stack, own, microbatch_tokens)
            stack.enter_context(torch.enable_grad())
            if agreement.check_tokens is not None:
                reach = Reach(agreement.check_tokens, agreement.check_rows)
                outdated = self._outdated(
                    offer.batches, microbatch_tokens, request, is_tree=bool(exchange)
                )
                reason = outdated or "the check of another rank"
                is_tree = agreement.gathers or bool(exchange)
                self._check(offer.weights, reach, reason, request, is_tree=is_tree)
            stack.enter_context(offer.weights.stepping())
            self._run_probes(offer, agreement.probes)
            if agreement.gathers:
                stack.enter_context(offer.weights.gathered())
            ours, dummies, exchanged = {}, [], None
            if exchange:
                ours, exchanged = self._run_exchange(stack, offer, process_group, exchange)
            else:
                for index in sorted(set(range(len(groups))) - set(offer.turns)):
                    ours[index] = self._run_batch(offer, index, 0, is_last=False)
            slots = agreement.slots
            for slot in slots:
                is_last = slot is slots[-1]
                if slot.group is None:
                    dummies.append(self._run_dummy(offer, slot.microbatches, is_last=is_last))
                    continue
                index = offer.turns[slot.group]
                ours[index] = self._run_batch(offer, index, slot.microbatches, is_last=is_last)
            offer.weights.average(process_group, self._runtime.device)
        reports = [ours[index] for index in range(len(groups))]
        return RanksReport(
            loss=sum(report.loss for report in reports),
            groups=reports,
            dummy_microbatches=sum(
                report.counts["dummy_microbatches"] for report in (*reports, *dummies)
            ),
            dummy_groups=len(dummies),
            microbatch_tokens=agreement.budgets["microbatch_tokens"],
            ranks=agreement.ranks,
            exchange=exchanged,
        )

    @in_passes
    def predict(
        self,
        batch: Group | Tree | Sequence[Conversation],
        *,
        microbatch_tokens: int | None = None,
        measured: Speed | None = None,
        **tree_options,
    ) -> dict:
        """Returns the plan's prediction for a step (:meth:`Plan.predict`) without running it.

        ``measured``: what :meth:`measure_speed` returned. Then ``seconds_dense``,
        ``seconds_shared`` and their ratio ``speedup`` follow from it, with everything awake, else
        ``speedup`` is the ratio of counted operations. The dense run has one pass per sequence,
        and logits of labels alone. ``tree_options``: as for :meth:`backward`.
        """
        own = batch_of(batch, Losses(), **tree_options)
        if own.is_empty:
            return predict_nothing()
        with self._plan(own, self._rows_of(microbatch_tokens)) as plan:
            prediction = plan.predict()
            if measured is None:
                return prediction
            shared_s = measured.seconds(speed.of_plan(plan, self._shape))
        dense_s = measured.seconds(speed.of_dense(own.dense_runs()))
        seconds = {"seconds_dense": dense_s, "seconds_shared": shared_s}
        return prediction | seconds | {"speedup": dense_s / shared_s}

    @in_passes
    def measure_speed(self, *, tokens: int = 768) -> Speed:
        """Times passes of this model on random tokens, dense and shared, and fits the seconds of
        each part of a pass to them, for :meth:`predict`.

        ``tokens``: rows of the longest pass; the rates hold best between a few dozen and that.
        Runs about 28 passes, a third of them as long. Weights, ``.grad`` and random generators stay
        as they are; gradients take memory a second time. Under ``fully_shard``
        :class:`UnsupportedModelError` is raised.
        """
        if tokens < speed.TOKENS_MIN:
            raise ArgumentError(f"tokens is {tokens}; accepted: at least {speed.TOKENS_MIN}")
        weights, device = self._ready(), self._runtime.device
        if weights.passes_hold_collectives:
            raise support.UnsupportedModelError(
                "measure_speed() runs one rank alone, and this model's weights are gathered over "
                "ranks; accepted: a plain model or DistributedDataParallel"
            )
        self._check_if_needed(weights, [], tokens, PLAIN)

        def loss_fn(logits, labels, i):
            return torch.nn.functional.cross_entropy(logits, labels)

        def shared_sample(group: Group, microbatch_tokens: int) -> speed.Sample:
            def run() -> None:
                batch = GroupBatch(group, Losses(loss_fn))
                with (
                    self._plan(batch, microbatch_tokens) as plan,
                    self._step(weights, batch, plan, awake, is_check=True) as step,
                ):
                    step.run()

            with self._plan(GroupBatch(group), microbatch_tokens) as plan:
                return speed.Sample(speed.of_plan(plan, self._shape), run)

        with undisturbed(device), weights.trial(self._model, None) as trial:
            samples = speed.dense_samples(self._view, device, tokens, trial.adopt)
            samples += [
                shared_sample(*each) for each in speed.shared_groups(self._view, tokens)
            ]
            return speed.fitted(samples, speed.seconds_on(device))

    def _agree(self, stack, own: tuple, microbatch_tokens: int):
        """Returns this rank's :class:`_Offer` and the agreement; ``stack`` owns the plans.
        ``own``: groups, losses, process group and ``exchange``."""
        device, process_group = self._runtime.device, own[2]
        offer = self._offer(stack, *own, microbatch_tokens)
        agreement = ranks.agree(process_group, offer.share, device)
        if not agreement.settled:
            offer = self._offer(stack, *own, agreement.budgets["microbatch_tokens"])
            agreement = ranks.agree(process_group, offer.share, device)
        ranks.confirm(process_group, agreement.sequence(), device)
        return offer, agreement

    def _offer(
        self, stack, groups, losses: Losses, process_group, exchange, microbatch_tokens: int
    ) -> _Offer:
        request = losses.request
        try:
            if not isinstance(groups, Sequence):
                # The groups are read several times, the last time while other ranks wait.
                raise TypeError(f"groups is a {type(groups).__name__}; accepted: a list of Group")
            weights = self._ready()
            weights.check_backward("step()")
            support.check_hooks(self._model)
            if not self._is_trainable:
                raise support.UnsupportedModelError(
                    "no parameter of the model requires grad, so ranks have nothing to average; "
                    "accepted: a trainable parameter, or backward() on each rank"
                )
            if weights.passes_hold_collectives:
                sharding.check_group(self._model, ranks.world_size(process_group))
                if request.runs_prompt_to_end:
                    raise support.UnsupportedModelError(
                        f"losses read {request.description}, and weights are gathered over ranks; "
                        "accepted under fully_shard: logits and outputs of responses"
                    )
            batches = [batch_of(each, losses.of_group(g)) for g, each in enumerate(groups)]
            for index, batch in enumerate(batches):
                if batch.is_empty and isinstance(batch, TreeBatch):
                    raise ArgumentError(
                        f"groups[{index}] has no token that carries loss; accepted: at least 1"
                    )
            check_reach = self._check_alone(
                weights, batches, microbatch_tokens, request, is_tree=bool(exchange)
            )
            plans = [stack.enter_context(self._plan(each, microbatch_tokens)) for each in batches]
            turns = [i for i, each in enumerate(batches) if isinstance(each, GroupBatch)]
            if exchange:
                turns = []
            # Groups with equal keys share a probe. Passes of trees hold no collectives: theirs run
            # when they are needed.
            missing = {}
            for batch in [batches[i] for i in turns] if self._sleep else ():
                key = self._probe_key(batch, microbatch_tokens, False, request)
                if key not in self._probes:
                    missing[key] = batch.sample()
            offered = share.of(
                self._model,
                self._view,
                weights,
                [plans[i] for i in turns],
                microbatch_tokens=microbatch_tokens,
                probes=len(missing),
                check_reach=check_reach,
                has_trees=bool(exchange) or len(turns) < len(batches),
                exchange=str(exchange),
                request=request,
            )
        except Exception as error:
            ranks.refuse(process_group, error, self._runtime.device)
            raise
        return _Offer(offered, weights, batches, plans, turns, missing)

    def _run_exchange(
        self, stack, offer: _Offer, process_group, exchange: bool | Machine
    ) -> tuple[dict[int, StepReport], ExchangeReport]:
        """Runs all batches with the prefixes that ranks share; returns their reports."""
        tokens = offer.share.budgets["microbatch_tokens"]
        finders = [self._probe_finder(offer.weights, each, tokens) for each in offer.batches]

        def run_batch(index: int, plan: Plan, live: dict) -> StepReport:
            own = (offer.weights, offer.batches[index], plan, finders[index])
            with self._step(*own, exchanged=live) as step:
                report = step.run()
            report.checked = self._checked([offer.batches[index]], PLAIN, is_tree=True)
            return report

        shape, device = self._shape, self._runtime.device
        stems = [stem for batch in offer.batches for stem in batch.stems()]
        gathered = ranks.gather_numbers(process_group, exchanging.packed(stems), device)
        run = error = None
        try:
            pays = exchanging.sooner(shape, exchange if isinstance(exchange, Machine) else None)
            nodes = exchanging.plan(list(map(exchanging.unpacked, gathered)), shape.vocab, pays)
            batches = Batches(offer.batches, finders, shape, tokens)
            run = Exchange(
                self._view, offer.weights, self._runtime, nodes, batches, process_group, stack
            )
        except Exception as raised:
            error = raised
        ranks.raise_together(process_group, error, device)
        with run:
            reports = run.run(run_batch)
            ranks.raise_together(process_group, run.error, device)
        return reports, run.report

    def _run_probes(self, offer: _Offer, count: int) -> None:
        """Runs this rank's probes, and dummies up to ``count``: a probe gathers weights too."""
        for key, sample in offer.probes.items():
            self._probes[key] = self._run_probe(offer.weights, sample, *key[:3])
        for _ in range(count - len(offer.probes)):
            self._run_probe(offer.weights, share.dummy_batch().sample(), False)

    def _run_batch(
        self, offer: _Offer, index: int, microbatches: int, *, is_last: bool
    ) -> StepReport:
        batch = offer.batches[index]
        find = self._probe_finder(offer.weights, batch, offer.share.budgets["microbatch_tokens"])
        with self._step(offer.weights, batch, offer.plans[index], find) as step:
            report = step.run(microbatches=microbatches, is_last=is_last)
        report.checked = self._checked([batch], batch.request)
        return report

    def _run_dummy(self, offer: _Offer, microbatches: int, *, is_last: bool) -> StepReport:
        """Runs passes that match those of other ranks' groups."""
        batch = share.dummy_batch()
        with (
            self._plan(batch, microbatch_tokens=1) as plan,
            self._step(offer.weights, batch, plan, awake) as step,
        ):
            return step.run(microbatches=microbatches, is_last=is_last)


class _Offer(NamedTuple):
    """A rank's share and the objects it was created from."""

    share: ranks.Share
    weights: ReplicatedWeights
    batches: list[Batch]
    plans: list[Plan]
    turns: list[int]
    """Indices of the groups, whose passes match those of other ranks. The others are trees."""
    probes: dict[tuple, Sample]
    """Of missing probes, by key."""
