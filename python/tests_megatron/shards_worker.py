"""One rank of test_context_shards.py: ``python shards_worker.py DIRECTORY``, over gloo.

Gathers K and V of prompts, returns gradients to their owners, passes both round a ring, and leaves
``RANK.pt`` there. With the environment of torchrun.
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
from dormouse.hf.attention import Packed, Rules
from dormouse.hf.ring_attention import RingAttention, rows_behind, rows_of_ranges
from dormouse.megatron.context_shards import ALL_GATHER, RING, Shard, _plan

HEADS, HEAD_DIM, MULTIPLE = 2, 4, 2
RULES = Rules(0.5)
# Shorter than there are chunks, without padding, and with some.
TOKENS = (2, 24, 29)
# Of a prompt beside whose bytes those of headers are few.
MANY_TOKENS = 1 << 15
# Of Linux's struct tcp_info, since 4.19: tcpi_bytes_sent, tcpi_bytes_retrans.
TCP_INFO_BYTES, BYTES_SENT_AT = 256, 200


def whole(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a prompt, each number another; exact in BF16. ``[tokens, 1, HEADS, HEAD_DIM]``."""
    numbers = torch.arange(tokens * HEADS * HEAD_DIM).view(tokens, 1, HEADS, HEAD_DIM)
    return (numbers % 251).bfloat16(), -(numbers % 241).bfloat16()


