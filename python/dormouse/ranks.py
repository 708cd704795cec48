"""What ranks settle before a step, so that none waits in a collective that another never enters.

Where weights are sharded, every forward and backward pass gathers them: all ranks must run the
same passes in the same order, whatever their shares of the groups are. :func:`agree` exchanges
what has to be equal, what counts for everybody at its smallest, and what has to be padded to its
largest; :func:`confirm` compares a digest of the passes each rank is about to run. What fails on
one rank raises on every rank, before any pass. Residency is no part of it: it may differ.

Two small messages a step, none a microbatch; a third where budgets differ. A rank that dies, or never
comes, is met by the process group's own timeout and error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import DormouseError

# Of one rank's part of an agreement: room for about a thousand groups.
MESSAGE_BYTES = 8 << 10
DIGEST_BYTES = 256
_LENGTH_BYTES = 4
# Of a failure, as other ranks are told of it: a character may take twelve bytes of a message.
FAILURE_CHARS_MAX = 600
# Gradients that are averaged in one collective.
BUCKET_BYTES = 64 << 20


class RanksDifferError(DormouseError):
    """Ranks cannot run this step together; raised on every one of them, before any pass.

    ``differences``: what differs, and each rank's value of it.
    """

    def __init__(self, message: str, differences: Mapping[str, Sequence]):
        super().__init__(message)
        self.differences = dict(differences)


@dataclass(frozen=True)
class Share:
    """What one rank brings to a step. Plain values only: they travel as JSON."""

    must_match: Mapping[str, str]
    """Versions, options and shapes that are equal on every rank, by name."""
    budgets: Mapping[str, int]
    """Limits that hold for everybody at their smallest. Names are the same on every rank."""
    microbatches: Sequence[int]
    """How many microbatches each of the rank's groups has, planned under ``budgets``."""
    probes: int = 0
    """How many probe steps the rank wants first."""
    passes_hold_collectives: bool = True
    """Whether passes contain collectives. If so, shares are padded to the largest."""


@dataclass(frozen=True)
class Slot:
    """One group's turn: what all ranks run at the same time."""

    group: int | None
    """Which of the rank's groups; None where the rank has none left and runs a dummy."""
    microbatches: int
    """Microbatches to run, dummy ones included."""


@dataclass(frozen=True)
class Agreement:
    """What one rank does, given everybody's shares."""

    budgets: Mapping[str, int]
    """The smallest of each."""
    settled: bool
    """Whether every rank planned under ``budgets``. If not, all plan and agree once more."""
    slots: tuple[Slot, ...]
    """This rank's turns in order, the group with the most microbatches first."""
    probes: int
    passes_hold_collectives: bool
    ranks: int

    def sequence(self) -> list[str]:
        """The passes of the step that hold collectives, in order."""
        if not self.passes_hold_collectives:
            return ["average"]
        passes = ["probe"] * self.probes
        for slot in self.slots:
            passes += ["prefix forward", *["microbatch"] * slot.microbatches, "prefix backward"]
        return passes


def agree(process_group, share: Share, device: torch.device | str = "cpu") -> Agreement:
    """Exchanges ``share`` with every rank of ``process_group`` and settles what this rank does.

    ``process_group``: None is the default one, or this process alone where there is none.
    ``device``: where the group's backend wants tensors, if it takes none on the CPU.

    Raises :class:`RanksDifferError` on every rank, naming which ranks differ and in what.
    """
    try:
        message = _described(share)
    except Exception as error:
        refuse(process_group, error, device)
        raise
    table = _exchange(process_group, message, MESSAGE_BYTES, device)
    return settle(table, _rank(process_group))


def refuse(process_group, error: Exception, device: torch.device | str = "cpu") -> None:
    """Takes part in the others' :func:`agree` with what failed here: it raises on every other
    rank. The caller raises ``error`` itself."""
    failure = f"{type(error).__name__}: {error}"[:FAILURE_CHARS_MAX]
    _exchange(process_group, _canonical({"failure": failure}), MESSAGE_BYTES, device)


def confirm(process_group, sequence: Sequence[str], device: torch.device | str = "cpu") -> None:
    """Compares the passes every rank is about to run.

    Raises :class:`RanksDifferError` on every rank: run, they would hang.
    """
    own = {"passes": len(sequence), "sha256": digest(list(sequence))}
    table = _exchange(process_group, _canonical(own), DIGEST_BYTES, device)
    texts = [f"{row['passes']} passes ({row['sha256'][:12]})" for row in table]
    if len({row["sha256"] for row in table}) > 1:
        raise _differ({"passes of the step": texts})


def digest(value) -> str:
    """Returns the SHA-256 of a JSON value in canonical form: sorted keys, floats by their bits.

    Entries of :attr:`Share.must_match` may be digests, one per part of a plan (inputs, options,
    collectives): :func:`agree` then names the part that differs and each rank's value of it.
    """
    return hashlib.sha256(_canonical(value)).hexdigest()


