"""A GPTModel that is checked before its first shared pass, and scores rows of microbatches."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.gpt import GPTModel

from ..hf.batch import GroupBatch
from ..hf.outputs import PLAIN
from ..hf.padded import Places
from ..hf.scored_model import AUTO, ScoredModel
from ..hf.sharding import ReplicatedWeights
from ..hf.support import UnsupportedModelError
from ..hf.trial import Trial
from ..hf.window import Window
from ..schedule import Plan
from ..trainers.own_forward import own_forward
from .held import Held
from .part import Part
from .refusals import check_model
from .stage_step import StageStep
from .view import view_of


class SharedGPT(ScoredModel):
    """Ranks of a model-parallel group run passes that fit together, so they decide together."""

    def window(
        self,
        places: list[Places],
        shape: tuple[int, int],
        *,
        microbatch_tokens: int,
        graphs: str = AUTO,
    ) -> Window:
        """Returns log-probabilities of labels, ``shape``, to be taken in parts; 0 outside
        ``places``."""
        context = functools.partial(own_forward, self._model)
        scores = self._call(lambda: places, shape, graphs, context, 1.0, False, microbatch_tokens)
        return Window(self._model, scores)

    @functools.cached_property
    def held(self) -> Held:
        """What the stage holds whose first part this is."""
        return Held(self._runtime)

    def part(self, places: list[Places], microbatch_tokens: int) -> Part:
        """Returns this part of a pipeline with the groups of a call. A context manager."""
        with own_forward(self._model):
            weights = self._ready()
            batches = [GroupBatch(each.group) for each in places]
            self._check_if_needed(weights, batches, microbatch_tokens, PLAIN)

        def step_of(batch: GroupBatch, plan: Plan) -> StageStep:
            find = self._probe_finder(weights, batch, microbatch_tokens)
            return self._step(weights, batch, plan, find, kind=StageStep)

        def plan_of(batch: GroupBatch) -> Plan:
            return self._plan(batch, microbatch_tokens)

        device = self._runtime.device
        return Part(self._view, weights, device, places, batches, plan_of, step_of)

    def _resolve(self):
        check_model(self._model)
        return view_of(self._model)

    def _refuse_known_causes(self):
        check_model(self._model)

    def _weights(self):
        return TensorParallelWeights(self._model)

    def _outdated(self, *arguments, **options):
        reason = super()._outdated(*arguments, **options)
        if all_hold(self._model, reason is None):
            return None
        return reason or "the check of another rank"

    def _check(self, *arguments, **options):
        refusal = checked = None
        try:
            checked = super()._check(*arguments, **options)
        except Exception as error:
            refusal = error
        if all_hold(self._model, refusal is None):
            return checked
        # Ranks of another stage check other layers.
        raise refusal or UnsupportedModelError(
            "another rank of the model-parallel group refuses its part of the model"
        )

    def _known_probe(self, key):
        probe = super()._known_probe(key)
        # A probe runs passes, with collectives of the tensor-parallel ranks alone: stages find
        # theirs at other times.
        return probe if all_hold(self._model, probe is not None, _group(self._model)) else None

    def _fits(self, *arguments, **options):
        return all_hold(self._model, super()._fits(*arguments, **options))


class TensorParallelWeights(ReplicatedWeights):
    """Each rank has a part of every matrix, and all of the norms."""

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
        return grads

    def summed(self, table):
        return _sum(self._model, table)


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
    """Returns whether it holds on every rank of a group. Default: of all that have a part of the
    model."""
    failed = torch.tensor([not holds], dtype=torch.int64)
    return not _sum(gpt, failed, group or parallel_state.get_model_parallel_group()).item()


def _device(gpt: GPTModel) -> torch.device:
    return next(gpt.parameters()).device
