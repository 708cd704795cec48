"""Choosing kernels by measurements and clocks of the test."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from dormouse.hf.kernel_choice import REASON_CHARS_MAX, Choices


class OutOfMemory(RuntimeError):
    pass


A, B, C, LAST = (SimpleNamespace(name=name) for name in ("a", "b", "c", "last"))


class Measurements:
    """Measurements with these seconds, or errors; counts them."""

    def __init__(self, **outcomes):
        self.outcomes, self.run = outcomes, []

    def __call__(self):
        return self._measurement

    def _measurement(self, kernel) -> float:
        self.run.append(kernel.name)
        outcome = self.outcomes[kernel.name]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def choices():
    return Choices(LAST, lambda error: isinstance(error, OutOfMemory))


def served_by(choices, kind, call=lambda kernel: None) -> str:
    served = []

    def calling(kernel):
        call(kernel)
        served.append(kernel.name)

    choices.run(kind, calling)
    return served[0]


def refusing(*names: str):
    def call(kernel):
        if kernel.name in names:
            raise ValueError(f"{kernel.name} does not")

    return call


def test_the_fastest_serves_and_each_is_measured_once(choices):
    measurements = Measurements(a=2.0, b=1.0, c=3.0)
    for _ in range(3):
        choices.settle("kind", [A, B, C], measurements)
        assert served_by(choices, "kind") == "b"
    assert measurements.run == ["a", "b", "c"]
    assert choices.known()["kind"].seconds == {"a": 2.0, "b": 1.0, "c": 3.0}


def test_kinds_are_chosen_apart(choices):
    choices.settle("one", [A, B], Measurements(a=1.0, b=2.0))
    choices.settle("other", [A, B], Measurements(a=2.0, b=1.0))
    assert [served_by(choices, kind) for kind in ("one", "other")] == ["a", "b"]


def test_the_first_wins_among_equals(choices):
    choices.settle("kind", [C, A, B], Measurements(a=1.0, b=1.0, c=1.0))
    assert served_by(choices, "kind") == "c"


def test_a_measurement_that_raises_takes_the_kernel_out_and_keeps_the_reason(choices):
    error = TypeError("got an unexpected keyword\nand a second line")
    choices.settle("kind", [A, B], Measurements(a=error, b=9.0))
    assert served_by(choices, "kind") == "b"
    assert choices.known()["kind"].refused == {"a": "TypeError: got an unexpected keyword"}


def test_a_call_that_is_refused_goes_to_the_next_and_later_calls_too(choices):
    choices.settle("kind", [A, B, C], Measurements(a=1.0, b=2.0, c=3.0))
    assert served_by(choices, "kind", refusing("a")) == "b"
    assert served_by(choices, "kind") == "b"
    assert choices.known()["kind"].refused == {"a": "ValueError: a does not"}
    assert choices.known()["kind"].seconds["a"] == 1.0


def test_a_refusal_of_one_kind_says_nothing_about_another(choices):
    for kind in ("one", "other"):
        choices.settle(kind, [A, B], Measurements(a=1.0, b=2.0))
    served_by(choices, "one", refusing("a"))
    assert served_by(choices, "other") == "a"


def test_what_all_refuse_goes_to_the_last_resort_whose_error_is_raised(choices):
    choices.settle("kind", [A, B], Measurements(a=1.0, b=ValueError()))
    assert served_by(choices, "kind", refusing("a")) == "last"
    with pytest.raises(ValueError, match="last does not"):
        choices.run("kind", refusing("last"))
    assert served_by(choices, "kind") == "last"


def test_want_of_memory_in_a_call_is_raised_and_refuses_nothing(choices):
    choices.settle("kind", [A, B], Measurements(a=1.0, b=2.0))

    def call(kernel):
        raise OutOfMemory

    with pytest.raises(OutOfMemory):
        choices.run("kind", call)
    assert served_by(choices, "kind") == "a"


@pytest.mark.parametrize("short", ["a", "b", "c"])
def test_want_of_memory_in_a_measurement_leaves_the_listed_order(choices, short):
    seconds = {"a": 3.0, "b": 2.0, "c": 1.0} | {short: OutOfMemory("no room")}
    for _ in range(2):
        choices.settle("kind", [A, B, C], Measurements(**seconds))
        assert served_by(choices, "kind") == "a"
    assert choices.known()["kind"].refused == {"measurements": "OutOfMemory: no room"}
    assert served_by(choices, "kind", refusing("a")) == "b"


def test_without_measurements_the_listed_order_holds(choices):
    choices.settle("kind", [B, A], None)
    assert served_by(choices, "kind") == "b"
    choices.settle("kind", [A, B], Measurements(a=1.0, b=2.0))
    assert served_by(choices, "kind") == "b"


def test_a_choice_without_candidates_is_the_last_resort(choices):
    choices.settle("kind", [], Measurements())
    assert served_by(choices, "kind") == "last"


def test_results_are_returned(choices):
    choices.settle("kind", [A], Measurements(a=1.0))
    assert choices.run("kind", lambda kernel: kernel.name * 2) == "aa"


def test_reasons_are_short(choices):
    choices.settle("kind", [A], Measurements(a=RuntimeError("x" * 10 * REASON_CHARS_MAX)))
    assert len(choices.known()["kind"].refused["a"]) == REASON_CHARS_MAX


def test_threads_wait_for_one_measurement(choices):
    measurements, served = Measurements(a=1.0, b=2.0), []
    entered, proceed = threading.Event(), threading.Event()

    def slow():
        entered.set()
        assert proceed.wait(60)
        return measurements()

    def first():
        choices.settle("kind", [A, B], slow)
        served.append(served_by(choices, "kind"))

    def second():
        assert entered.wait(60)
        choices.settle("kind", [B, A], Measurements(a=2.0, b=1.0))
        served.append(served_by(choices, "kind"))

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    assert entered.wait(60)
    proceed.set()
    for thread in threads:
        thread.join()
    assert served == ["a", "a"]
    assert measurements.run == ["a", "b"]


def test_two_threads_may_be_refused_at_once(choices):
    choices.settle("kind", [A, B], Measurements(a=1.0, b=2.0))
    both, served = threading.Barrier(2), []

    def call(kernel):
        if kernel is A:
            both.wait(60)
            raise ValueError
        served.append(kernel.name)

    threads = [threading.Thread(target=choices.run, args=("kind", call)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served == ["b", "b"]
