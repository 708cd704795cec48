"""The forward of a microbatch: packed sequences that follow the prefixes of a path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .. import failures
from ..schedule import Member
from . import attention, checkpointing, guard, mixers, outputs, recurrent, registry, support
from .batch import Batch
from .mixers import Handlers
from .outputs import PLAIN, Output, Request
from .prefix import PrefixForward, joined, joined_indexers, named, over_path


class Pack(NamedTuple):
    """The rows of a microbatch."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: Sequence[tuple[int, int]]
    """The rows of each sequence."""
    experts: torch.Tensor | None = None
    """Recorded experts of the rows; None: routers select by themselves."""

    def part(self, start: int, end: int) -> Pack:
        """Returns the rows of one sequence."""
        experts = None if self.experts is None else self.experts[start:end]
        own = self.tokens[start:end], self.positions[start:end]
        return Pack(*own, [(0, end - start)], experts)


def pack_members(batch: Batch, members: Sequence[Member]) -> Pack:
    """Packs the members of a microbatch."""
    tokens, positions, segments, experts = [], [], [], []
    for member in members:
        first, count = member.first_position, len(member.rows)
        at = range(first, first + count)
        own = batch.tokens(member.sequence, at)
        tokens.append(own)
        positions.append(torch.arange(first, first + count, device=own.device))
        segments.append((member.rows.start, member.rows.stop))
        experts.append(batch.experts(member.sequence, at))
    recorded = None if experts[0] is None else torch.cat(experts)
    return Pack(torch.cat(tokens), torch.cat(positions), segments, recorded)


def dummy_pack(batch: Batch, sequence: int, at: int) -> Pack:
    """Returns one token of a sequence, at position ``at``, which follows a prefix: a microbatch for
    ranks whose passes must match those of others."""
    tokens = batch.tokens(sequence, range(at, at + 1))
    experts = batch.experts(sequence, range(at, at + 1))
    return Pack(tokens, torch.full_like(tokens, at), [(0, 1)], experts)


def _within(rows: torch.Tensor | None, start: int, end: int) -> torch.Tensor | None:
    """Returns the rows from ``start`` to ``end``, counted from ``start``."""
    return None if rows is None else rows[(rows >= start) & (rows < end)] - start


def microbatch_output(
    view: support.ModelView,
    path: Sequence[PrefixForward],
    pack: Pack,
    request: Request = PLAIN,
    logits_rows: torch.Tensor | None = None,
    *,
    checkpoints: bool = True,
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Output:
    """Returns what losses read of packed sequences that follow the prefixes of ``path``, the root
    first.

    ``logits_rows``: see :meth:`.support.ModelView.run`. ``checkpoints``: whether parts that the
    model checkpoints are computed again in backward. ``around``: the context of what runs, also of
    parts that are computed again.
    """
    failures.check()
    if view.way is support.Way.ALONE and len(pack.segments) > 1:
        return Output.joined(
            [
                microbatch_output(
                    view,
                    path,
                    pack.part(start, end),
                    request,
                    _within(logits_rows, start, end),
                    checkpoints=checkpoints,
                    around=around,
                )
                for start, end in pack.segments
            ]
        )
    packed = attention.Packed.of(pack.segments)
    own = path[0].mixers if path else mixers.of(view)
    left = {layer for layer, pair in enumerate(path[0].leaves) if pair} if path else set()
    resumed = recurrent.Resumed(path[-1].states if path else None, packed)

    computed_again = 0

    def layer_of(caller: torch.nn.Module | int) -> int:
        if not path:
            # No boundary tensors to find.
            return 0
        layer = path[0].layer_of.get(caller)
        if computed_again:
            return layer
        if layer not in left:
            raise support.UnsupportedModelError(
                f"{named(caller)} runs attention that did not run once over the prompt; accepted: "
                "the same attention once in every forward"
            )
        left.remove(layer)
        return layer

    def update(key, value, index: int):
        return joined(path, layer_of(index), key, value)

    def update_indexer(keys, index: int):
        return joined_indexers(path, index, keys)

    def attend(call: registry.AttentionCall):
        return over_path(path, layer_of(call.module), call, packed)

    @contextlib.contextmanager
    def taken_over():
        handlers = Handlers(attend, update, update_indexer, resumed)
        with own.taken_over(handlers, packed, before, pack.experts) as arguments, around():
            yield arguments

    @contextlib.contextmanager
    def again():
        nonlocal computed_again
        computed_again += 1
        try:
            with taken_over():
                yield
        finally:
            computed_again -= 1

    before = path[-1].end if path else 0
    guarded = contextlib.nullcontext(lambda output: None)
    if path:
        guarded = guard.guarded(
            view,
            path[-1].check_accepts,
            has_states=own.are_recurrent,
            reads_prompt=bool(request.prompt),
        )
    with (
        taken_over() as arguments,
        checkpointing.use(
            view.model, again if checkpoints else None, arguments.get("past_key_values")
        ),
        guarded as guard_read,
    ):
        arguments = arguments | outputs.arguments_of(request.response)
        output = view.run(pack.tokens, pack.positions, arguments, logits_rows)
        output = outputs.read(output, request.response, len(pack.tokens))
        guard_read(output)
    resumed.check_complete()
    if pack.experts is not None:
        own.routers.check(pack.experts.shape[1])
    if left:
        raise support.UnsupportedModelError(
            f"attention of layer {min(left)} ran over the prompt and not over the responses; "
            "accepted: the same attention once in every forward"
        )
    return output
