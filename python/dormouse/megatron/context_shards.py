"""What each context-parallel rank has of a prompt, and the exchange of its K and V: as planned
(docs/queries/context.md)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from .. import queries
from ..trainers.refusals import UnsupportedTrainerError
from .balancing import ends_at_router
from .context_ring import ShardRing

# The planner's ways.
ALL_GATHER, RING = "all_gather", "ring"
# Of as many lengths of prompts.
PLANS_MAX = 64


class Shards:
    """Cuts prompts for the ranks of a context-parallel group."""

    def __init__(self, gpt: GPTModel, way: str):
        """``way``: in which K and V of prompts are exchanged."""
        self._gpt, self._way = gpt, way

    def of(self, tokens: int) -> Shard:
        """Returns this rank's part of a prompt."""
        sizes = _sizes(self._gpt)
        if self._way == RING and not ends_at_router(self._gpt):
            # No row of a prompt reads K and V of the last layer.
            sizes |= {"layers": max(1, sizes["layers"] - 1)}
        plan = _plan(None, tokens, way=self._way, room_bytes=None, **sizes)
        return Shard(tokens, self._gpt.pg_collection.cp, plan)


def choose_way(gpt: GPTModel, tokens: int, layers: int, room_bytes: int) -> str:
    """Returns the planner's way for K and V of prompts of at most ``tokens`` tokens in ``layers``
    layers. ``room_bytes``: what each rank has for them and their gradients.

    Raises :class:`UnsupportedTrainerError` if they fit in none.
    """
    sizes = _sizes(gpt) | {"layers": layers}
    exchange = _plan(tokens, None, way=None, room_bytes=room_bytes, **sizes)["exchange"]
    held_bytes = {price["way"]: price["held_bytes"] for price in exchange["prices"]}
    if held_bytes[exchange["way"]] > room_bytes:
        ways = ", ".join(f"{size} as {way!r}" for way, size in held_bytes.items())
        raise UnsupportedTrainerError(
            f"K and V of a prompt of {tokens} tokens on {gpt.pg_collection.cp.size()} "
            f"context-parallel ranks, and their gradients, take of each, beside its own part, "
            f"{ways} bytes; accepted: {room_bytes}, the smallest alloc_budget_bytes of a rank"
        )
    return exchange["way"]


def _sizes(gpt: GPTModel) -> dict[str, int]:
    layers, own = gpt.decoder.layers, gpt.decoder.layers[0].self_attention
    # K and V. A pass may run with other weights than the trainer's.
    dtype = next(layers[0].parameters()).dtype
    numbers = 2 * own.num_query_groups_per_partition * own.hidden_size_per_attention_head
    return {
        "ranks": gpt.pg_collection.cp.size(),
        "multiple": gpt.pg_collection.tp.size() if gpt.config.sequence_parallel else 1,
        "layers": len(layers),
        "row_bytes": numbers * dtype.itemsize,
        "accumulator_row_bytes": numbers * torch.promote_types(dtype, torch.float32).itemsize,
    }


@functools.lru_cache(PLANS_MAX)
def _plan(
    prefix: int | None,
    microbatch: int | None,
    *,
    ranks: int,
    multiple: int,
    layers: int,
    row_bytes: int,
    accumulator_row_bytes: int,
    way: str | None,
    room_bytes: int | None,
) -> dict:
    """``prefix``, ``microbatch``: rows of a prompt that is read, and of one that runs."""

    def pieces(rows: int | None) -> list[dict]:
        no_labels = {"begin": 0, "end": 0}
        prompt = {"sequence": 0, "first_position": 0, "rows": rows, "prefix": None}
        return [] if rows is None else [prompt | {"labels": no_labels}]

    return queries.context(
        pieces(prefix),
        pieces(microbatch),
        ranks=ranks,
        multiple=multiple,
        kv={
            "layers": layers,
            "row_bytes": row_bytes,
            # To their owner gradients are sent as they are, and added in FP32 there.
            "gradient_row_bytes": row_bytes,
            "accumulator_row_bytes": accumulator_row_bytes,
        },
        # Gathered K and V of all layers wait for C, and accumulators on each rank.
        reduced="before_c",
        way=way,
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
    def ring(self) -> ShardRing | None:
        """By which K and V pass; None if they are gathered."""
        is_ring = self.plan["exchange"]["way"] == RING
        return ShardRing(self.group, self._of_ranks) if is_ring else None

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

    def boundary(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what this rank keeps of K and V of a layer, of which it has its rows: each in
        memory of its own."""
        if self.ring is not None:
            return key.contiguous(), value.contiguous()
        return self.gathered(key, value)

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