def _described(share: Share) -> bytes:
    """This rank's message."""
    plain = {"must_match": dict(share.must_match), "budgets": dict(share.budgets)}
    message = _canonical(vars(share) | plain | {"microbatches": list(share.microbatches)})
    if len(message) > MESSAGE_BYTES - _LENGTH_BYTES:
        size = f"{len(share.microbatches)} groups take {len(message)} bytes to describe"
        raise DormouseError(f"{size}; accepted: {MESSAGE_BYTES - _LENGTH_BYTES} bytes")
    return message


def settle(table: Sequence[Mapping], rank: int) -> Agreement:
    """What ``rank`` does, given every rank's message: the same rule on every rank, no exchange.

    Raises :class:`RanksDifferError`.
    """
    failures = [row.get("failure", "ready") for row in table]
    if any("failure" in row for row in table):
        raise _differ({"readiness": failures})
    columns = [_comparable(row) for row in table]
    names = sorted(set().union(*columns))
    differences = {
        name: values
        for name in names
        if len(set(values := [column.get(name, "nothing") for column in columns])) > 1
    }
    if differences:
        raise _differ(differences)
    budgets = {name: min(row["budgets"][name] for row in table) for name in table[0]["budgets"]}
    own = table[rank]
    order = sorted(range(len(own["microbatches"])), key=lambda group: -own["microbatches"][group])
    turns = [own["microbatches"][group] for group in order]
    if own["passes_hold_collectives"]:
        turns = _padded([sorted(row["microbatches"], reverse=True) for row in table])
    groups = [*order, *[None] * (len(turns) - len(order))]
    return Agreement(
        budgets=budgets,
        settled=all(row["budgets"] == budgets for row in table),
        slots=tuple(Slot(group, microbatches) for group, microbatches in zip(groups, turns, strict=True)),
        probes=max(row["probes"] for row in table) if own["passes_hold_collectives"] else own["probes"],
        passes_hold_collectives=own["passes_hold_collectives"],
        ranks=len(table),
    )


def average_gradients(
    process_group, parameters: Sequence[torch.nn.Parameter], device: torch.device | str = "cpu"
) -> None:
    """Makes every ``.grad`` its mean over ranks; a rank that has none counts as zeros.

    A parameter without a gradient on any rank stays without. ``parameters``: the same on every
    rank, in the same order.
    """
    ranks = world_size(process_group)
    if ranks == 1 or not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    present = present.to(_message_device(process_group, device))
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=process_group)
    for parameter, wanted in zip(parameters, present.tolist(), strict=True):
        if wanted and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=process_group)
        pieces = flat.div_(ranks).split([gradient.numel() for gradient in bucket])
        for gradient, piece in zip(bucket, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def world_size(process_group) -> int:
    """Ranks of the group; 1 where torch.distributed is not in use."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(process_group)


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type, up to ``BUCKET_BYTES`` where more than one fits."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for gradient in gradients:
        if bucket and (
            gradient.dtype is not bucket[0].dtype or nbytes + gradient.nbytes > BUCKET_BYTES
        ):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(gradient)
        nbytes += gradient.nbytes
    if bucket:
        yield bucket


def _padded(rows: Sequence[Sequence[int]]) -> list[int]:
    """The largest of each place over all rows; rows may be of unequal length, or empty."""
    slots = max(map(len, rows), default=0)
    return [max(row[slot] for row in rows if slot < len(row)) for slot in range(slots)]


def _comparable(row: Mapping) -> dict[str, str]:
    """What must be equal of one rank's message."""
    return {
        **row["must_match"],
        "passes hold collectives": str(row["passes_hold_collectives"]),
        "names of budgets": ", ".join(sorted(row["budgets"])),
    }


def _differ(differences: Mapping[str, Sequence[str]]) -> RanksDifferError:
    lines = [f"ranks differ in {name}: {_by_value(v)}" for name, v in differences.items()]
    return RanksDifferError("; ".join(lines), differences)


def _by_value(values: Sequence[str]) -> str:
    """``rank 0 has a; ranks 1, 2 have b``."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return ", ".join(
        f"rank {ranks[0]} has {value!r}"
        if len(ranks) == 1
        else f"ranks {' '.join(map(str, ranks))} have {value!r}"
        for value, ranks in holders.items()
    )


def _canonical(value) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _exchange(process_group, message: bytes, nbytes: int, device) -> list:
    """Every rank's message, by rank: one all-gather of ``nbytes`` each."""
    if world_size(process_group) == 1:
        return [json.loads(message)]
    framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
    own = torch.frombuffer(bytearray(framed.ljust(nbytes, b"\0")), dtype=torch.uint8)
    own = own.to(_message_device(process_group, device))
    gathered = [torch.empty_like(own) for _ in range(world_size(process_group))]
    dist.all_gather(gathered, own, group=process_group)
    return [_unframed(bytes(row.cpu().tolist())) for row in gathered]


def _unframed(framed: bytes):
    length = int.from_bytes(framed[:_LENGTH_BYTES], "little")
    return json.loads(framed[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _message_device(process_group, device) -> torch.device:
    backends = dist.get_backend_config(process_group)
    return torch.device("cpu" if "cpu:" in backends else device)


def _rank(process_group) -> int:
    return 0 if world_size(process_group) == 1 else dist.get_rank(process_group)
