"""A GPTModel that is checked before its first shared pass, and scores rows of microbatches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import set_current_microbatch

from .. import failures, ranks
from ..hf import miniature, share
from ..hf.batch import GroupBatch
from ..hf.miniature import Reach
from ..hf.outputs import PLAIN
from ..hf.padded import Places
from ..hf.score_values import Asked
from ..hf.scored_model import AUTO, ScoredModel
from ..hf.sharding import ReplicatedWeights
from ..hf.support import UnsupportedModelError
from ..hf.trial import Trial
from ..hf.window import Window
from ..runtime import Runtime
from ..schedule import Plan
from ..trainers.own_forward import own_forward
from ..trainers.refusals import refuse
from .balancing import Balancing, balances
from .batches import Microbatch
from .context import Context, is_context_parallel
from .context_shards import ALL_GATHER, Shards
from .held import Held
from .part import FORWARDS, Part, own_rows, rows_of_forward
from .refusals import check_model
from .replicas import Dealt
from .routers import Routers
from .stage_step import StageStep
from .view import view_of

# Of the miniature whose prompt is cut: the second chunk follows one, the third two.
CHUNK_ENDS = (3, 6)


class SharedGPT(ScoredModel):
    """Ranks whose passes wait for each other decide together: those of a model, of a
    context-parallel group, and the replicas of an expert-parallel group. What sleeps is each
    rank's own choice, but a probe runs passes, so all of them run it if one needs it."""

    _runs_probes = False

    def __init__(
        self,
        gpt: GPTModel,
        runtime: Runtime,
        *,
        sleep: bool,
        way: str = ALL_GATHER,
        cuts_prompts: bool = False,
    ):
        """``way``: in which context-parallel ranks exchange K and V of prompts. ``cuts_prompts``:
        prompts may run in chunks."""
        self._way, self._cuts_prompts = way, cuts_prompts
        super().__init__(gpt, runtime, sleep=sleep)

    def microbatches(self, places: list[Places], microbatch_tokens: int) -> list[int]:
        """Returns the number of microbatches of each group."""
        found = []
        for each in places:
            with self._plan(GroupBatch(each.group), microbatch_tokens) as plan:
                found.append(share.microbatches_of(plan))
        return found

    @property
    def gpt(self) -> GPTModel:
        """The model, or the part of it on a stage."""
        return self._model

    def own_rows(self, rows: int) -> int:
        """Returns :meth:`.part.Part.own_rows`."""
        return own_rows(self._view, rows)

    def rows(self, places: list[Places], microbatch_tokens: int) -> list[list[int]]:
        """Returns the rows of each group's prompt and microbatches that this rank has."""
        found = []
        for each in places:
            with self._plan(GroupBatch(each.group), microbatch_tokens) as plan:
                forwards = [op for op in plan if op.kind in FORWARDS]
            found.append([rows_of_forward(self._view, op) for op in forwards])
        return found

    def window(
        self,
        places: list[Places],
        shape: tuple[int, int],
        balancing: Balancing | None = None,
        dealt: Dealt | None = None,
        *,
        microbatch_tokens: int,
        graphs: str = AUTO,
    ) -> Window:
        """Returns log-probabilities of labels, ``shape``, to be taken in parts; 0 outside
        ``places``. ``balancing``: of a call whose routers balance experts. ``dealt``: of rows that
        replicas run for each other; then parts are of this replica's batches."""

        @contextlib.contextmanager
        def context() -> Iterator[None]:
            with _outside_schedule(self._model), self._routers.of(balancing):
                yield

        own = (lambda: places, (shape, shape), graphs, context)
        scores = self._call(*own, 1.0, Asked(), microbatch_tokens)
        values = Context(self._model).joined(scores.log_probabilities)
        if dealt is not None:
            values = dealt.read(values)
        scores = dataclasses.replace(scores, log_probabilities=values)
        if balancing is not None:
            balancing.settle()
        return Window(self._model, scores)

    @functools.cached_property
    def _routers(self) -> Routers:
        return Routers(self._model)

    def _plan_of(self, places, batch, microbatch_tokens):
        plan = super()._plan_of(places, batch, microbatch_tokens)
        if self._routers.balancing is not None:
            self._routers.balancing.begin(places, plan)
        return plan

    def _run_probe(self, *arguments, **options):
        with self._routers.of(None):
            return super()._run_probe(*arguments, **options)

    @functools.cached_property
    def held(self) -> Held:
        """What the stage holds whose first part this is."""
        return Held(self._runtime)

    def part(
        self,
        places: list[Places],
        microbatch_tokens: int,
        microbatches: Sequence[Microbatch] | None,
    ) -> Part:
        """Returns this part of a pipeline with the groups of a call. A context manager.
        ``microbatches``: of the trainer, if routers balance experts over them."""
        with _outside_schedule(self._model):
            weights = self._ready()
            batches = [GroupBatch(each.group) for each in places]
            self._check_if_needed(weights, batches, microbatch_tokens, PLAIN)

        def step_of(batch: GroupBatch, plan: Plan) -> StageStep:
            find = self._probe_finder(weights, batch, microbatch_tokens)
            return self._step(weights, batch, plan, find, kind=StageStep)

        def plan_of(batch: GroupBatch, chunk_ends: Sequence[int]) -> Plan:
            # The last token of each part runs with what follows it.
            cuts = [batch.group.prompt[: end + 1] for end in chunk_ends]
            return self._plan(batch, microbatch_tokens, cuts)

        balancing = None
        if microbatches is not None:
            balancing = Balancing(self._model, microbatches, places)
        device = self._runtime.device
        return Part(self._view, weights, device, places, batches, balancing, plan_of, step_of)

    def state_check(self) -> Callable[[], None]:
        """Returns a function that raises :class:`UnsupportedTrainerError` if the model or autocast
        is not as :meth:`part` found it."""
        state, autocast = self._state, self._autocast

        def check() -> None:
            now = self._autocast
            with _outside_schedule(self._model):
                is_same = state.fingerprint.matches()
                what = "" if is_same else state.fingerprint.difference()
            accepted = "a change around the call of the schedule, on every stage"
            refuse(
                (
                    now != autocast,
                    f"autocast is {now or 'off'} in a pipeline's call of the model, and "
                    f"{autocast or 'off'} in its passes, which have run",
                    accepted,
                ),
                (
                    not is_same,
                    f"the model of a pipeline is changed after its passes have run: {what}",
                    accepted,
                ),
            )

        return check

    def _miniatures(self, reach, request, *, is_tree):
        found = super()._miniatures(reach, request, is_tree=is_tree)
        if self._cuts_prompts:
            found.append(miniature.group(self._view, miniature.SHORT, request, CHUNK_ENDS))
        return found

    def _resolve(self):
        check_model(self._model)
        return view_of(self._model, self._routers, Shards(self._model, self._way))

    def _refuse_known_causes(self):
        check_model(self._model)

    def _weights(self):
        return TensorParallelWeights(self._model)

    def _check_if_needed(self, weights, batches, microbatch_tokens, request):
        super()._check_if_needed(weights, batches, microbatch_tokens, request)
        runs_probes = self._runs_probes and torch.is_grad_enabled()
        gpt = self._model
        come_first = waits_in_passes(gpt) or (balances(gpt) and not is_pipeline(gpt))
        if not runs_probes or not come_first:
            return
        # Residency may differ between replicas, and with it what needs a probe; so do responses of
        # context-parallel ranks. Owners of rows are found by the order of passes, which a probe
        # would change.
        sample = batches[0].sample()
        _, *others = self._probe_key(batches[0], microbatch_tokens, False, request)
        for key in ((is_longer, *others) for is_longer in (False, True)):
            if not all_hold(self._model, super()._known_probe(key) is not None):
                self._probes[key] = self._run_probe(weights, sample, *key[:3])

    def _outdated(self, *arguments, **options):
        reason = super()._outdated(*arguments, **options)
        decided = largest(self._model, [reason is not None, self._sleep])
        is_outdated, self._runs_probes = map(bool, decided)
        return (reason or "the check of another rank") if is_outdated else None

    def _check(self, weights, reach, *arguments, **options):
        refusal = checked = None
        # Replicas of an expert-parallel group have other lengths.
        reach = Reach(*largest(self._model, reach))
        try:
            with self._routers.of(None):
                checked = super()._check(weights, reach, *arguments, **options)
        except UnsupportedModelError as error:
            if error.__cause__ is not None:
                # A pass failed, in which others may wait: they are told. Or another rank's did.
                failures.check()
                raise
            refusal = error
        if all_hold(self._model, refusal is None):
            return checked
        # Ranks of another stage check other layers.
        raise refusal or UnsupportedModelError(
            "another rank that runs passes of the model with this one refuses its part of it"
        )

    def _known_probe(self, key):
        probe = super()._known_probe(key)
        # A probe runs passes, with collectives of the tensor-parallel ranks alone: stages find
        # theirs at other times, and replicas of an expert-parallel group before all passes.
        return probe if all_hold(self._model, probe is not None, _group(self._model)) else None

    def _fits(self, *arguments, **options):
        return all_hold(self._model, super()._fits(*arguments, **options))


