"""Simulated rollout workers that do not wait for each other.

A worker decodes the responses of its share together, as fast as a curve says for as many as are
left, and takes its next share when the last one has ended or moved. Step k waits until step k - 2
has ended, whose responses a trainer needs before the weights of step k: at most one step off
policy. """

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# Steps that a worker may be ahead of the oldest one that has not ended.
AHEAD = 1
# Seconds per token of any batch without a curve.
TOKEN_S = 0.01


def token_seconds(curve: dict | None, batch_max: int) -> list[float]:
    """Seconds per token by sequences in the batch, linear between points as the planner's."""
    if curve is None:
        return [TOKEN_S] * (batch_max + 1)
    batches, speeds = curve["batches"], curve["tokens_per_s"]
    seconds = []
    for batch in range(batch_max + 1):
        at = bisect_left(batches, batch)
        if at == 0:
            seconds.append(batches[0] / speeds[0])
        elif at == len(batches):
            seconds.append(batch / speeds[-1])
        else:
            share = (batch - batches[at - 1]) / (batches[at] - batches[at - 1])
            seconds.append(batch / (speeds[at - 1] + (speeds[at] - speeds[at - 1]) * share))
    return seconds


@dataclass
class Response:
    """One response: who it is, its whole length, and its tokens so far."""

    name: tuple
    length: int
    tokens: float = 0.0
    recompute_tokens: int = 0


@dataclass
class Worker:
    step: int = -1
    responses: list[Response] = field(default_factory=list)
    # What it has is as of then; before it, it recomputes.
    time: float = 0.0
    free_at: float = 0.0
    version: int = 0


class Engine:
    """``take(step, worker)`` gives a share, ``poll(step, engine)`` is asked every ``poll_tokens``
    tokens of a response that is alone, and moves responses by :meth:`move`."""

    def __init__(
        self,
        workers: int,
        take: Callable[[int, int], Sequence[Response]],
        *,
        curve: dict | None = None,
        recompute_permille: int = 10,
        poll: Callable[[int, "Engine"], None] | None = None,
        poll_tokens: int = 256,
        batch_max: int = 1 << 12,
    ):
        self.workers = [Worker() for _ in range(workers)]
        self.take, self.poll = take, poll
        self.seconds = token_seconds(curve, batch_max)
        self.recompute_s = self.seconds[1] * recompute_permille / 1000
        self.poll_s = poll_tokens * self.seconds[1]
        self.time = 0.0
        self.moved = self.ended = 0
        self.finished: dict[int, list[Response]] = {}
        self.left: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        self._events: list[tuple[float, int, int]] = []
        self._told: set[int] = set()

    def run(self, steps: int) -> float:
        """Returns the seconds in which all steps end."""
        ended = [False] * (steps + AHEAD + 1)
        waiting = list(range(len(self.workers)))
        next_poll = self.poll_s
        while True:
            for number in sorted(waiting, key=lambda it: (self.workers[it].free_at, it)):
                step = self.workers[number].step + 1
                if step < steps and (step <= AHEAD or ended[step - AHEAD - 1]):
                    waiting.remove(number)
                    self._begin(number, step)
            if not self._events:
                return self.time
            if self.poll is not None and self._events[0][0] > next_poll:
                self.time, next_poll = next_poll, next_poll + self.poll_s
                for step in [step for step in self.left if step not in self._told]:
                    self.poll(step, self)
                    # Its last responses are told once, when all shares have been taken.
                    if not self.left[step] and self.taken[step] == len(self.workers):
                        self._told.add(step)
            else:
                self.time, number, version = heapq.heappop(self._events)
                if self.workers[number].version == version:
                    self._advance(number)
                    self._plan(number)
            for number, worker in enumerate(self.workers):
                if worker.step >= 0 and not worker.responses and number not in waiting:
                    worker.free_at = self.time
                    waiting.append(number)
            for step, left in self.left.items():
                if left == 0 and self.taken[step] == len(self.workers) and step < steps:
                    ended[step] = True

    def states(self, step: int) -> list[tuple[tuple, int, bool]]:
        """Name, tokens so far and whether it has finished of a step's responses that have begun."""
        for number, worker in enumerate(self.workers):
            if worker.step == step:
                self._advance(number)
                self._plan(number)
        done = [(each.name, each.length, True) for each in self.finished.get(step, [])]
        running = (w for w in self.workers if w.step == step)
        return done + [
            (each.name, int(each.tokens), False) for w in running for each in w.responses
        ]

    def move(self, name: tuple, source: int, target: int | None, recompute_tokens: int) -> Response:
        """Moves a response to a worker, or out of its step."""
        worker = self.workers[source]
        response = next(each for each in worker.responses if each.name == name)
        worker.responses.remove(response)
        self.moved += 1
        if target is None:
            self.left[worker.step] -= 1
            response.recompute_tokens = recompute_tokens
        else:
            other = self.workers[target]
            if other.step != worker.step or not other.responses:
                raise ValueError(f"worker {target} is not busy with step {worker.step}")
            self._advance(target)
            other.responses.append(response)
            other.time = max(other.time, self.time) + recompute_tokens * self.recompute_s
            self._plan(target)
        self._plan(source)
        return response

    def _begin(self, number: int, step: int) -> None:
        worker = self.workers[number]
        worker.step, worker.responses = step, list(self.take(step, number))
        self.left[step] = self.left.get(step, 0) + len(worker.responses)
        self.taken[step] = self.taken.get(step, 0) + 1
        recompute = sum(each.recompute_tokens for each in worker.responses)
        worker.time = self.time + recompute * self.recompute_s
        self._plan(number)
        if not worker.responses:
            heapq.heappush(self._events, (self.time, number, worker.version))

    def _advance(self, number: int) -> None:
        worker = self.workers[number]
        if self.poll is None:
            # Nothing looks at a share before it has ended.
            self._finish(worker, worker.responses)
        while worker.responses and worker.time < self.time:
            each = self.seconds[len(worker.responses)]
            least = min(it.length - it.tokens for it in worker.responses)
            passed = min(least, (self.time - worker.time) / each)
            worker.time = worker.time + passed * each if passed == least else self.time
            for it in worker.responses:
                it.tokens += passed
            ended = [it for it in worker.responses if it.length - it.tokens < 1e-6]
            if ended:
                self._finish(worker, ended)
        worker.time = max(worker.time, self.time)

    def _finish(self, worker: Worker, ended: list[Response]) -> None:
        names = {it.name for it in ended}
        self.finished.setdefault(worker.step, []).extend(ended)
        self.left[worker.step] -= len(ended)
        for it in ended:
            it.tokens = it.length
        worker.responses = [it for it in worker.responses if it.name not in names]

    def _plan(self, number: int) -> None:
        """Plans the next end of a response, or that of the share if nothing looks at it before."""
        worker = self.workers[number]
        worker.version += 1
        if worker.responses and self.poll is None:
            at, before = worker.time, 0.0
            lefts = sorted(it.length - it.tokens for it in worker.responses)
            for batch, left in zip(range(len(lefts), 0, -1), lefts, strict=True):
                at, before = at + (left - before) * self.seconds[batch], left
            heapq.heappush(self._events, (at, number, worker.version))
        elif worker.responses:
            least = min(it.length - it.tokens for it in worker.responses)
            at = worker.time + least * self.seconds[len(worker.responses)]
            # Past the end by rounding's reach, so that it has ended then.
            heapq.heappush(self._events, (at + 1e-7, number, worker.version))
