"""Prompts that are shared by the rows of several data-parallel replicas.

Each replica has batches of its own, and rows of one prompt may be in several of them. Tokens of all
rows go to all replicas, and the planner assigns rows: those of a prompt to one replica, or to more
where that ends sooner (docs/queries/shares.md). Each replica runs its rows, and sends their
log-probabilities to the replicas whose losses read them; gradients come back. So what travels is a
few numbers for each token, and no K and V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from .. import _native as native
from .. import queries, ranks
from ..group import Group
from ..hf.padded import Places
from ..schedule import Forest
from .batches import FIELDS, Microbatch, check_microbatch


# Of the planner's query: groups may be cut, so that work is even; or are whole, those with the most
# work first, each to the replica with the least.
CUT = {"method": "contiguous", "unit": "leaf"}
WHOLE = {"method": "longest_first", "unit": "tree"}


class Replicas:
    """The replicas of a model."""

    def __init__(self, gpt: GPTModel):
        self.group = parallel_state.get_data_parallel_group()
        self._device = next(gpt.parameters()).device
        self._shape = model_shape(gpt.config, gpt.vocab_size)

    def gathered(self, microbatches: Sequence[Microbatch]) -> list[list[Microbatch]]:
        """Returns the microbatches of each replica, in host memory; losses are 0 or 1. Collective.

        ``microbatches``: this replica's, with whole rows. Raises :class:`UnsupportedTrainerError`.
        """
        for each in microbatches:
            check_microbatch(each)
        shapes = [size for each in microbatches for size in each.tokens.shape]
        numbers = [torch.tensor([len(microbatches), *shapes])]
        for tokens, labels, mask in microbatches:
            numbers += [each.flatten().cpu().long() for each in (tokens, labels, mask != 0)]
        of_replicas = ranks.gather_numbers(self.group, torch.cat(numbers), self._device)
        return list(map(_unpacked, of_replicas))

    def dealt(
        self,
        places: Sequence[Places],
        of_replicas: Sequence[Sequence[Microbatch]],
        runners: dict[int, int],
    ) -> Dealt:
        """Returns this replica's part of the rows. The same arguments on each replica.

        ``places``: the groups of all rows, which are numbered by replica. ``runners``: the replica
        that runs each row.
        """
        runner_of = sorted(runners.items())
        own = self.group.rank()
        # Of each replica, the row after its last.
        ends = torch.tensor([sum(len(x.tokens) for x in each) for each in of_replicas]).cumsum(0)
        begin, end = ([0, *ends.tolist()][own + at] for at in (0, 1))
        run = [row for row, runner in runner_of if runner == own]
        readers = torch.bucketize(torch.tensor(run, dtype=torch.int64), ends, right=True)
        read: list[list[int]] = [[] for _ in of_replicas]
        for row, runner in runner_of:
            if begin <= row < end:
                read[runner].append(row - begin)
        numbers = {row: number for number, row in enumerate(run)}
        parts = [_part(each, numbers) for each in places]
        return Dealt(
            self.group,
            ranks.digest(runner_of),
            [each for each in parts if each is not None],
            len(run),
            end - begin,
            torch.bincount(readers, minlength=len(ends)).tolist(),
            read,
        )

    def assigned(
        self, places: Sequence[Places], microbatch_tokens: int, way: dict[str, str] = CUT
    ) -> dict[int, int]:
        """Returns the replica that runs each row of the groups, by the times of its passes.
        ``microbatch_tokens``: rows of a microbatch of the passes. ``way``: :data:`CUT` or
        :data:`WHOLE`."""
        if not places:
            return {}
        parents, lengths, rows = [], [], []
        for each in places:
            prompt, responses = len(each.group.prompt), list(map(len, each.group.responses))
            rows += each.rows
            if len(responses) == 1:
                parents.append(None)
                lengths.append(prompt + responses[0])
                continue
            root = len(parents)
            parents += [None, *[root] * len(responses)]
            lengths += [prompt, *responses]
        with Forest.from_nodes(parents, lengths) as forest:
            answer = queries.shares(
                forest,
                ranks=self.group.size(),
                microbatch_tokens=microbatch_tokens,
                model=self._shape,
                **way,
            )
        return {
            rows[sequence]: replica
            for replica, share in enumerate(answer["shares"])
            for sequence in share["sequences"]
        }


@dataclass(frozen=True)
class Dealt:
    """A replica's part of the rows of all."""

    group: dist.ProcessGroup
    digest: str
    """Of which replica runs which row: the same on all."""
    places: list[Places]
    """The groups that it runs, whose rows are numbered anew."""
    rows: int
    """Number of rows that it runs."""
    _own_rows: int
    """Number of rows of its batches."""
    _sent: list[int]
    """How many of the rows that it runs each replica reads: in their order."""
    _read: list[list[int]]
    """The rows of its batches that each replica runs."""

    def read(self, values: torch.Tensor) -> torch.Tensor:
        """Returns :meth:`to_readers`, differentiable. The backward is collective, too."""
        return _Read.apply(values, self)

    def to_readers(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values of the rows of this replica's batches, ``[rows of them, columns]``; 0
        in rows that are in no group. Collective.

        ``values``: of the rows that it runs, ``[rows, columns]``; further ones are left out.
        """
        run = self._exchanged(values[: self.rows], self._sent, list(map(len, self._read)))
        found = values.new_zeros(self._own_rows, *values.shape[1:])
        return found.index_copy_(0, self._index(values.device), run)

    def to_runners(self, gradients: torch.Tensor, count: int) -> torch.Tensor:
        """Returns the gradients of what :meth:`to_readers` takes, which has ``count`` rows, from
        those of what it returns. Collective."""
        own = gradients[self._index(gradients.device)]
        found = self._exchanged(own, list(map(len, self._read)), self._sent)
        return torch.nn.functional.pad(found, (0, 0, 0, count - len(found)))

    def _index(self, device: torch.device) -> torch.Tensor:
        """Returns the rows of this replica's batches in the order in which they arrive."""
        return torch.tensor(sum(self._read, []), dtype=torch.int64, device=device)

    def _exchanged(
        self, rows: torch.Tensor, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=self.group)
        return found


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, dealt):
        ctx.dealt, ctx.count = dealt, len(values)
        return dealt.to_readers(values)

    @staticmethod
    def backward(ctx, gradients):
        return ctx.dealt.to_runners(gradients, ctx.count), None


