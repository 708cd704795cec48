"""The driver of rollout assignment, alone and on the simulated engine of benches/history."""

from __future__ import annotations

import sys
from collections import Counter
from statistics import mean

import pytest
from conftest import ROOT

from dormouse import ArgumentError
from dormouse.rollouts import Prompt, Rollouts

sys.path.append(str(ROOT / "benches" / "history"))

import assignment  # noqa: E402
from rollout_engine import Engine, Response  # noqa: E402

HISTORY = [
    {"prompt": prompt, "steps": [[100 * prompt + back] for back in range(3)]}
    for prompt in range(1, 9)
]


def of_lengths(groups: int | None = 4, **options) -> Rollouts:
    """``groups``: given ones have as many prompts each."""
    return Rollouts(4, groups=groups, history=HISTORY, **options)


def prompts(responses: int = 1) -> list[Prompt]:
    return [Prompt(prompt, 50, responses) for prompt in range(1, 9)]


def after_a_step(lengths=range(100, 900, 100), **options) -> Rollouts:
    rollouts = of_lengths(**options)
    step = rollouts.assign(prompts())
    rollouts.progress(step, [(request, 0, length, True) for request, length in enumerate(lengths)])
    return rollouts


def test_the_first_free_worker_takes_the_longest_share():
    rollouts = of_lengths()
    step = rollouts.assign(prompts())
    shares = {worker: rollouts.take(step, worker) for worker in (2, 0, 3, 1)}
    taken = {worker: sorted(piece.prompt for piece in share) for worker, share in shares.items()}
    assert taken == {2: [7, 8], 0: [5, 6], 3: [3, 4], 1: [1, 2]}
    chosen = of_lengths(groups=None)
    step = chosen.assign(prompts())
    rising = [[piece.prompt for piece in chosen.take(step, worker)] for worker in range(4)]
    assert list(map(sorted, rising)) == [[6, 7, 8], [4, 5], [2, 3], [1]], "their numbers rise"
    assert all(piece.deferred is None and piece.responses == 1 for piece in shares[2])
    # Fewer prompts than workers: the rest is free for the next step.
    few = chosen.assign(prompts()[:2])
    assert [len(chosen.take(few, worker)) for worker in range(4)] == [1, 1, 0, 0]


def test_lengths_of_a_step_that_has_ended_become_history():
    rollouts = of_lengths()
    step = rollouts.assign(prompts())
    rollouts.progress(step, [(request, 0, 7000 - request, True) for request in range(7)])
    assert rollouts.history == HISTORY, "it has not ended"
    rollouts.progress(step, [(7, 0, 9, True)])
    learned = {each["prompt"]: each["steps"] for each in rollouts.history}
    assert learned[1] == [[100], [101], [102], [7000]] and learned[8][-1] == [9]
    again = Rollouts(4, groups=4, history=rollouts.history, steps=1)
    longest = again.take(again.assign(prompts()), 0)
    assert sorted(piece.prompt for piece in longest) == [1, 2]
    report = rollouts.report(step)
    assert report["workers"] == [None] * 4, "no worker has taken a share"


def test_the_lengths_of_the_last_prompts_are_kept():
    rollouts = Rollouts(4, prompts_kept=100, history=HISTORY)
    for begin in range(1000, 1640, 64):
        step = rollouts.assign(Prompt(prompt, 50) for prompt in [1, *range(begin, begin + 63)])
        rollouts.progress(step, [(request, 0, request + 1, True) for request in range(64)])
    kept = {each["prompt"]: each["steps"] for each in rollouts.history}
    assert len(kept) == 100 and kept[1] == [[1]] * 4, "it was in each step"
    assert all(kept[begin + number] == [[number + 2]] for number in range(63))
    with_fewer = Rollouts(4, prompts_kept=2, history=HISTORY)
    assert with_fewer.history == HISTORY[-2:]


