"""One rank of test_context.py: two ranks have the tokens of the same rows, over gloo; of four, two
have those of each replica.

``python context_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there:
of each of :data:`ROWS`, how far gradients are from Megatron's own on whole rows; of each of
:data:`REFUSED`, the error. Each has process groups of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
import dormouse
from dormouse.hf.prefix import PlannedForward
from dormouse.hf.ring_attention import RingAttention
from dormouse.hf.row_ranges import RangeAttention
from dormouse.megatron import context_shards
from dormouse.megatron.context_ring import ShardRing
from dormouse.megatron.refusals import unwrapped
from failing_worker import RAISED, in_place_of, joined, other_options, raises, shared
from in_use import left_by
from models import largest
from rooms import budget_of, room_of

CASE = cases.Case(
    2,
    context_parallel=2,
    config={"calculate_per_token_loss": True},
    per_token=True,
    share={"microbatch_tokens": 9, "graphs": "twice"},
)
ROOM_BYTES = 1 << 6
Change = Callable[[dict], dict]


def masked(change: Callable[[torch.Tensor], None]) -> Change:
    """Returns a change of a batch by one of its mask."""

    def changed(batch: dict) -> dict:
        mask = batch["loss_mask"].clone()
        change(mask)
        return batch | {"loss_mask": mask}

    return changed


def unshared(batch: dict) -> dict:
    """The first token is another in each row."""
    tokens = batch["tokens"].clone()
    tokens[:, 0] = torch.arange(len(tokens)) + len(tokens) * batch["number"]
    return batch | {"tokens": tokens}


def one_row(batch: dict) -> dict:
    """Only the first row of the call has a loss."""
    return masked(lambda mask: mask[bool(batch["number"] == 0) :].zero_())(batch)


def from_column(first: int) -> Change:
    """Returns a change after which losses begin in a column, so prompts have a token more."""

    def change(mask: torch.Tensor) -> None:
        for row in mask:
            if row.any():
                row[first : int(row.nonzero()[0])] = 1

    return masked(change)


CHANGES: dict[str, Change] = {
    "as they are": lambda batch: batch,
    "no prompt is shared": unshared,
    "one row has a loss": one_row,
    "the second microbatch has no loss": lambda batch: (
        masked(torch.Tensor.zero_)(batch) if batch["number"] == 1 else batch
    ),
    # A row before the last token of a prompt, for four chunks.
    "prompts of two tokens": from_column(1),
    "prompts of four tokens": from_column(3),
    "no loss": masked(torch.Tensor.zero_),
}


@dataclass(frozen=True)
class Rows:
    """A call with changed rows."""

    case: cases.Case
    change: Change
    replicas: tuple[int, ...] = (0, 1)
    """Whose rows are changed."""


EXPERTS = dataclasses.replace(
    CASE, expert_parallel=2, config=CASE.config | cases.EXPERTS, share={"microbatch_tokens": 9}
)
RING = dataclasses.replace(CASE, ring=True)
STAGES = dataclasses.replace(CASE, ranks=4, stages=2, share={"microbatch_tokens": 9})
EXPERTS_OF_STAGES = dataclasses.replace(STAGES, expert_parallel=2, config=EXPERTS.config)
EXPERTS_OF_REPLICAS = dataclasses.replace(EXPERTS, ranks=4, expert_parallel=4)
ROWS = {
    **{name: Rows(CASE, change) for name, change in CHANGES.items()},
    "ring, no prompt is shared": Rows(RING, unshared),
    "ring, one row has a loss": Rows(RING, one_row),
    "ring, prompts of two tokens": Rows(
        dataclasses.replace(RING, prompt_tokens=2), CHANGES["prompts of two tokens"]
    ),
    **{f"two stages, {name}": Rows(STAGES, change) for name, change in CHANGES.items()},
    "two stages, experts on both, one row has a loss": Rows(EXPERTS_OF_STAGES, one_row),
    "experts on both, no prompt is shared": Rows(EXPERTS, unshared),
    "experts on both, one row has a loss": Rows(EXPERTS, one_row),
    "replica 1 has no loss": Rows(EXPERTS_OF_REPLICAS, CHANGES["no loss"], (1,)),
    "replica 0 shares no prompt": Rows(EXPERTS_OF_REPLICAS, unshared, (0,)),
    "replica 1 has less to do": Rows(
        EXPERTS_OF_REPLICAS, CHANGES["the second microbatch has no loss"], (1,)
    ),
}


AFTER_ALL = {
    "after all": ROWS["as they are"],
    "after all, ring": Rows(RING, CHANGES["as they are"]),
}


@dataclass(frozen=True)
class Refused:
    """A call that no rank can run. Nothing of it is about :data:`ROWS`."""

    change: Change = lambda batch: batch
    """Of whole rows."""
    own_change: Change = lambda batch: batch
    """Of what a rank has."""
    ranks: tuple[int, ...] = (0, 1)
    """To which all but ``change`` applies."""
    enter: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    arguments: dict = field(default_factory=dict)
    """Of the schedule."""
    comes_first: bool = False
    """Whether it is the model's first call, which checks it."""
    case: cases.Case = CASE