def gradients_of(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K and V on a rank: in BF16 256 and 1 are 256."""
    number = 256.0 if rank == 0 else 1.0
    scale = torch.arange(1, tokens + 1).remainder(5).add(1).log2().floor().exp2()
    of_key = (number * scale).view(-1, 1, 1, 1).expand(tokens, 1, HEADS, HEAD_DIM)
    return of_key.bfloat16(), -2 * of_key.bfloat16()


def shard_of(tokens: int, way: str = ALL_GATHER) -> Shard:
    ways = dist.get_world_size()
    numbers = 2 * HEADS * HEAD_DIM
    sizes = {"layers": 1, "row_bytes": 2 * numbers, "accumulator_row_bytes": 4 * numbers}
    plan = _plan(None, tokens, ranks=ways, multiple=MULTIPLE, way=way, room_bytes=None, **sizes)
    return Shard(tokens, dist.group.WORLD, plan)


def padded(shard: Shard, whole: torch.Tensor) -> torch.Tensor:
    """Returns a rank's rows of a tensor ``[tokens, ...]``, and padding that no row may see."""
    own = torch.cat([whole[:0], *(whole[part.start : part.stop] for part in shard.ranges)])
    room = torch.full((shard.rows - len(own), *whole.shape[1:]), 99, dtype=whole.dtype)
    return torch.cat([own, room])


def passed(shard: Shard) -> dict:
    """Returns what each rank's block is as it passes, and the sums of what each rank adds to it."""
    block = tuple(padded(shard, each).permute(1, 2, 0, 3) for each in whole(shard.tokens))
    seen, of_own = {}, gradients_of(dist.get_rank(), shard.rows)
    of_own = [each.permute(1, 2, 0, 3) for each in of_own]

    def add(rank: int, pair, sums) -> None:
        assert all(map(torch.equal, pair, seen[rank]))
        for to, each in zip(sums, of_own, strict=True):
            to += each

    shard.ring.visit(block, lambda rank, pair: seen.update({rank: [x.clone() for x in pair]}))
    return {"seen": seen, "own": block, "sums": shard.ring.collect(block, add)}


def drawn(number: int, tokens: int, heads: int) -> list[torch.Tensor]:
    """Query, K, V and the gradient of the output, ``[1, heads, tokens, HEAD_DIM]``."""
    generator = torch.Generator().manual_seed(number)
    shapes = [(1, each, tokens, HEAD_DIM) for each in (heads, HEADS, HEADS, heads)]
    return [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]


def dense(query, key, value, first: int) -> torch.Tensor:
    """Causal attention of rows from position ``first`` on over all keys."""
    key, value = (each.repeat_interleave(query.shape[1] // HEADS, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / 2
    rows = torch.arange(first, first + query.shape[2])
    hidden = torch.arange(key.shape[2]) > rows[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def attended(shard: Shard) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns pairs of what a ring computes and of what whole sequences do: of a prompt, and of
    responses of which each rank has others."""
    tokens, ways, rank, heads = shard.tokens, dist.get_world_size(), dist.get_rank(), 2 * HEADS
    prompt = [each.requires_grad_() for each in drawn(99, tokens, heads)]
    out = dense(*prompt[:3], 0)
    wanted = [out, *torch.autograd.grad(out, prompt[:3], prompt[3])]

    def own(x: torch.Tensor) -> torch.Tensor:
        return padded(shard, x.detach().transpose(1, 2)[0]).transpose(0, 1)[None]

    rows = rows_of_ranges(shard.ring, shard.ranges)
    mine = [own(each).requires_grad_() for each in prompt[:3]]
    out = RingAttention.apply(*mine, RULES, rows, shard.ring)
    found = [out, *torch.autograd.grad(out, mine, own(prompt[3]))]
    count = sum(map(len, shard.ranges))
    names = "out", "query", "key", "value"
    pairs = {
        f"prompt, {name}": (ours[:, :, :count], own(theirs)[:, :, :count])
        for name, ours, theirs in zip(names, found, wanted, strict=True)
    }
    of_prompt = [torch.zeros_like(each) for each in prompt[1:3]]
    for number in range(ways):
        segments = [(0, 3 + number), (3 + number, 4 + 2 * number)]
        response = drawn(number, segments[-1][1], heads)
        for start, end in segments:
            part = [each[:, :, start:end].clone().requires_grad_() for each in response]
            both = [torch.cat(each, 2) for each in zip(prompt[1:3], part[1:3], strict=True)]
            out = dense(part[0], *both, tokens)
            grads = torch.autograd.grad(out, [*prompt[1:3], *part[:3]], part[3])
            for to, each in zip(of_prompt, grads, strict=False):
                to += each
            if number == rank:
                theirs = [out, *grads[2:]]
                pairs |= {f"{start}, {n}": (None, x) for n, x in zip(names, theirs, strict=True)}
        if number == rank:
            mine, packed, gradients = response, Packed.of(segments), []
    behind = rows_behind(shard.ring, packed, tokens)
    block = tuple(own(each) for each in prompt[1:3])
    leaves = [each.requires_grad_() for each in mine[:3]]
    out = RingAttention.apply(
        *leaves, RULES, behind, shard.ring, block, lambda _, *grads: gradients.extend(grads)
    )
    found = [out, *torch.autograd.grad(out, leaves, mine[3])]
    for start, end in ((0, 3 + rank), (3 + rank, 4 + 2 * rank)):
        for name, ours in zip(names, found, strict=True):
            key = f"{start}, {name}"
            pairs[key] = ours[:, :, start:end], pairs[key][1]
    for name, ours, theirs in zip(names[2:], gradients, of_prompt, strict=True):
        pairs[f"prompt of responses, {name}"] = ours[:, :, :count], own(theirs)[:, :, :count]
        assert not ours[:, :, count:].any()
    return {name: tuple(each.detach() for each in pair) for name, pair in pairs.items()}


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


def ring_exchanged() -> dict[str, tuple[int, int]]:
    """Returns the bytes planned and sent of a long prompt that passes, in each direction."""
    shard = shard_of(MANY_TOKENS, RING)
    block = (torch.ones(1, HEADS, shard.rows, HEAD_DIM, dtype=torch.bfloat16),) * 2
    _, forward = on_sockets(lambda: shard.ring.visit(block, lambda *_: None))
    _, backward = on_sockets(lambda: shard.ring.collect(block, lambda *_: None))
    sent = {FORWARD: forward, BACKWARD: backward}
    return {way: (planned_bytes(shard, way), found) for way, found in sent.items()}


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
        own = [padded(shard, each).requires_grad_() for each in whole(tokens)]
        gathered = shard.gathered(*own)
        torch.autograd.backward(gathered, gradients_of(rank, tokens))
        found[tokens] = {
            "ranges": shard.ranges,
            "rows": shard.rows,
            "positions": shard.positions,
            "gathered": [each.detach() for each in gathered],
            "gradients": [each.grad for each in own],
        }
        of_ring = shard_of(tokens, RING)
        found[tokens] |= {"passed": passed(of_ring), "attended": attended(of_ring)}
    found["exchanged"], found["ring exchanged"] = exchanged(), ring_exchanged()
    torch.save(found, directory / f"{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