def test_a_deferred_rollout_goes_on_in_the_next_step():
    rollouts = after_a_step(next_step=True)
    step = rollouts.assign(prompts())
    owner = {}
    for worker in range(4):
        owner |= {piece.request: worker for piece in rollouts.take(step, worker)}
    states = [(request, 0, 100 * request + 100, request != 1) for request in range(8)]
    states[1] = (1, 0, 500, False)
    rollouts.progress(step, states)
    [move] = rollouts.migrate(step)
    assert (move.request, move.from_worker, move.to_worker) == (1, owner[1], None)
    assert (move.tokens, move.recompute_tokens) == (500, 550)
    assert rollouts.migrate(step) == [], "the step has ended"
    assert {each["prompt"]: each["steps"][-1] for each in rollouts.history}[8] == [800]
    with pytest.raises(ArgumentError, match=f"response 0 of request 1 is not in step {step}"):
        rollouts.progress(step, [(1, 0, 501, True)])
    report = rollouts.report(step)
    assert sum(share["actual_tokens"] for share in report["workers"]) == sum(s[2] for s in states)

    following = rollouts.assign(prompts()[:4])
    pieces = [piece for worker in range(4) for piece in rollouts.take(following, worker)]
    [deferred] = [piece for piece in pieces if piece.deferred is not None]
    assert deferred.deferred == (step, 1, 0) and deferred.begun_tokens == 500
    assert deferred.prompt == 2 and Counter(piece.request for piece in pieces) == Counter(range(5))
    took = {piece.request: 1000 if piece.deferred is None else 1500 for piece in pieces}
    rollouts.progress(following, [(request, 0, length, True) for request, length in took.items()])
    learned = {each["prompt"]: each["steps"] for each in rollouts.history}
    assert learned[2][-2:] == [[1000], [1500]], "one step each"


def test_a_deferred_rollout_is_of_the_step_that_it_began_in():
    rollouts = after_a_step(next_step=True)
    step = rollouts.assign(prompts(responses=2))
    for worker in range(4):
        rollouts.take(step, worker)
    states = [(r, n, 100 * r + 100, True) for r in range(8) for n in range(2)]
    states[2] = (1, 0, 500, False)
    rollouts.progress(step, states)
    [move] = rollouts.migrate(step)
    assert (move.request, move.response) == (1, 0)
    # A step without its prompt ends what it began.
    following = rollouts.assign([Prompt(8, 50)])
    requests = [piece.request for worker in range(4) for piece in rollouts.take(following, worker)]
    known = rollouts.history
    rollouts.progress(following, [(request, 0, 900, True) for request in requests])
    learned = {each["prompt"]: each["steps"] for each in rollouts.history}
    assert learned[2][-1] == [200, 900] and learned[8][-1] == [900]
    assert {each["prompt"]: each["steps"] for each in known}[2][-1] == [200], "it is a copy"


def test_given_groups_are_fewer_in_a_step_of_few_prompts():
    def shares_of(count, groups, curve=None):
        rollouts = Rollouts(8, groups=groups, curve=curve, history=HISTORY)
        step = rollouts.assign(prompts()[:count])
        return [len(rollouts.take(step, worker)) for worker in range(8)]

    for count in range(1, 9):
        assert shares_of(count, 4) == [1] * count + [0] * (8 - count)
        assert shares_of(count, 4, assignment.CURVE) == [1] * count + [0] * (8 - count)
    with pytest.raises(ArgumentError, match="8 workers for 3 groups"):
        shares_of(8, 3)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_tier_of_several_workers_gives_its_longest_prompt_first(groups):
    rollouts = of_lengths(groups=groups)
    step = rollouts.assign(prompts())
    longest = [max(piece.prompt for piece in rollouts.take(step, worker)) for worker in range(4)]
    assert longest == sorted(longest, reverse=True) and longest[0] == 8


def test_nothing_moves_to_a_share_that_nobody_has_taken():
    rollouts = after_a_step(late_permille=0)
    step = rollouts.assign(prompts())
    shares = [rollouts.take(step, worker) for worker in range(2)]
    mine = sorted(piece.request for share in shares for piece in share)
    assert mine == [4, 5, 6, 7]
    rollouts.progress(step, [(request, 0, 760, request != 4) for request in mine])
    assert rollouts.migrate(step) == []
    # Taken, it is a worker that is busy for longer.
    rollouts.take(step, 2)
    [move] = rollouts.migrate(step)
    assert (move.request, move.from_worker, move.to_worker) == (4, 1, 2)