@contextlib.contextmanager
def _outside_schedule(gpt: GPTModel) -> Iterator[None]:
    """Context of a model without what a schedule does to it: the forward in the place of its own,
    the number of the microbatch, and what the stage before sent last."""
    set_current_microbatch(gpt, 0)
    gpt.set_input_tensor(None)
    with own_forward(gpt):
        yield


class TensorParallelWeights(ReplicatedWeights):
    """Each rank has a part of every matrix, and all of the norms."""

    # As in Megatron's FP32 main_grad; groups have more passes than the trainer has microbatches.
    sums_wide = True
    # main_grad has them, and routers would count the tokens of another pass.
    needs_zeros = False

    @property
    def splits_prompts(self):
        return is_context_parallel(self._module)

    @property
    def description(self):
        return f"in {_group(self._module).size()} parts"

    def trial(self, model, dtype):
        return _ParallelTrial(model, dtype)

    def fits_twice(self, model, dtype):
        return all_hold(self._module, super().fits_twice(model, dtype))


class _ParallelTrial(Trial):
    def __enter__(self):
        # The softmax of a model in 16 bits returns as many, whatever it is given.
        self._narrow = [
            module
            for module in self._model.modules()
            if isinstance(module, FusedScaleMaskSoftmax)
            and module.input_in_float16
            and self._dtype is not None
        ]
        for softmax in self._narrow:
            softmax.input_in_float16 = False
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        for softmax in self._narrow:
            softmax.input_in_float16 = True

    def take(self, *, kept=False):
        grads = super().take(kept=kept)
        for name, parameter in self._own.items():
            # Of rows that are this rank's; Megatron adds them up after the last backward.
            if name in grads and getattr(parameter, "sequence_parallel", False):
                _sum(self._model, grads[name])
        if is_context_parallel(self._model):
            # Each rank has all responses, so all gradients are there as often as ranks; those of
            # dense runs too. Experts of one rank alone had the rows of all.
            for name, grad in grads.items():
                if getattr(self._own.get(name), "allreduce", True):
                    _sum(self._model, grad, self._model.pg_collection.cp)
        return grads

    def summed(self, table):
        return _sum(self._model, table, joint_group(self._model))


