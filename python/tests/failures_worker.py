"""One rank of test_failures_ranks.py, over gloo.

``python failures_worker.py DIRECTORY errors`` runs every case of :data:`CASES`, each in a process
group of its own, and leaves ``errors.RANK`` there: of each case the error, and what is in use.
``python failures_worker.py DIRECTORY killed RANK`` kills that rank in the loss, of which a child
lives on, and leaves ``error.RANK`` of the other. With the environment of torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import models
import torch
import torch.distributed as dist
from conftest import a_runtime
from test_score_faults import a_longer_batch, in_use
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dormouse import fail_together
from dormouse.failures import scope
from dormouse.hf import SharedPrefix
from dormouse.hf.step import Step

# Of the child of a rank that is killed.
CHILD_SECONDS = 60


class LossError(Exception):
    """Of a trainer's loss."""


class Rank:
    """This process in one case."""

    def __init__(self, runtime):
        self.rank, self.runtime = dist.get_rank(), runtime
        self.model = DistributedDataParallel(a_model(), bucket_cap_mb=0.1)
        self.shared = SharedPrefix(self.model, runtime)
        ids, mask, self.keep = a_longer_batch()
        # Each prompt is on both ranks.
        self.rows = ids[self.rank :: 2], mask[self.rank :: 2]

    def score(self):
        return self.shared.score(*self.rows, keep=self.keep).log_probabilities

    def step(self) -> None:
        self.score().sum().backward()


def a_model() -> torch.nn.Module:
    return models.tiny(num_hidden_layers=2)


def raises(*args, **kwargs):
    raise LossError("of one rank")


def loss(failing: int) -> Callable[[Rank], None]:
    def run(own: Rank) -> None:
        values = own.score()
        if own.rank == failing:
            raises()
        values.sum().backward()

    return run


def pass_of_the_backward(own: Rank) -> None:
    failing = mock.patch.object(Step, "_prefix_backward", raises)
    with failing if own.rank == 1 else contextlib.nullcontext():
        own.step()


def reduction(own: Rank) -> None:
    """The others wait in one bucket, and another is under way."""
    if own.rank == 1:
        first = next(own.model.parameters())
        first.register_post_accumulate_grad_hook(raises)
    own.step()


def another_group(own: Rank) -> None:
    group = dist.new_group([0, 1])
    if own.rank == 1:
        raises()
    dist.all_gather([torch.zeros(3)] * 2, torch.zeros(3), group=group)


def gathers_of_shards(own: Rank) -> None:
    model = a_model()
    for layer in model.model.layers:
        fully_shard(layer)
    shared = SharedPrefix(fully_shard(model), own.runtime)
    losses = raises if own.rank == 1 else lambda logits, labels, group, i: logits.sum()
    shared.step([models.group()], losses)


def while_it_computes(own: Rank) -> None:
    """Without a collective: at a microbatch."""
    if own.rank == 1:
        raises()
    with torch.no_grad():
        while True:
            own.score()


def leaves_first(own: Rank) -> None:
    """Its loop ends without a collective, when another rank has failed."""
    if own.rank == 1:
        raises()
    while scope._member.failure is None:
        time.sleep(0.01)


def each_its_own(own: Rank) -> None:
    own.score()
    # A rank that is still in its step would hear of the other's failure there.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"scored {own.rank}", "")
    store.wait([f"scored {rank}" for rank in range(dist.get_world_size())])
    raise LossError(f"of rank {own.rank}")


def exits(own: Rank) -> None:
    if own.rank == 1:
        sys.exit(3)
    own.step()


def nothing_fails(own: Rank) -> None:
    """An evaluation, an error that is caught, an exit, and ranks that leave one by one."""
    with torch.no_grad():
        own.score()
    with contextlib.suppress(LossError):
        loss(own.rank)(own)
    own.model.zero_grad()
    own.step()
    time.sleep(own.rank)
    sys.exit(0)


CASES = {
    "loss of rank 0": loss(0),
    "loss of rank 1": loss(1),
    "pass of the backward": pass_of_the_backward,
    "reduction": reduction,
    "another group": another_group,
    "gathers of shards": gathers_of_shards,
    "while it computes": while_it_computes,
    "leaves first": leaves_first,
    "each its own": each_its_own,
    "exits": exits,
    "nothing fails": nothing_fails,
    "no group is left": lambda own: own.step(),
}


def what_came_of(case, runtime) -> dict:
    own = Rank(runtime)
    own.step()
    own.model.zero_grad()
    try:
        with fail_together():
            case(own)
    except BaseException as error:
        failure = getattr(error, "failure", None)
        return {"error": f"{type(error).__name__}: {error}", "rank": failure and failure.rank}
    return {"error": None, "gradients": models.take_gradients(own.model.module)}


def run_cases(directory: Path, runtime) -> dict:
    found = {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, case in CASES.items():
        store = dist.FileStore(str(directory / name), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        found[name] = what_came_of(case, runtime)
        dist.destroy_process_group()
        found[name]["in use"] = in_use(runtime)
    return found


def be_killed(directory: Path) -> None:
    """As a rank whose data loader has workers, which keep its sockets open."""
    child = os.fork()
    if child == 0:
        time.sleep(CHILD_SECONDS)
        os._exit(0)
    (directory / "child").write_text(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def main(directory: Path, kind: str, *ranks: str) -> None:
    torch.set_num_threads(1)
    with a_runtime(64 << 20) as runtime:
        if kind == "errors":
            found = run_cases(directory, runtime)
            torch.save(found, directory / f"errors.{os.environ['RANK']}")
            return
        dist.init_process_group("gloo")
        own = Rank(runtime)
        try:
            with fail_together():
                values = own.score()
                if str(own.rank) in ranks:
                    be_killed(directory)
                values.sum().backward()
        except Exception as error:
            (directory / f"error.{own.rank}").write_text(f"{type(error).__name__}: {error}")
            # The process ends as it would, and does not wait for anybody.
            raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
