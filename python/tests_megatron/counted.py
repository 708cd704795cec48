"""What a rank sends, puts to sleep and runs in a call of the schedule."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from dormouse.hf.prefix import PrefixForward
from dormouse.hf.step import LivePrefix, Step
from dormouse.megatron.context import is_context_parallel
from dormouse.megatron.context_ring import ShardRing, _Passing
from dormouse.megatron.context_shards import RING, Shard
from dormouse.megatron.mixers import GPTMixers
from dormouse.megatron.shared_gpt import SharedGPT
from dormouse.megatron.stage import Stage
from dormouse.runtime import Prefix
from rooms import plan_of_readers

FORWARD, BACKWARD = "forward", "backward"
# What a rank of several sends to others, of the bytes that it gives a collective: as gloo and NCCL
# carry them out.
SENT: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda ways: ways - 1,
    "all_to_all_single": lambda ways: (ways - 1) / ways,
    "all_reduce": lambda ways: 2 * (ways - 1) / ways,
}
# Which of its arguments that is.
SENT_ARGUMENT = {"all_gather_into_tensor": 1, "all_to_all_single": 1, "all_reduce": 0}


class Piece(NamedTuple):
    """Tokens of a prompt that a pass runs: all but its last one, or a chunk of them."""

    part: int
    """Of the stage's parts of the model."""
    first: int
    """The position of the first token."""
    tokens: tuple[int, ...]


@dataclass
class Passes:
    """What reached the first layer of each part of the model in a call: not what a schedule lists.
    """

    of_prompts: dict[str, Counter[Piece]] = field(default_factory=lambda: defaultdict(Counter))
    """How often each piece of a prompt did, by direction."""
    of_others: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """How many rows of all other passes did, by direction and part."""


@contextlib.contextmanager
def of_call(
    gpt: GPTModel,
    sent: list[tuple[int, int]],
    asleep: list[tuple[int, int]],
    held: list[tuple[int, int]],
    passes: list[Passes],
) -> Iterator[None]:
    """Context of a call of a model, or of its first part.

    ``sent``: gets the bytes planned and sent, of a stage in its list, of a context-parallel rank in
    each pass of a prompt, and of a microbatch round whose ranks K and V pass. ``asleep``: the most
    bytes asleep of each prefix, and of how many layers something was to sleep. ``held``: the bytes
    planned and held each time K and V pass. ``passes``: gets those of the call.
    """
    own = Stage.backward, LivePrefix.backward, GPTMixers._sharded, Prefix.dormant
    layers: dict[Prefix, set[int]] = {}

    def of_stage(self, gradients):
        before = self.neighbours.sent_bytes
        result = own[0](self, gradients)
        sent.append((self.planned_bytes, self.neighbours.sent_bytes - before))
        return result

    def of_prefix(self, *args, **named):
        mixers, tokens, handle = self.graph.mixers, self.graph.end, self.handle
        with _sent_to_others() as found:
            report = own[1](self, *args, **named)
        asleep.append((report["asleep_bytes_peak"], len(layers.pop(handle, ()))))
        if parallel_state.get_context_parallel_world_size() > 1:
            sent.append((planned_bytes(mixers._shards.of(tokens), BACKWARD), round(sum(found))))
        return report

    def dormant(self, layer, addresses):
        if addresses:
            layers.setdefault(self, set()).add(layer)
        own[3](self, layer, addresses)

    @contextlib.contextmanager
    def of_forward(self):
        with _sent_to_others() as found, own[2](self):
            yield
            shard = self._shard
        sent.append((planned_bytes(shard, FORWARD), round(sum(found))))

    with (
        mock.patch.object(Stage, "backward", of_stage),
        mock.patch.object(LivePrefix, "backward", of_prefix),
        mock.patch.object(GPTMixers, "_sharded", of_forward),
        mock.patch.object(Prefix, "dormant", dormant),
        _of_readers(gpt, sent),
        _of_rings(gpt, held),
        _of_passes() as found,
    ):
        yield
    passes.append(found)


