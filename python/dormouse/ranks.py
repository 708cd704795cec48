"""Agreement between ranks before a step, so that all ranks enter the same collectives.

If weights are sharded, every forward and backward pass gathers them: all ranks must run the same
passes in the same order, whatever groups each of them has. :func:`agree` exchanges values that must
be equal, budgets whose minimum applies, and counts that are padded to their maximum;
:func:`confirm` compares a digest of the passes each rank is about to run. An error on one rank
raises on every rank, before any pass. Residency may differ between ranks.

A step takes two small messages, three if budgets differ, and none per microbatch. A rank that dies
or never arrives causes the process group's own timeout and error; within
:func:`dormouse.fail_together` every other rank is told at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .errors import DormouseError

# One rank's message to :func:`agree`: room for about a thousand groups.
MESSAGE_BYTES = 8 << 10
DIGEST_BYTES = 256
_LENGTH_BYTES = 4
# Text of an error in a message: a character may take twelve bytes.
FAILURE_CHARS_MAX = 600
# What one rank sends in :func:`gather_numbers`: 1 GiB.
NUMBERS_MAX = 1 << 27
# Gradients averaged in one collective.
BUCKET_BYTES = 64 << 20


class RanksDifferError(DormouseError):
    """The ranks cannot run this step together; raised on every rank, before any pass.

    ``differences``: names of what differs, with each rank's value.
    """

    def __init__(self, message: str, differences: Mapping[str, Sequence]):
        super().__init__(message)
        self.differences = dict(differences)

    def __reduce__(self):
        return type(self), (str(self), self.differences)


@dataclass(frozen=True)
class Share:
    """One rank's input to a step. Plain values only: they are sent as JSON."""

    must_match: Mapping[str, str]
    """Versions, options and shapes that must be equal on every rank, by name."""
    budgets: Mapping[str, int]
    """Limits whose minimum over ranks applies. Names must be equal on every rank."""
    microbatches: Sequence[int]
    """Number of microbatches per group, planned under ``budgets``."""
    probes: int = 0
    """Number of probe steps the rank needs first."""
    check_tokens: int | None = None
    """Length up to which the rank needs the model checked before the probes, 0 if lengths do not
    matter; None: it needs no check."""
    check_rows: int = 0
    """Rows up to which the rank needs microbatches checked."""
    passes_hold_collectives: bool = True
    """Whether passes contain collectives; shares are then padded to the largest."""
    has_trees: bool = False
    """Whether the rank runs passes that other ranks do not match: all weights are then gathered
    once, before them."""


@dataclass(frozen=True)
class GroupSlot:
    """The passes of one group, run by all ranks at the same time."""

    group: int | None
    """Index of the rank's group; None for a dummy."""
    microbatches: int
    """Number of microbatches, including dummies."""


@dataclass(frozen=True)
class Agreement:
    """What one rank runs, given the shares of all ranks."""

    budgets: Mapping[str, int]
    """The minimum of each over ranks."""
    settled: bool
    """Whether every rank planned under ``budgets``. If not, all ranks plan and agree again."""
    slots: tuple[GroupSlot, ...]
    """This rank's groups in order, the one with the most microbatches first."""
    probes: int
    check_tokens: int | None
    check_rows: int
    passes_hold_collectives: bool
    gathers: bool
    """Whether all ranks gather all weights for the whole step."""
    ranks: int

    def sequence(self) -> list[str]:
        """Returns the passes of the step that contain collectives, in order."""
        if not self.passes_hold_collectives:
            return ["average"]
        limits = f"{self.check_tokens} tokens, {self.check_rows} rows"
        checks = [] if self.check_tokens is None else [f"check up to {limits}"]
        passes = [*checks, *["probe"] * self.probes, *["gather"] * self.gathers]
        for slot in self.slots:
            passes += ["prefix forward", *["microbatch"] * slot.microbatches, "prefix backward"]
        return passes


def agree(process_group, share: Share, device: torch.device | str = "cpu") -> Agreement:
    """Exchanges ``share`` with every rank of ``process_group``; returns what this rank runs.

    Collective. ``process_group``: None for the default group, or for this process alone without
    one. ``device``: device of the message if the group's backend has no CPU support.

    Raises :class:`RanksDifferError` on every rank, with the ranks and values that differ.
    """
    try:
        message = _described(share)
    except Exception as error:
        refuse(process_group, error, device)
        raise
    table = _exchange(process_group, message, MESSAGE_BYTES, device)
    return settle(table, rank(process_group))


def refuse(process_group, error: Exception, device: torch.device | str = "cpu") -> None:
    """Joins the other ranks' :func:`agree` with ``error``, which raises on them. The caller raises
    ``error`` itself."""
    failure = f"{type(error).__name__}: {error}"[:FAILURE_CHARS_MAX]
    _exchange(process_group, _canonical({"failure": failure}), MESSAGE_BYTES, device)


def raise_together(
    process_group, error: Exception | None, device: torch.device | str = "cpu"
) -> None:
    """Raises on every rank if any has an ``error``: that rank its own, the others
    :class:`RanksDifferError`. Collective."""
    if error is not None:
        refuse(process_group, error, device)
        raise error
    table = _exchange(process_group, _canonical({}), MESSAGE_BYTES, device)
    _check_ready(table)


