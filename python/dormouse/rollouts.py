"""Which rollout worker generates which prompts, step by step.

A step ends with its longest response, so workers with short ones idle unless they go on to the next
step. :class:`Rollouts` predicts the lengths of a step's responses from those of earlier steps and
cuts its prompts into one share for each worker. A worker that is free takes the share that is left
and predicted to take longest, so the worker that was last in one step has the shortest share of the
next one. Rollouts that outgrow their prediction move to another worker, or to the next step, where
that is predicted to gain.

    rollouts = Rollouts(workers=16)
    step = rollouts.assign(prompts)            # when a worker is free and no step has a share left
    for piece in rollouts.take(step, worker):  # when that worker is free
        engine.submit(piece)
    rollouts.progress(step, [(request, response, tokens, finished), ...])  # now and then
    for move in rollouts.migrate(step):
        engine.move(move)
    rollouts.report(step)

docs/queries/rollout_assign.md and its neighbours have the rules. No function here needs a runtime.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .errors import ArgumentError
from .queries import query

# About 0.8 KB each at four steps of 16 responses.
_PROMPTS_KEPT = 1 << 18
# Steps that have ended and can still be reported.
_ENDED_STEPS_KEPT = 8
# Of migrations; the tail is a tenth, as published.
_TAIL_PERMILLE, _GROWTH_PERMILLE, _BATCH_MAX = 100, 1500, (1 << 32) - 1
# A later end of a step costs much, as it holds back the step after the next.
_LATE_PERMILLE = 5_000
# Mean shift of ranks from which predictions are hardly better than chance, whose shift is a third.
# What outgrows them says nothing then, and nothing moves.
_RANK_SHIFT_MAX = 0.3
# Of a report; no figure that is read here depends on it.
_STRONG_PERMILLE = 300
# Most tokens of a rollout.
_TOKENS_MAX = 1 << 28


@dataclass(frozen=True)
class Prompt:
    """A prompt of a step. ``prompt``: a number of the caller, equal in each step.
    ``prompt_tokens``: its length. ``responses``: how many to generate."""

    prompt: int
    prompt_tokens: int
    responses: int = 1


@dataclass(frozen=True)
class Piece:
    """Responses of one prompt that a worker generates. ``request``: its number in the step.
    ``deferred``: None, or the step, request and response of the rollout that goes on here, alone;
    ``begun_tokens``: how many tokens it has."""

    request: int
    prompt: int
    responses: int
    begun_tokens: int = 0
    deferred: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Move:
    """A rollout that leaves ``from_worker`` for ``to_worker``, or with None waits for the next step
    that is assigned. ``recompute_tokens``: tokens whose K and V are computed again there."""

    request: int
    response: int
    from_worker: int
    to_worker: int | None
    tokens: int
    recompute_tokens: int


@dataclass
class _Step:
    """``shares[i]`` is the worker that has share i of the assignment, None if it is still there."""

    assignment: dict
    requests: list[dict]
    known: list[dict]
    pieces: list[Piece]
    shares: list[int | None]
    progress: dict
    at: dict[tuple[int, int], dict] = field(default_factory=dict)
    # By prompt, what is or becomes an entry of the history: rollouts that another step ended too.
    lengths: dict[int, list[int]] = field(default_factory=dict)
    ended: bool = False

    def index(self) -> None:
        here = self.progress["rollouts"]
        self.at = {(each["request"], each["response"]): each for each in here}


class Rollouts:
    """Assigns prompts to rollout workers. Any-thread.

    ``workers``: how many. ``groups``, ``slope_permille``: None to choose them by trials on the
    history; groups then have from a tenth to 1.9 times as many prompts as the mean, given ones the
    same number each. A step with fewer prompts than workers has as many of the given groups as its
    workers allow. ``curve``: ``{"batches", "tokens_per_s"}``, the measured speed of a worker by
    sequences in its batch; None if a token takes the same time in any batch. ``steps``: earlier
    steps of a prompt that a prediction reads. ``quantile_permille``, ``unknown_tokens``: of the
    prediction.
    ``tail_permille``, ``growth_permille``, ``batch_max``, ``recompute_permille``,
    ``late_permille``, ``next_step``: of migrations, which docs/queries/rollout_migrate.md
    describes; a ``tail_permille`` of 0 migrates nothing. ``prompts_kept``: most prompts whose
    lengths are kept, those of the last steps. ``history``: that of an earlier run,
    :attr:`history`.
    """

    def __init__(
        self,
        workers: int,
        *,
        groups: int | None = None,
        slope_permille: int | None = None,
        curve: dict | None = None,
        steps: int = 3,
        quantile_permille: int = 500,
        unknown_tokens: int = 1,
        tail_permille: int = _TAIL_PERMILLE,
        growth_permille: int = _GROWTH_PERMILLE,
        batch_max: int = _BATCH_MAX,
        recompute_permille: int = 10,
        late_permille: int = _LATE_PERMILLE,
        next_step: bool = False,
        prompts_kept: int = _PROMPTS_KEPT,
        history: Sequence[dict] = (),
    ):
        if min(workers, steps, prompts_kept) < 1:
            raise ArgumentError(
                f"workers is {workers}, steps {steps}, prompts_kept {prompts_kept}; "
                "accepted: 1 or more"
            )
        self.workers = workers
        self._curve = curve
        self._groups = groups
        self._options = {
            "cut": "equal_count",
            "curve": curve,
            "slope_permille": slope_permille,
        }
        self._predictor = {
            "last_steps": steps,
            "quantile_permille": quantile_permille,
            "unknown_tokens": unknown_tokens,
        }
        self._migration = {
            "tail_permille": tail_permille,
            "growth_permille": growth_permille,
            "batch_max": batch_max,
            "curve": curve,
            "recompute_permille": recompute_permille,
            "late_permille": late_permille,
            "next_step": next_step,
            "predictor": self._predictor,
        }
        self._prompts_kept = prompts_kept
        # By prompt; those of the last steps come last.
        self._history: OrderedDict[int, list[list[int]]] = OrderedDict()
        for each in history:
            self._keep(each["prompt"], [list(step) for step in each["steps"]])
        self._steps: dict[int, _Step] = {}
        self._deferred: list[tuple[dict, Piece]] = []
        self._next = 1
        # Of the step that has ended last; as bad as can be before.
        self._rank_shift = 1.0
        self._lock = threading.Lock()

    @property
    def history(self) -> list[dict]:
        """The lengths of earlier responses, to go on with in a later run."""
        with self._lock:
            return self._history_of(self._history)

    def assign(self, prompts: Iterable[Prompt]) -> int:
        """Cuts the prompts of a step, and the rollouts deferred to it, into shares; returns its
        number.

        Raises :class:`dormouse.ArgumentError` for what docs/queries/rollout_assign.md refuses.
        """
        with self._lock:
            requests, pieces = [], []
            for each in prompts:
                pieces.append(Piece(len(pieces), each.prompt, each.responses))
                requests.append(
                    {
                        "prompt": each.prompt,
                        "prompt_tokens": each.prompt_tokens,
                        "responses": each.responses,
                        "begun_tokens": 0,
                    }
                )
            for request, piece in self._deferred:
                pieces.append(
                    Piece(len(pieces), piece.prompt, 1, piece.begun_tokens, piece.deferred)
                )
                requests.append(request)
            shares = min(self.workers, max(len(requests), 1))
            # Odd steps ascend: the last share is the longest.
            groups = self._groups_of(shares)
            options = {**self._options, "step": 1, "workers": shares, "groups": groups}
            known = self._history_of(each["prompt"] for each in requests)
            assignment = query(
                "rollout_assign",
                history={"prompts": known},
                requests=requests,
                predictor=self._predictor,
                options=options,
            )
            rollouts = [
                {
                    "request": number,
                    "response": response,
                    "worker": placed["worker"],
                    "tokens": requests[number]["begun_tokens"],
                    "finished": False,
                }
                for number, placed in enumerate(assignment["placed"])
                for response in range(placed["responses"])
            ]
            self._deferred = []
            number, self._next = self._next, self._next + 1
            progress = {"rollouts": rollouts, "deferred": []}
            step = _Step(assignment, requests, known, pieces, [None] * shares, progress)
            step.index()
            self._steps[number] = step
            return number

    def take(self, step: int, worker: int) -> list[Piece]:
        """Gives a free worker the longest share that is left; none is left if it is empty.

        Raises :class:`dormouse.ArgumentError` for an unknown step or worker, or a second share of a
        step.
        """
        with self._lock:
            state = self._step(step)
            if not 0 <= worker < self.workers or worker in state.shares:
                raise ArgumentError(
                    f"worker is {worker}; accepted: 0 to {self.workers - 1}, once in a step"
                )
            left = [share for share, taken in enumerate(state.shares) if taken is None]
            if not left:
                return []
            placed = state.assignment["placed"]
            filled = {placed[piece.request]["worker"] for piece in state.pieces}
            share = max(left, key=lambda each: (each in filled, each))
            state.shares[share] = worker
            return [
                piece for piece in state.pieces if placed[piece.request]["worker"] == share
            ]

    def progress(self, step: int, rollouts: Iterable[tuple[int, int, int, bool]]) -> None:
        """Takes the request, response, tokens so far and whether it has finished of some rollouts.
        When all of a step have finished or are deferred, it has ended, and its lengths become
        history.

        Raises :class:`dormouse.ArgumentError` for a rollout that is not in the step, and for tokens
        below 0 or above 2**28; nothing is taken then.
        """
        with self._lock:
            state = self._step(step)
            seen = [
                (state.at.get((r, n)), r, n, int(tokens), bool(done))
                for r, n, tokens, done in rollouts
            ]
            for at, request, response, tokens, _ in seen:
                if at is None or state.ended:
                    raise ArgumentError(
                        f"response {response} of request {request} is not in step {step}; "
                        "accepted: responses of the step that are not deferred, until it has ended"
                    )
                if not 0 <= tokens <= _TOKENS_MAX:
                    raise ArgumentError(
                        f"response {response} of request {request} has {tokens} tokens; "
                        f"accepted: 0 to {_TOKENS_MAX}"
                    )
            for at, _, _, tokens, done in seen:
                at["tokens"], at["finished"] = tokens, done
            self._end_if_ended(state)

    def migrate(self, step: int) -> list[Move]:
        """Proposes moves and takes them as made: what waits for the next step is in the next
        :meth:`assign`. The engine makes all of them. None before a step has ended, or after one
        whose lengths had nothing to do with what was predicted: what outgrows such a prediction is
        like the rest."""
        with self._lock:
            state = self._step(step)
            if state.ended or self._rank_shift > _RANK_SHIFT_MAX:
                return []
            # A share that nobody has taken has no worker to leave or to go to.
            here = [
                {**each, "finished": True} if state.shares[each["worker"]] is None else each
                for each in state.progress["rollouts"]
            ]
            moves = query(
                "rollout_migrate",
                assignment=state.assignment,
                requests=state.requests,
                history={"prompts": state.known},
                progress={**state.progress, "rollouts": here},
                options=self._migration,
            )
            if not moves:
                return []
            after = query("rollout_after", progress=state.progress, migrations=moves)
            state.progress = after["progress"]
            state.index()
            for each in after["deferred"]:
                self._defer(step, state, each)
            self._end_if_ended(state)
            return [self._move(state, each) for each in moves]

    def report(self, step: int, strong_permille: int = _STRONG_PERMILLE) -> dict:
        """Compares predicted with actual lengths (docs/queries/rollout_report.md) of a step that
        runs or has lately ended. ``workers`` is by worker; of one that has no share of the step,
        None."""
        with self._lock:
            state = self._step(step)
            report = self._report(state, strong_permille)
            by_worker: list[dict | None] = [None] * self.workers
            for worker, share in zip(state.shares, report["workers"], strict=True):
                if worker is not None:
                    by_worker[worker] = share
            return {**report, "workers": by_worker}

    def _report(self, state: _Step, strong_permille: int) -> dict:
        return query(
            "rollout_report",
            assignment=state.assignment,
            progress=state.progress,
            curve=self._curve,
            strong_permille=strong_permille,
        )

    def _step(self, step: int) -> _Step:
        if step not in self._steps:
            raise ArgumentError(
                f"step is {step}; accepted: an assigned step that has not ended, or one of the "
                f"last {_ENDED_STEPS_KEPT} that have"
            )
        return self._steps[step]

    def _history_of(self, prompts: Iterable[int]) -> list[dict]:
        known = dict.fromkeys(each for each in prompts if each in self._history)
        copied = {each: [list(step) for step in self._history[each]] for each in known}
        return [{"prompt": prompt, "steps": steps} for prompt, steps in copied.items()]

    def _groups_of(self, shares: int) -> int | None:
        if self._groups is None or shares == self.workers:
            return self._groups
        fewer = range(min(self._groups, shares), 0, -1)
        return next(each for each in fewer if self._curve is not None or shares % each == 0)

    def _defer(self, step: int, state: _Step, rollout: dict) -> None:
        request = rollout["request"]
        piece = state.pieces[request]
        origin = piece.deferred or (step, request, rollout["response"])
        begun = {**state.requests[request], "responses": 1, "begun_tokens": rollout["tokens"]}
        self._deferred.append((begun, Piece(0, piece.prompt, 1, rollout["tokens"], origin)))

    @staticmethod
    def _move(state: _Step, move: dict) -> Move:
        to = None if move["to"] == "next_step" else state.shares[move["to"]["worker"]]
        names = ("request", "response", "tokens", "recompute_tokens")
        kept = {name: move[name] for name in names}
        return Move(from_worker=state.shares[move["from"]], to_worker=to, **kept)

    def _end_if_ended(self, state: _Step) -> None:
        if not all(each["finished"] for each in state.progress["rollouts"]):
            return
        self._rank_shift = self._report(state, _STRONG_PERMILLE)["rank_shift"]["mean"]
        state.ended = True
        for prompt, tokens in state.lengths.items():
            self._remember(prompt, tokens)
        for each in state.progress["rollouts"]:
            piece = state.pieces[each["request"]]
            # What was deferred is a response of the step that it began in, if that is still known.
            home = state if piece.deferred is None else self._steps.get(piece.deferred[0])
            if home is None:
                continue
            if piece.prompt not in home.lengths:
                home.lengths[piece.prompt] = []
                if home.ended:
                    self._remember(piece.prompt, home.lengths[piece.prompt])
            home.lengths[piece.prompt].append(each["tokens"])
        ended = [number for number, each in self._steps.items() if each.ended]
        for number in ended[:-_ENDED_STEPS_KEPT]:
            del self._steps[number]

    def _remember(self, prompt: int, lengths: list[int]) -> None:
        # Trials hold one step out.
        earlier = self._history.get(prompt, [])[-self._predictor["last_steps"] :]
        self._keep(prompt, [*earlier, lengths])

    def _keep(self, prompt: int, steps: list[list[int]]) -> None:
        self._history[prompt] = steps
        self._history.move_to_end(prompt)
        if len(self._history) > self._prompts_kept:
            self._history.popitem(last=False)
