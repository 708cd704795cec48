"""Carries out a pipeline stage's list of the planner (docs/queries/pipeline.md)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

COMPUTE, SEND = "compute", "send"

RunOp = Callable[[dict, torch.Tensor | None], torch.Tensor | None]
"""Runs an op of a list with what it receives; returns what it sends."""


class Message(NamedTuple):
    """One tensor to or from another rank."""

    peer: int
    tensor: torch.Tensor
    is_send: bool


class Neighbours:
    """Point-to-point messages with other ranks of a group. Counts the bytes sent."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.sent_bytes = 0

    def exchange(self, messages: list[Message]) -> None:
        """Sends and receives the messages of one meeting; returns when all have arrived."""
        for request in self.post(messages):
            request.wait()

    def post(self, messages: list[Message]) -> list[dist.Work]:
        """Begins to send and to receive the messages of one meeting; returns what to wait for."""
        operations = []
        for message in messages:
            function = dist.isend if message.is_send else dist.irecv
            peer = dist.get_global_rank(self._group, message.peer)
            operations.append(dist.P2POp(function, message.tensor, peer, self._group))
            if message.is_send:
                self.sent_bytes += message.tensor.nbytes
        return dist.batch_isend_irecv(operations) if operations else []


def carry_out(
    stage: dict, run_op: RunOp, neighbours: Neighbours, room_for: Callable[[dict], torch.Tensor]
) -> None:
    """Runs the ops of a stage in their order. Neighbouring transfers are posted together, as the
    list says, so that stages that carry out their own lists never wait for each other in a circle.

    ``room_for(op)``: an empty tensor for what an op receives.
    """
    received: dict[int, torch.Tensor] = {}
    to_send: dict[int, torch.Tensor] = {}
    for (_, computes), steps in itertools.groupby(
        stage["steps"], key=lambda step: (step["batch"], step["kind"] == COMPUTE)
    ):
        if computes:
            for step in steps:
                number = step["op"]
                sent = run_op(stage["ops"][number], received.pop(number, None))
                if sent is not None:
                    to_send[number] = sent
            continue
        messages = []
        for step in steps:
            number, op = step["op"], stage["ops"][step["op"]]
            if step["kind"] == SEND:
                messages.append(Message(op["sends"]["peer"], to_send.pop(number), True))
            else:
                received[number] = room_for(op)
                messages.append(Message(op["receives"]["peer"], received[number], False))
        neighbours.exchange(messages)