def cut(batch: dict, columns: int) -> dict:
    return batch | {name: batch[name][:, :-columns] for name in cases.PARTS}


def counted(batch: dict) -> dict:
    """Positions are those of the columns that the rank has."""
    return batch | {"positions": torch.arange(batch["tokens"].shape[1])[None]}


def evaluated(data_iterator, model):
    batch = next(data_iterator)
    with torch.no_grad():
        model(batch["tokens"], batch["positions"], None, labels=batch["labels"])


def counted_twice():
    """Gradients of K and V of a prompt are twice what they are."""
    own = context_shards._Gathered.backward

    def backward(ctx, *gradients):
        *both, none = own(ctx, *gradients)
        return *(2 * each for each in both), none

    return mock.patch.object(context_shards._Gathered, "backward", staticmethod(backward))


def little_room():
    """Room for no block of K and V."""
    return budget_of(ROOM_BYTES)


def failing_within_collect():
    """Fails behind the first hop: the other rank has sent, and waits."""
    own = ShardRing.collect

    def collect(self, block, add):
        def failing(rank, *args):
            if rank != dist.get_rank():
                raises()
            add(rank, *args)

        return own(self, block, failing)

    return mock.patch.object(ShardRing, "collect", collect)


REFUSED = {
    "a prompt of one token": Refused(from_column(0)),
    "an odd number of columns": Refused(own_change=lambda batch: cut(batch, 1)),
    "fewer columns on one rank": Refused(own_change=lambda batch: cut(batch, 2), ranks=(1,)),
    "fewer microbatches on one rank": Refused(arguments={"num_microbatches": 2}, ranks=(0,)),
    "other options on one rank": Refused(enter=other_options, ranks=(1,)),
    "one rank does not train": Refused(arguments={"forward_only": True}, ranks=(1,)),
    "positions without the context": Refused(own_change=counted),
    "an evaluation": Refused(arguments={"forward_step_func": evaluated}),
    "gradients of one rank are wrong": Refused(
        enter=counted_twice, ranks=(1,), comes_first=True
    ),
    "one rank has no room for K and V": Refused(enter=little_room, ranks=(1,)),
    "a pass of one rank's check fails": Refused(
        enter=in_place_of(RangeAttention, "forward", RuntimeError), ranks=(1,), comes_first=True
    ),
    "one rank's check fails": Refused(
        enter=in_place_of(PlannedForward, "forward"), ranks=(0,), comes_first=True
    ),
    "one rank fails": Refused(enter=in_place_of(PlannedForward, "forward"), ranks=(0,)),
    "one rank fails as K and V pass": Refused(
        enter=in_place_of(RingAttention, "forward"), ranks=(0,), case=RING
    ),
    "one rank fails as gradients pass": Refused(
        enter=failing_within_collect, ranks=(1,), case=RING
    ),
    "two stages, no room for K and V": Refused(
        case=dataclasses.replace(STAGES, ring=True), comes_first=True
    ),
    "graphs are kept": Refused(
        case=dataclasses.replace(RING, share=CASE.share | {"graphs": "kept"}), comes_first=True
    ),
}


