"""What a rank sends and puts to sleep in a call of the schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dormouse.hf.step import LivePrefix
from dormouse.megatron.context_shards import Shard
from dormouse.megatron.mixers import GPTMixers
from dormouse.megatron.stage import Stage

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


@contextlib.contextmanager
def of_call(sent: list[tuple[int, int]], asleep: list[int]) -> Iterator[None]:
    """Context of a call.

    ``sent``: gets the bytes planned and sent, of a stage in its list, of a context-parallel rank in
    each pass of a prompt. ``asleep``: the most bytes asleep of each prefix.
    """
    own = Stage.backward, LivePrefix.backward, GPTMixers._sharded

    def of_stage(self, gradients):
        before = self.neighbours.sent_bytes
        result = own[0](self, gradients)
        sent.append((self.planned_bytes, self.neighbours.sent_bytes - before))
        return result

    def of_prefix(self, *args, **named):
        mixers, tokens = self.graph.mixers, self.graph.end
        with _sent_to_others() as found:
            report = own[1](self, *args, **named)
        asleep.append(report["asleep_bytes_peak"])
        if parallel_state.get_context_parallel_world_size() > 1:
            sent.append((planned_bytes(mixers._shards.of(tokens), BACKWARD), round(sum(found))))
        return report

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
    ):
        yield


def planned_bytes(shard: Shard, direction: str) -> int:
    """Returns the bytes of the planner's transfers of a pass. A rank sends what it receives."""
    transfers = shard.plan["exchange"]["transfers"]
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

    with contextlib.ExitStack() as stack:
        for name in SENT:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        yield found