@contextlib.contextmanager
def _of_passes() -> Iterator[Passes]:
    """Context that counts the passes of all parts of the model, but those of a check or a probe."""
    passes, piece, is_counting = Passes(), None, True
    own = PrefixForward.forward, GPTMixers.taken_over

    def apart(run: Callable) -> Callable:
        def uncounted(*args, **named):
            nonlocal is_counting
            before, is_counting = is_counting, False
            try:
                return run(*args, **named)
            finally:
                is_counting = before

        return uncounted

    def of_prompt(self, tokens, first=0, *args, **named):
        nonlocal piece
        piece = Piece(self.view.model.vp_stage or 0, first, tuple(tokens.tolist()))
        try:
            return own[0](self, tokens, first, *args, **named)
        finally:
            piece = None

    @contextlib.contextmanager
    def of_pass(self, *args, **named):
        layer, part, running = self._gpt.decoder.layers[0], self._gpt.vp_stage or 0, piece

        def count(direction: str, rows: torch.Tensor) -> None:
            if running is None:
                passes.of_others[direction][part] += len(rows)
            else:
                passes.of_prompts[direction][running] += 1

        def enter(module, args: tuple, named: dict) -> None:
            rows = args[0] if args else named["hidden_states"]
            count(FORWARD, rows)
            if rows.requires_grad:
                rows.register_hook(lambda gradient: count(BACKWARD, gradient))

        with contextlib.ExitStack() as stack:
            arguments = stack.enter_context(own[1](self, *args, **named))
            if is_counting:
                stack.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True))
            yield arguments

    with (
        mock.patch.object(PrefixForward, "forward", of_prompt),
        mock.patch.object(GPTMixers, "taken_over", of_pass),
        mock.patch.object(SharedGPT, "_check", apart(SharedGPT._check)),
        mock.patch.object(SharedGPT, "_run_probe", apart(SharedGPT._run_probe)),
    ):
        yield passes


@contextlib.contextmanager
def _of_readers(gpt: GPTModel, sent: list[tuple[int, int]]) -> Iterator[None]:
    """Context that counts microbatches whose responses read K and V that pass by."""
    own = Step._microbatch, Step._dummy_microbatch, GPTMixers._behind

    def count(mixers: GPTMixers, tokens: int, find: Callable[[dict], int], found: list) -> None:
        if is_context_parallel(gpt) and mixers._shards.of(tokens).ring is not None:
            sent.append((find(_of_readers_of(gpt, tokens)), round(sum(found))))

    def of_step(run: Callable) -> Callable:
        def microbatch(self, read, *args):
            forward = self._live[getattr(read, "reads", read)].forward
            with _sent_to_others() as found:
                run(self, read, *args)
            count(forward.mixers, forward.end, lambda each: each["microbatch_bytes"], found)

        return microbatch

    @contextlib.contextmanager
    def of_forward(self, tokens):
        with _sent_to_others() as found, own[2](self, tokens):
            yield
        count(self, tokens, lambda each: _of_pass(each, FORWARD), found)

    with (
        mock.patch.object(Step, "_microbatch", of_step(own[0])),
        mock.patch.object(Step, "_dummy_microbatch", of_step(own[1])),
        mock.patch.object(GPTMixers, "_behind", of_forward),
    ):
        yield


@contextlib.contextmanager
def _of_rings(gpt: GPTModel, held: list[tuple[int, int]]) -> Iterator[None]:
    """Context that counts what is held while K and V pass, beside the rank's own block."""
    own = ShardRing.visit, ShardRing.collect, _Passing.__init__
    bytes_of: list[int] = []

    def passing(self, sent, rooms, *, keeps_first=False):
        own[2](self, sent, rooms, keeps_first=keeps_first)
        pairs = rooms if keeps_first else [sent, *rooms]
        bytes_of.append(sum(each.nbytes for pair in pairs for each in pair))

    def of(run: Callable) -> Callable:
        def passed(self, *args):
            bytes_of.clear()
            found = run(self, *args)
            tokens = max(each.stop for ranges in self._of_ranks for each in ranges)
            _, ring = _of_readers_of(gpt, tokens)["prices"]
            held.append((ring["held_bytes"], sum(bytes_of)))
            return found

        return passed

    with (
        mock.patch.object(ShardRing, "visit", of(own[0])),
        mock.patch.object(ShardRing, "collect", of(own[1])),
        mock.patch.object(_Passing, "__init__", passing),
    ):
        yield


def _of_readers_of(gpt: GPTModel, tokens: int) -> dict:
    return plan_of_readers(gpt, tokens, RING)["exchange"]


def planned_bytes(shard: Shard, direction: str) -> int:
    """Returns the bytes of the planner's transfers of a pass. A rank sends what it receives."""
    return _of_pass(shard.plan["exchange"], direction)


def _of_pass(exchange: dict, direction: str) -> int:
    transfers = exchange["transfers"]
    passed = (each for each in transfers if each["issue"]["pass"] == direction)
    return sum(each["received_bytes"] for each in passed)


@contextlib.contextmanager
def _sent_to_others() -> Iterator[list[float]]:
    """Context in which each collective of the context-parallel group leaves the bytes that it
    sends."""
    group, found = parallel_state.get_context_parallel_group(), []

    def counting(name: str) -> Callable:
        own = getattr(dist, name)

        def collective(*args, **named):
            if named.get("group") is group:
                given: torch.Tensor = args[SENT_ARGUMENT[name]]
                found.append(SENT[name](group.size()) * given.nbytes)
            return own(*args, **named)

        return collective

    def batch(operations: list[dist.P2POp], own=dist.batch_isend_irecv):
        found.extend(
            each.tensor.nbytes
            for each in operations
            if each.op is dist.isend and each.group is group
        )
        return own(operations)

    with contextlib.ExitStack() as stack:
        for name in SENT:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch))
        yield found