def model_shape(config: TransformerConfig, vocab_size: int) -> native.ModelShape:
    """Returns the figures of the whole model, from which every stage plans the same."""
    hidden, width = config.hidden_size, config.kv_channels
    query, key_value = (
        hidden * width * heads for heads in (config.num_attention_heads, config.num_query_groups)
    )
    inner = config.ffn_hidden_size
    if config.num_moe_experts is not None:
        inner = (config.moe_ffn_hidden_size or inner) * config.moe_router_topk
    return native.ModelShape(
        layers=config.num_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_dim=width,
        vocab=vocab_size,
        layer_linear_weights=2 * (query + key_value)
        + hidden * inner * (3 if config.gated_linear_unit else 2),
        kv_linear_weights=2 * key_value,
        last_layer_prefix_weights=2 * key_value + query // 3,
        head_weights=hidden * vocab_size,
        dtype_bytes=config.params_dtype.itemsize,
        saved_bytes_per_token_layer=0,
    )


def _unpacked(numbers: torch.Tensor) -> list[Microbatch]:
    """Returns the microbatches of a replica's message."""
    count = int(numbers[0])
    shapes = numbers[1 : 1 + 2 * count].view(-1, 2).tolist()
    sizes = [rows * columns for rows, columns in shapes for _ in FIELDS]
    fields = iter(numbers[1 + 2 * count :].split(sizes))
    return [Microbatch(*(next(fields).view(shape) for _ in FIELDS)) for shape in shapes]


def _part(places: Places, numbers: dict[int, int]) -> Places | None:
    """Returns what a replica runs of a group; None: nothing. ``numbers``: of its rows."""
    own = [at for at, row in enumerate(places.rows) if row in numbers]
    if not own:
        return None
    responses = [places.group.responses[at] for at in own]
    rows = [numbers[places.rows[at]] for at in own]
    return replace(
        places,
        group=Group(places.group.prompt, responses, [1.0] * len(own)),
        rows=rows,
        indices=[(row, places.indices[at][1]) for row, at in zip(rows, own, strict=True)],
        # All run, whatever losses depend on: they are those of other replicas.
        microbatches=1,
    )