def whole_rows(change: Change, replicas: tuple[int, ...] = (0, 1)) -> list[dict]:
    """Returns the batches of this rank's replica, which are changed if it is one of ``replicas``.
    Without context parallelism."""
    replica = parallel_state.get_data_parallel_rank() // CASE.context_parallel
    found = [each | {"number": i} for i, each in enumerate(cases.batches_of(replica=replica))]
    return list(map(change, found)) if replica in replicas else found


def distance_of(rows: Rows, runtime) -> dict:
    """Runs a call both ways, and without gradients."""
    case = rows.case
    cases.join(case.alone)
    whole = whole_rows(rows.change, rows.replicas)
    model = cases.chunks_of(case.alone)
    logged = cases.run(case.alone, get_forward_backward_func(), model, whole)
    wanted = cases.gradients(model)
    cases.join(case)
    model, function = cases.chunks_of(case), shared(case, runtime)
    own = list(map(cases.part_of, whole))
    with room_of_one_rank(case, model):
        found = {"wanted": total(logged), "loss": total(cases.run(case, function, model, own))}
        gradients = cases.gradients(model)
        found["loss_without_gradients"] = total(
            cases.run(case, function, model, own, forward_only=True)
        )
    found["ways"] = [way for _, way in function._models]
    found["largest"] = largest(float(each.abs().max()) for each in wanted.values())
    found["difference"] = largest(
        float((gradients[name] - each).abs().max()) for name, each in wanted.items()
    )
    return found


def room_of_one_rank(case: cases.Case, model) -> contextlib.AbstractContextManager:
    """Returns the context in which the budget of the last rank is as a case says."""
    if dist.get_rank() < case.ranks - 1:
        return contextlib.nullcontext()
    return room_of(unwrapped(model[0]), case.prompt_tokens, is_ring=case.ring)


def total(logged: list) -> float:
    return float(sum(each["loss"][0] for each in logged))


def error_of(refused: Refused, runtime) -> dict:
    case = refused.case
    cases.join(case.alone)
    whole = whole_rows(refused.change)
    cases.join(case)
    model, function = cases.chunks_of(case), shared(case, runtime)
    own, applies = list(map(cases.part_of, whole)), dist.get_rank() in refused.ranks
    with room_of_one_rank(case, model):
        if not refused.comes_first:
            cases.run(case, function, model, cases.batches_of())
        if applies:
            own = list(map(refused.own_change, own))
        try:
            with refused.enter() if applies else contextlib.nullcontext():
                cases.run(case, function, model, own, **refused.arguments if applies else {})
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found, ranks = {}, int(os.environ["WORLD_SIZE"])
    rows = {name: each for name, each in ROWS.items() if each.case.ranks == ranks}
    refused = {name: each for name, each in REFUSED.items() if each.case.ranks == ranks}
    with conftest.a_runtime() as runtime:
        RAISED.runtime = runtime
        for names, work in ((rows, distance_of), (refused, error_of)):
            for name, each in names.items():
                wide = dataclasses.replace(each, case=each.case.wide)

                def run(name=name, each=wide, work=work) -> dict:
                    with joined(directory / name, CASE.alone):
                        return work(each, runtime)

                found[name] = left_by(runtime, run)
        for name in AFTER_ALL:
            with joined(directory / name, CASE.alone):
                found[name] = distance_of(AFTER_ALL[name], runtime)
    torch.save(found, directory / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
