"""One rank of test_context_shards.py: ``python shards_worker.py DIRECTORY``, over gloo.

Gathers K and V of prompts, returns gradients to their owners, and leaves ``RANK.pt`` there. With
the environment of torchrun.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import conftest  # noqa: F401
import torch
import torch.distributed as dist

from counted import BACKWARD, FORWARD, planned_bytes
from dormouse.megatron.context_shards import Shard, _plan

HEADS, HEAD_DIM, MULTIPLE = 2, 4, 2
# Shorter than there are chunks, without padding, and with some.
TOKENS = (2, 24, 29)
# Of a prompt beside whose bytes those of headers are few.
MANY_TOKENS = 1 << 15
# Of Linux's struct tcp_info, since 4.19: tcpi_bytes_sent, tcpi_bytes_retrans.
TCP_INFO_BYTES, BYTES_SENT_AT = 256, 200


def whole(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a prompt, each number another; exact in BF16."""
    numbers = torch.arange(tokens * HEADS * HEAD_DIM).view(tokens, 1, HEADS, HEAD_DIM)
    return (numbers % 251).bfloat16(), -(numbers % 241).bfloat16()


def gradients_of(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K and V on a rank: in BF16 256 and 1 are 256."""
    number = 256.0 if rank == 0 else 1.0
    scale = torch.arange(1, tokens + 1).remainder(5).add(1).log2().floor().exp2()
    of_key = (number * scale).view(-1, 1, 1, 1).expand(tokens, 1, HEADS, HEAD_DIM)
    return of_key.bfloat16(), -2 * of_key.bfloat16()


def shard_of(tokens: int) -> Shard:
    ways = dist.get_world_size()
    sizes = {"layers": 1, "row_bytes": 4 * HEADS * HEAD_DIM, "room_bytes": 1 << 30}
    plan = _plan(tokens, ranks=ways, multiple=MULTIPLE, **sizes)
    return Shard(tokens, dist.group.WORLD, plan)


def on_sockets(work: Callable[[], object]) -> tuple[object, int]:
    """Returns what collective work returns, and the bytes that this process sent in it."""

    def sent_bytes() -> int:
        found = 0
        for descriptor in Path("/proc/self/fd").iterdir():
            if not descriptor.is_socket():
                continue
            with (
                socket.socket(fileno=os.dup(int(descriptor.name))) as each,
                # Of another kind than TCP.
                contextlib.suppress(OSError),
            ):
                info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                sent, again = struct.unpack_from("QQ", info, BYTES_SENT_AT)
                found += sent - again
        return found

    dist.barrier()
    before = sent_bytes()
    result = work()
    # Behind it all have received.
    dist.barrier()
    return result, sent_bytes() - before


def exchanged() -> dict[str, tuple[int, int]]:
    """Returns the bytes planned and sent of a long prompt in each direction."""
    shard = shard_of(MANY_TOKENS)
    shape = shard.rows, 1, HEADS, HEAD_DIM
    own = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    gathered, forward = on_sockets(lambda: shard.gathered(*own))
    seeds = gradients_of(dist.get_rank(), MANY_TOKENS)
    _, backward = on_sockets(lambda: torch.autograd.backward(gathered, seeds))
    sent = {FORWARD: forward, BACKWARD: backward}
    return {way: (planned_bytes(shard, way), found) for way, found in sent.items()}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    for tokens in TOKENS:
        shard = shard_of(tokens)
        own = [
            torch.nn.functional.pad(
                torch.cat([each[:0], *(each[part.start : part.stop] for part in shard.ranges)]),
                (0, 0) * 3 + (0, shard.rows - sum(map(len, shard.ranges))),
                value=99,
            ).requires_grad_()
            for each in whole(tokens)
        ]
        gathered = shard.gathered(*own)
        torch.autograd.backward(gathered, gradients_of(rank, tokens))
        found[tokens] = {
            "ranges": shard.ranges,
            "rows": shard.rows,
            "positions": shard.positions,
            "gathered": [each.detach() for each in gathered],
            "gradients": [each.grad for each in own],
        }
    found["exchanged"] = exchanged()
    torch.save(found, directory / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