def _group(gpt: GPTModel) -> dist.ProcessGroup:
    return gpt.pg_collection.tp


def _sum(
    gpt: GPTModel, table: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Adds a tensor up over the ranks of a group, in place, and returns it. Default: the
    tensor-parallel one."""
    group = group or _group(gpt)
    if group.size() > 1:
        moved = table.to(_device(gpt))
        dist.all_reduce(moved, group=group)
        table.copy_(moved)
    return table


def all_hold(gpt: GPTModel, holds: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether it holds on every rank of a group. Default: of those that decide together."""
    failed = torch.tensor([not holds], dtype=torch.int64)
    for each in [group] if group is not None else deciding_groups(gpt):
        _sum(gpt, failed, each)
    return not failed.item()


def largest(
    gpt: GPTModel, numbers: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[int]:
    """Returns the largest of each over the ranks of a group. Default: of those that decide
    together."""
    own = torch.tensor(list(numbers), dtype=torch.int64)
    for each in [group] if group is not None else deciding_groups(gpt):
        own = torch.stack(ranks.gather_numbers(each, own, _device(gpt))).amax(0)
    return own.tolist()


def is_expert_parallel(gpt: GPTModel) -> bool:
    """Returns whether the experts of a layer are on several ranks."""
    return gpt.config.expert_model_parallel_size > 1


def joint_group(gpt: GPTModel) -> dist.ProcessGroup:
    """Returns the ranks whose passes wait for each other: those of a tensor-parallel, a
    context-parallel and an expert-parallel group."""
    is_split = is_context_parallel(gpt)
    same_rows = parallel_state.get_tensor_and_context_parallel_group() if is_split else _group(gpt)
    if not is_expert_parallel(gpt):
        return same_rows
    groups = (same_rows, gpt.pg_collection.tp_ep)
    smaller, larger = sorted(groups, key=lambda group: group.size())
    members = map(set, map(dist.get_process_group_ranks, (smaller, larger)))
    refuse(
        (
            not set.issubset(*members),
            f"expert-parallel groups of {groups[1].size()} ranks cross tensor-parallel ones of "
            f"{groups[0].size()}",
            "groups of which one contains the other",
        ),
        (
            is_split and groups[1].size() < same_rows.size(),
            f"experts are on {groups[1].size()} of the {same_rows.size()} ranks that have parts of "
            "a row: gradients of an expert are on several of them",
            "expert-parallel groups that contain context-parallel ones",
        ),
    )
    return larger


def is_pipeline(gpt: GPTModel) -> bool:
    """Returns whether the model is cut into stages."""
    return gpt.config.pipeline_model_parallel_size > 1


def waits_in_passes(gpt: GPTModel) -> bool:
    """Returns whether passes wait for those of ranks with other rows."""
    return is_expert_parallel(gpt) or is_context_parallel(gpt)


def model_groups(gpt: GPTModel) -> list[dist.ProcessGroup]:
    """Returns groups that lead from each rank of a model, which have the same rows, to all: those
    of the second have what all of the first have."""
    stages = parallel_state.get_model_parallel_group()
    if not is_context_parallel(gpt):
        return [stages]
    same_rows = parallel_state.get_tensor_and_context_parallel_group()
    return [stages, same_rows] if is_pipeline(gpt) else [same_rows]


def deciding_groups(gpt: GPTModel) -> list[dist.ProcessGroup]:
    """Returns groups that lead, as :func:`model_groups`, from each rank to all that decide
    together: those of a model, and of all its stages' experts."""
    if not is_expert_parallel(gpt):
        return model_groups(gpt)
    joint = joint_group(gpt)
    if not is_pipeline(gpt):
        return [joint]
    return [parallel_state.get_model_parallel_group(), joint]


def _device(gpt: GPTModel) -> torch.device:
    return next(gpt.parameters()).device