def gather_numbers(
    process_group, numbers: torch.Tensor, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Returns every rank's ``numbers`` (1-D int64, any length), by rank, in host memory.
    Collective.

    Raises :class:`DormouseError` on every rank beyond ``NUMBERS_MAX``.
    """
    table = _exchange(process_group, _canonical(len(numbers)), DIGEST_BYTES, device)
    longest = max(table)
    if longest > NUMBERS_MAX:
        raise DormouseError(f"a rank sends {longest} numbers; accepted: {NUMBERS_MAX}")
    if len(table) == 1 or longest == 0:
        return [numbers] * len(table)
    own = torch.zeros(longest, dtype=torch.int64, device="cpu")
    own[: len(numbers)] = numbers
    own = own.to(_message_device(process_group, device))
    gathered = [torch.empty_like(own) for _ in table]
    dist.all_gather(gathered, own, group=process_group)
    return [row[:count].cpu() for row, count in zip(gathered, table, strict=True)]


def confirm(process_group, sequence: Sequence[str], device: torch.device | str = "cpu") -> None:
    """Compares the passes every rank is about to run. Collective.

    Raises :class:`RanksDifferError` on every rank if they differ, because they would deadlock.
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
    """Returns this rank's message."""
    plain = {"must_match": dict(share.must_match), "budgets": dict(share.budgets)}
    message = _canonical(vars(share) | plain | {"microbatches": list(share.microbatches)})
    if len(message) > MESSAGE_BYTES - _LENGTH_BYTES:
        size = f"{len(share.microbatches)} groups take {len(message)} bytes to describe"
        raise DormouseError(f"{size}; accepted: {MESSAGE_BYTES - _LENGTH_BYTES} bytes")
    return message


def settle(table: Sequence[Mapping], rank: int) -> Agreement:
    """Returns what ``rank`` runs, given every rank's message. Deterministic; no communication.

    Raises :class:`RanksDifferError`.
    """
    _check_ready(table)
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
    gathers = own["passes_hold_collectives"] and any(row["has_trees"] for row in table)
    if gathers and not turns:
        # Gradients are reduced in the last backward of a group.
        turns = [1]
    needing = table if own["passes_hold_collectives"] else [own]
    groups = [*order, *[None] * (len(turns) - len(order))]
    return Agreement(
        budgets=budgets,
        settled=all(row["budgets"] == budgets for row in table),
        slots=tuple(
            GroupSlot(group, microbatches)
            for group, microbatches in zip(groups, turns, strict=True)
        ),
        probes=max(row["probes"] for row in needing),
        check_tokens=max(
            (row["check_tokens"] for row in needing if row["check_tokens"] is not None),
            default=None,
        ),
        check_rows=max(row["check_rows"] for row in needing),
        passes_hold_collectives=own["passes_hold_collectives"],
        gathers=gathers,
        ranks=len(table),
    )


def _check_ready(table: Sequence[Mapping]) -> None:
    if any("failure" in row for row in table):
        raise _differ({"readiness": [row.get("failure", "ready") for row in table]})


def average_gradients(
    process_group, parameters: Sequence[torch.nn.Parameter], device: torch.device | str = "cpu"
) -> None:
    """Replaces every ``.grad`` by its mean over ranks; a missing gradient counts as zeros.

    A parameter without a gradient on every rank stays without. ``parameters``: the same on every
    rank, in the same order. Collective.
    """
    ranks = world_size(process_group)
    if ranks == 1 or not parameters:
        return
    present = torch.tensor(
        [p.grad is not None for p in parameters],
        dtype=torch.int32,
        device=_message_device(process_group, device),
    )
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
    """Returns the size of the group; 1 if torch.distributed is not initialized."""
    if process_group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(process_group)


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields adjacent gradients of one dtype, up to ``BUCKET_BYTES`` or one gradient."""
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
    """Returns the maximum per position over all rows, whose lengths may differ."""
    slots = max(map(len, rows), default=0)
    return [max(row[slot] for row in rows if slot < len(row)) for slot in range(slots)]


def _comparable(row: Mapping) -> dict[str, str]:
    """Returns the values of one message that must be equal on all ranks."""
    return {
        **row["must_match"],
        "passes hold collectives": str(row["passes_hold_collectives"]),
        "names of budgets": ", ".join(sorted(row["budgets"])),
    }


def _differ(differences: Mapping[str, Sequence[str]]) -> RanksDifferError:
    lines = [f"ranks differ in {name}: {_by_value(v)}" for name, v in differences.items()]
    return RanksDifferError("; ".join(lines), differences)


def _by_value(values: Sequence[str]) -> str:
    """Formats ``rank 0 has a, ranks 1 2 have b``."""
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
    """Returns every rank's message, by rank: one all-gather of ``nbytes`` each."""
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


def rank(process_group) -> int:
    """Returns this process's rank in the group; 0 if torch.distributed is not initialized."""
    return 0 if world_size(process_group) == 1 else dist.get_rank(process_group)
