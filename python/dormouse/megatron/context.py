"""Context parallelism: rows whose tokens are on several ranks.

Each row is cut in twice as many chunks as there are ranks; rank r of n has the chunks r and
2n-1-r, as ``get_batch_on_this_cp_rank`` deals them. In shared passes prompts are dealt likewise,
and each response is on one rank, whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from .. import ranks
from ..group import Group
from ..hf.padded import Places
from ..trainers.refusals import refuse
from .batches import Microbatch, check_microbatch

CHUNKS_OF_RANK = 2


def is_context_parallel(gpt: GPTModel) -> bool:
    """Returns whether tokens of a row are on several ranks."""
    return gpt.config.context_parallel_size > 1


def positions_of(chunk: int, ways: int, rank: int) -> torch.Tensor:
    """Returns the positions of a rank's rows, ``[2 * chunk]``. ``chunk``: rows of a chunk."""
    chunks = torch.arange(CHUNKS_OF_RANK * ways * chunk).view(-1, chunk)
    return chunks[[rank, CHUNKS_OF_RANK * ways - 1 - rank]].flatten()


class Context:
    """The ranks that have the tokens of the same rows."""

    def __init__(self, gpt: GPTModel):
        self.group = gpt.pg_collection.cp
        self.ways = self.group.size() if is_context_parallel(gpt) else 1
        self._device = next(gpt.parameters()).device

    def columns_of(self, count: int) -> torch.Tensor:
        """Returns the columns of whole rows that this rank has, of ``count`` own ones."""
        if self.ways == 1:
            return torch.arange(count)
        return positions_of(count // CHUNKS_OF_RANK, self.ways, self.group.rank())

    def whole(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Returns microbatches with whole rows, in host memory; losses are 0 or 1. Collective.

        ``microbatches``: this rank's, of the same shapes on every rank of the group.
        """
        if self.ways == 1:
            return list(microbatches)
        shapes = [each.tokens.shape for each in microbatches]
        for each in microbatches:
            check_microbatch(each)
            refuse(
                (
                    each.tokens.shape[1] % CHUNKS_OF_RANK,
                    f"a batch has {each.tokens.shape[1]} columns of {self.ways} context-parallel "
                    "ranks' each",
                    f"a multiple of {CHUNKS_OF_RANK}, as of get_batch_on_this_cp_rank",
                )
            )
        numbers = [
            field.flatten().cpu().to(torch.int64)
            for tokens, labels, mask in microbatches
            for field in (tokens, labels, mask != 0)
        ]
        of_ranks = ranks.gather_numbers(self.group, torch.cat(numbers), self._device)
        split = [each.split(list(map(len, numbers))) for each in of_ranks]
        found = []
        for place, (rows, columns) in enumerate(shapes):
            fields = []
            for number in range(3 * place, 3 * place + 3):
                field = torch.empty(rows, columns * self.ways, dtype=torch.int64)
                for rank, own in enumerate(split):
                    at = positions_of(columns // CHUNKS_OF_RANK, self.ways, rank)
                    field[:, at] = own[number].view(rows, columns)
                fields.append(field)
            found.append(Microbatch(*fields))
        return found

    def dealt(self, places: Sequence[Places], row: int) -> list[Places]:
        """Returns the groups with this rank's responses, which have about as many tokens as those
        of other ranks. ``row``: of the values, for the response of a group that has none here, or
        for the group of a call without any."""
        found = places or [dummy_of(row)]
        sizes = sorted(
            (-len(response), group, number)
            for group, each in enumerate(found)
            for number, response in enumerate(each.group.responses)
        )
        loads, own = [0] * self.ways, set()
        for size, group, number in sizes:
            rank = loads.index(min(loads))
            loads[rank] -= size
            if rank == self.group.rank():
                own.add((group, number))
        return [self._own(each, group, own, row) for group, each in enumerate(found)]

    def _own(self, places: Places, group: int, own: set[tuple[int, int]], row: int) -> Places:
        numbers = [number for number in range(len(places.rows)) if (group, number) in own]
        responses = [places.group.responses[number] for number in numbers]
        rows = [places.rows[number] for number in numbers]
        indices = [places.indices[number] for number in numbers]
        if not numbers:
            responses, rows, indices = [[0]], [row], [(row, slice(0, 1))]
        weights = [1.0] * len(responses)
        # All run, whatever losses depend on: a prompt's passes wait for each other.
        return dataclasses.replace(
            places,
            group=Group(places.group.prompt, responses, weights),
            rows=rows,
            indices=indices,
            microbatches=1,
            prompt_rows=tuple(places.rows),
        )

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values of all ranks' responses; each rank's are 0 elsewhere. Collective, and
        so is the backward."""
        return values if self.ways == 1 else _Summed.apply(values, self.group)


def dummy_of(row: int) -> Places:
    """Returns a group that no row of the trainer's is in, and that runs. ``row``: of the values."""
    group = Group([0, 0], [[0]], [1.0])
    return Places(group, [row], [(row, slice(0, 1))], microbatches=1)


class _Summed(torch.autograd.Function):
    """The sum over ranks. The gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx, gradient):
        return _summed(gradient, ctx.group), None


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    found = tensor.clone()
    dist.all_reduce(found, group=group)
    return found