def test_nothing_moves_after_a_step_whose_lengths_were_not_as_predicted():
    def moves_after(lengths):
        rollouts = after_a_step(lengths, next_step=True)
        step = rollouts.assign(prompts())
        for worker in range(4):
            rollouts.take(step, worker)
        rollouts.progress(step, [(request, 0, 500, request != 1) for request in range(8)])
        return len(rollouts.migrate(step))

    predicted = [100 * prompt for prompt in range(1, 9)]
    assert moves_after(predicted) == 1 and moves_after(predicted[::-1]) == 0


def test_refusals_name_what_is_accepted():
    rollouts = of_lengths()
    step = rollouts.assign(prompts())
    rollouts.take(step, 0)
    with pytest.raises(ArgumentError, match="worker is 0; accepted: 0 to 3, once in a step"):
        rollouts.take(step, 0)
    with pytest.raises(ArgumentError, match="worker is 4"):
        rollouts.take(step, 4)
    with pytest.raises(ArgumentError, match="step is 9"):
        rollouts.report(9)
    with pytest.raises(ArgumentError, match="response 1 of request 0"):
        rollouts.progress(step, [(0, 0, 5, False), (0, 1, 5, False)])
    # The last one would end the step.
    for tokens in (-1, (1 << 28) + 1):
        with pytest.raises(ArgumentError, match=f"request 7 has {tokens} tokens; accepted: 0 to "):
            rollouts.progress(step, [(r, 0, tokens if r == 7 else 5, True) for r in range(8)])
    with pytest.raises(ValueError, match="many"):
        rollouts.progress(step, [(0, 0, 5, True), (1, 0, "many", True)])
    assert rollouts.report(step)["actual_imbalance"] == 1.0, "nothing of a refused call is taken"
    with pytest.raises(ArgumentError, match="workers is 0"):
        Rollouts(0)
    with pytest.raises(ArgumentError, match="prompts is 0"):
        rollouts.assign([])


@pytest.mark.parametrize("curve", [None, assignment.CURVE])
def test_the_simulated_engine_takes_what_decoding_takes(curve):
    """One worker, two steps: the sum of what each takes token by token."""
    lengths = [[5, 90, 90, 300], [40]]
    for poll in (None, lambda step, engine: engine.states(step)):
        engine = Engine(
            1,
            lambda step, _: [Response((n,), it) for n, it in enumerate(lengths[step])],
            curve=curve,
            poll=poll,
            poll_tokens=7,
        )
        each = engine.seconds
        wanted = sum(
            each[sum(it > token for it in step)] for step in lengths for token in range(max(step))
        )
        assert engine.run(2) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("curve", [None, assignment.CURVE])
def test_every_response_of_a_driven_engine_is_generated_once(curve):
    case = assignment.Case.drawn("heavy", 0.5, 1)
    driven = assignment.Driven(case, curve, next_step=True)
    driven.run()
    assert driven.engine.moved > 0
    ended = [each for step in driven.engine.finished.values() for each in step]
    made = Counter(each.length for each in [*ended, *driven.waiting.values()])
    assert made == Counter(it for step in case.lengths for each in step for it in each)
    assert all(each.tokens == pytest.approx(each.length) for each in ended)


@pytest.mark.slow
@pytest.mark.parametrize("curve", [None, assignment.CURVE])
def test_assignment_gains_and_migrations_do_not_lose(curve):
    gains, migrations = [], []
    for seed in range(2):
        case = assignment.Case.drawn("heavy", 0.75, seed)
        still = assignment.Driven(case, curve, tail_permille=0).run()
        moving = assignment.Driven(case, curve).run()
        gains.append(assignment.random_seconds(case, seed, curve) / still)
        migrations.append(still / moving)
    assert mean(gains) > (1.4 if curve is None else 1.15)
    assert mean(migrations) > 1.0 and min(migrations) > 0.98
