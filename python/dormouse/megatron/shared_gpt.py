"""A GPTModel that is checked before its first shared pass, and scores rows of microbatches."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.models.gpt import GPTModel

from ..hf.padded import Places
from ..hf.scored_model import AUTO, ScoredModel
from ..hf.sharding import ReplicatedWeights
from ..hf.trial import Trial
from ..hf.window import Window
from ..trainers.own_forward import own_forward
from .refusals import check_model
from .view import view_of


class SharedGPT(ScoredModel):
    """Ranks of a tensor-parallel group run the same passes, so they decide together."""

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

    def _resolve(self):
        check_model(self._model)
        return view_of(self._model)

    def _refuse_known_causes(self):
        check_model(self._model)

    def _weights(self):
        return TensorParallelWeights(self._model)

    def _outdated(self, *arguments, **options):
        reason = super()._outdated(*arguments, **options)
        if _all(self._model, reason is None):
            return None
        return reason or "the check of another rank"

    def _fits(self, *arguments, **options):
        return _all(self._model, super()._fits(*arguments, **options))


class TensorParallelWeights(ReplicatedWeights):
    """Each rank has a part of every matrix, and all of the norms."""

    @property
    def description(self):
        return f"in {_group(self._module).size()} parts"

    def trial(self, model, dtype):
        return _ParallelTrial(model, dtype)

    def fits_twice(self, model, dtype):
        return _all(self._module, super().fits_twice(model, dtype))


class _ParallelTrial(Trial):
    def __enter__(self):
        # Softmax of a model in 16 bits returns them, whatever it is given.
        self._narrow = []
        if self._dtype is not None:
            self._narrow = [m for m in self._model.modules() if isinstance(m, FusedScaleMaskSoftmax)]
        for softmax in self._narrow:
            softmax.input_in_float16 = False
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        for softmax in self._narrow:
            softmax.input_in_float16 = True

    def take(self, *, to_host=False):
        grads = super().take(to_host=to_host)
        for name, parameter in self._own.items():
            # Of rows that are this rank's; Megatron adds them up after the last backward.
            if name in grads and getattr(parameter, "sequence_parallel", False):
                _sum(self._model, grads[name])
        return grads

    def summed(self, table):
        return _sum(self._model, table)


def _group(gpt: GPTModel) -> dist.ProcessGroup:
    return gpt.pg_collection.tp


def _sum(gpt: GPTModel, table: torch.Tensor) -> torch.Tensor:
    """Adds a tensor up over the ranks of the group, in place, and returns it."""
    group = _group(gpt)
    if group.size() > 1:
        moved = table.to(_device(gpt))
        dist.all_reduce(moved, group=group)
        table.copy_(moved)
    return table


def _all(gpt: GPTModel, holds: bool) -> bool:
    """Returns whether it holds on every rank of the group."""
    return not _sum(gpt, torch.tensor([not holds], dtype=torch.int64)).item()


def _device(gpt: GPTModel) -> torch.device:
    return next(gpt.parameters()).device
