"""One rank of test_one_thread.py, over gloo: two threads call the schedule for one model.

``python threads_worker.py DIRECTORY``, with the environment of torchrun, leaves ``RANK.pt`` there:
what :func:`what_came_of` returns of each of :data:`CASES` with as many ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import conftest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
import expert_counts
import dormouse.megatron
from agreement_worker import CHUNKS, STAGES, Calls
from dormouse.failures import RankFailedError
from dormouse.hf.one_thread import holding
from dormouse.hf.prefix import PlannedForward
from dormouse.megatron import read_batch
from dormouse.megatron.refusals import unwrapped
from failing_worker import joined
from in_use import left_by
from models import distance
from on_cpu import OnCpu

CASES = {
    "one rank": cases.Case(),
    "one rank, twice": cases.Case(share={"graphs": "twice", "microbatch_tokens": 9}),
    "two stages": STAGES,
    "two stages of two chunks": CHUNKS,
}
READ, PASSES, LOSS, END = "its batches", "its passes", "its losses", "its end"
"""Where the first thread is in its call. Passes are those of the check, too."""
SECOND_CALLS = {
    "same function": {},
    "same function, forward only": {"forward_only": True},
    "same function, no losses": {"forward_only": True, "collect_non_loss_data": True},
    "another function": {},
    "another function, forward only": {"forward_only": True},
    "another function, last part without its wrapper": {},
}
# How much later the last rank ends the first call: the others have begun the next one.
LATE_S = 1.0
SECONDS_MAX = 60


def error_on_another_thread(work: Callable) -> str | None:
    """Returns the error of ``work`` on a thread of its own."""
    found: list[str | None] = []

    def run():
        try:
            # Modes of torch are a thread's own.
            with OnCpu():
                work()
            found.append(None)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="another", daemon=True)
    thread.start()
    thread.join(SECONDS_MAX)
    return found[0] if found else "it does not end"


def is_first() -> bool:
    return threading.current_thread() is threading.main_thread()


class Tried:
    """The errors of calls on another thread while the first is in one."""

    def __init__(self, calls: Calls, runtime):
        self._calls = calls
        self._another = dormouse.megatron.share(
            get_forward_backward_func(), runtime=runtime, **calls.case.share
        )
        self.errors: dict[str, dict[str, set[str | None]]] = {}
        """By the place of the first thread, and by the call."""

    def at(self, place: str) -> None:
        if not is_first():
            return
        errors = self.errors.setdefault(place, {name: set() for name in SECOND_CALLS})
        for name, named in SECOND_CALLS.items():
            function = self._calls.shared if name.startswith("same") else self._another
            chunks = self._calls.chunks
            if "last part" in name:
                chunks = [chunks[-1].module]
            own = cases.arguments_of(self._calls.case, chunks, cases.batches_of())
            errors[name].add(error_on_another_thread(partial(function, **own | named)))

    def read(self, batch):
        self.at(READ)
        return read_batch(batch)

    def forward_step(self, data_iterator, model):
        losses, loss_func = cases.forward_step(self._calls.case, data_iterator, model)

        def own(given):
            self.at(LOSS)
            return loss_func(given)

        return losses, own

    def finalize(self, *args, **named) -> None:
        expert_counts.finalize(*args, **named)
        if is_first() and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(LATE_S)
        self.at(END)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        config = unwrapped(self._calls.chunks[0]).config
        own, finalize = PlannedForward.forward, config.finalize_model_grads_func

        def forward(prefix, *args, **named):
            self.at(PASSES)
            return own(prefix, *args, **named)

        config.finalize_model_grads_func = self.finalize
        with (
            mock.patch.object(PlannedForward, "forward", forward),
            mock.patch.object(self._calls.shared, "_read", self.read),
        ):
            yield
        config.finalize_model_grads_func = finalize


def backward_on_another_thread() -> contextlib.AbstractContextManager:
    """Context in which backwards of the first thread run on another, as autograd's do on a GPU."""
    own = torch.autograd.backward

    def backward(*args, **named):
        if not is_first():
            return own(*args, **named)
        error = error_on_another_thread(partial(own, *args, **named))
        if error is not None:
            raise RuntimeError(error)

    return mock.patch.object(torch.autograd, "backward", backward)


def hold(chunks: list[torch.nn.Module]) -> None:
    for each in chunks:
        with holding(unwrapped(each)):
            pass


def raising(data_iterator, model):
    raise FloatingPointError("a loss")


def what_came_of(case: cases.Case, runtime) -> dict:
    """Returns errors of calls on another thread, and how far gradients are from Megatron's own: of
    the first thread's call, of another thread's afterwards, and of one with backwards on another.
    After an error: what it was, and whether the model is free."""
    calls = Calls(case, runtime)
    calls.run(get_forward_backward_func())
    exact, found = cases.gradients(calls.chunks), {}

    def distance_of_call() -> float:
        return distance(cases.gradients(calls.chunks), exact)

    tried = Tried(calls, runtime)
    with tried.in_place():
        calls.run(calls.shared, forward_step_func=tried.forward_step)
    found |= {"errors": tried.errors, "first": distance_of_call()}
    found["error"] = error_on_another_thread(lambda: calls.run(calls.shared))
    found["next"] = distance_of_call()
    with backward_on_another_thread():
        calls.run(calls.shared)
    found["backward"] = distance_of_call()
    try:
        calls.run(calls.shared, forward_step_func=raising)
    except (FloatingPointError, RankFailedError) as error:
        found["raised"] = type(error).__name__
    # Process groups of several ranks are closed now, so no call is made.
    found["after an error"] = error_on_another_thread(partial(hold, calls.chunks))
    return found


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    with conftest.a_runtime() as runtime:
        for name, case in CASES.items():
            if case.ranks == int(os.environ["WORLD_SIZE"]):

                def run(name=name, case=case.wide) -> dict:
                    with joined(directory / name, case):
                        return what_came_of(case, runtime)

                found[name] = left_by(runtime, run)
    torch.save(found, directory / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
