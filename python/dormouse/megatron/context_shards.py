"""What each context-parallel rank has of a prompt, and the exchange of its K and V: as planned
(docs/queries/context.md)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from .. import queries
from ..runtime import Runtime
from ..trainers.refusals import UnsupportedTrainerError

# The planner's way that ranks carry out.
ALL_GATHER = "all_gather"
# Of as many lengths of prompts.
PLANS_MAX = 64


class Shards:
    """Cuts prompts for the ranks of a context-parallel group."""

    def __init__(self, gpt: GPTModel, runtime: Runtime):
        """``runtime``: its budget is the room for K and V of a prompt and their gradients."""
        self._gpt, self._runtime = gpt, runtime

    def of(self, tokens: int) -> Shard:
        """Returns this rank's part of a prompt.

        Raises :class:`UnsupportedTrainerError` if gathered K and V do not fit.
        """
        gpt, layers = self._gpt, self._gpt.decoder.layers
        own = layers[0].self_attention
        numbers = own.num_query_groups_per_partition * own.hidden_size_per_attention_head
        group, room_bytes = gpt.pg_collection.cp, self._runtime.info()["alloc_budget_bytes"]
        plan = _plan(
            tokens,
            ranks=group.size(),
            multiple=gpt.pg_collection.tp.size() if gpt.config.sequence_parallel else 1,
            layers=len(layers),
            # K and V. A pass may run with other weights than the trainer's.
            row_bytes=2 * numbers * next(layers[0].parameters()).dtype.itemsize,
            room_bytes=room_bytes,
        )
        exchange = plan["exchange"]
        if exchange["way"] != ALL_GATHER:
            prices = "; ".join(
                f"{price['way']}: {price['held_bytes']} held, {price['received_bytes']} received"
                for price in exchange["prices"]
            )
            raise UnsupportedTrainerError(
                f"K and V of a prompt of {tokens} tokens on {group.size()} context-parallel ranks "
                f"have {room_bytes} bytes of room on each, where the planner chooses "
                f"{exchange['way']!r} (bytes of a rank: {prices}); accepted: room for "
                f"{ALL_GATHER!r}, by a larger alloc_budget_bytes, shorter prompts or more "
                "tensor-parallel ranks"
            )
        return Shard(tokens, group, plan)


@functools.lru_cache(PLANS_MAX)
def _plan(
    tokens: int, *, ranks: int, multiple: int, layers: int, row_bytes: int, room_bytes: int
) -> dict:
    no_labels = {"begin": 0, "end": 0}
    prompt = {"sequence": 0, "first_position": 0, "rows": tokens, "prefix": None}
    return queries.context(
        [],
        [prompt | {"labels": no_labels}],
        ranks=ranks,
        multiple=multiple,
        # Gradients are sent as they are, and added in FP32 by their owner.
        kv={"layers": layers, "row_bytes": row_bytes, "gradient_row_bytes": row_bytes},
        room_bytes=room_bytes,
    )


@dataclass(frozen=True)
class Shard:
    """A rank's rows of a prompt, padded to as many on each rank; padding comes last."""

    tokens: int
    """Of the prompt."""
    group: dist.ProcessGroup
    plan: dict
    """The planner's answer."""

    @functools.cached_property
    def _of_ranks(self) -> list[tuple[range, ...]]:
        return [
            tuple(range(run["rows"]["begin"], run["rows"]["end"]) for run in each["runs"])
            for each in self.plan["microbatch"]["ranks"]
        ]

    @property
    def rows(self) -> int:
        """Of each rank, padding included."""
        return self.plan["microbatch"]["rank_rows"]

    @property
    def ranges(self) -> tuple[range, ...]:
        """The rows without padding, among those of the prompt."""
        return self._of_ranks[self.group.rank()]

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Of the rows, in host memory; 0 in padding."""
        return self.own(torch.arange(self.tokens))

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of a tensor ``[tokens]``; 0 in padding."""
        found = [whole[each.start : each.stop] for each in self.ranges]
        return torch.cat([*found, whole.new_zeros(self.rows - sum(map(len, found)))])

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """Where each token of the prompt is among the rows of all ranks."""
        found = torch.empty(self.tokens, dtype=torch.int64)
        for rank, ranges in enumerate(self._of_ranks):
            place = rank * self.rows
            for each in ranges:
                found[each.start : each.stop] = torch.arange(place, place + len(each))
                place += len(each)
        return found

    def gathered(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of the prompt, from those of each rank's rows, differentiable: shapes
        ``[tokens, ...]``, ``[rows, ...]``. The gradients of a rank's rows are the sums of all
        ranks'. Collective, and so is the backward."""
        return _Gathered.apply(key, value, self)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, value, shard):
        ctx.shard = shard
        own = torch.stack((key, value), 1)
        rows = own.new_empty(shard.group.size() * shard.rows, *own.shape[1:])
        dist.all_gather_into_tensor(rows, own, group=shard.group)
        places = shard.places.to(own.device)
        # Each in memory of its own: boundary tensors.
        return tuple(each.index_select(0, places) for each in rows.unbind(1))

    @staticmethod
    def backward(ctx, *gradients):
        shard, ways = ctx.shard, ctx.shard.group.size()
        whole = torch.stack(gradients, 1)
        to_owners = whole.new_zeros(ways * shard.rows, *whole.shape[1:])
        to_owners[shard.places.to(whole.device)] = whole
        own = torch.empty_like(to_owners)
        # Rounded sums of some ranks would travel in a reduction; so each rank's go to the owner.
        dist.all_to_all_single(own, to_owners, group=shard.group)
        wide = torch.promote_types(whole.dtype, torch.float32)
        summed = own.view(ways, shard.rows, *whole.shape[1:]).sum(0, dtype=wide)
        return *summed.to(whole.dtype).unbind(1), None
