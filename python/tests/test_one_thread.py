"""Passes of one model on two threads: the second is refused, and the first stays exact."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny

import dormouse
from dormouse.hf import SharedPrefix
from dormouse.hf.one_thread import holding

FP64_BOUND = 1e-10
SECONDS_MAX = 60
REFUSED = r"thread 'learner' runs passes of this model; accepted: one thread at a time"

def loss_of_groups(logits, labels, _, i):
    return loss_fn(logits, labels, i)


CALLS = {
    "backward": lambda shared: shared.backward(group(), loss_fn),
    "step": lambda shared: shared.step([group()], loss_of_groups),
    "score": lambda shared: shared.score(group()),
    "score of rows": lambda shared: shared.score(
        torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 9, dtype=torch.int64), keep=4
    ),
    "check": lambda shared: shared.check(),
    "predict": lambda shared: shared.predict(group()),
}


class Held(threading.Thread):
    """A thread inside of something until it is let go. ``body(wait)`` calls ``wait`` in there."""

    def __init__(self, name: str, body: Callable[[Callable[[], None]], None]):
        super().__init__(name=name)
        self._body, self._is_inside, self._may_go = body, threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._body(self._wait)
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def _wait(self) -> None:
        self._is_inside.set()
        assert self._may_go.wait(SECONDS_MAX)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.start()
        assert self._is_inside.wait(SECONDS_MAX)
        try:
            yield
        finally:
            self._may_go.set()
            self.join(SECONDS_MAX)


def learner_of(shared: SharedPrefix) -> Held:
    """A step that waits in its losses."""

    def body(wait):
        def loss(logits, labels, i):
            wait()
            return loss_fn(logits, labels, i)

        shared.backward(group(), loss)

    return Held("learner", body)


def holder_of(module: torch.nn.Module, name: str, **options) -> Held:
    def body(wait):
        with holding(module, **options):
            wait()

    return Held(name, body)


@pytest.mark.parametrize("name", CALLS)
def test_passes_of_another_thread_are_refused(name, runtime):
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    learner = learner_of(SharedPrefix(model, runtime))
    with learner.inside(), pytest.raises(dormouse.StateError, match=REFUSED):
        CALLS[name](SharedPrefix(model, runtime))
    assert learner.error is None
    dense_backward(plain, group())
    assert distance(take_gradients(model), take_gradients(plain)) <= FP64_BOUND
    # The model is free again.
    CALLS[name](SharedPrefix(model, runtime))


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("name", ["check", "backward"])
def test_layers_replaced_since_and_wrappers_are_the_same_model(name, is_same, runtime):
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    shared = SharedPrefix(model, runtime)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    learner = learner_of(shared)
    with learner.inside():
        other = shared if is_same else SharedPrefix(torch.compile(model, backend="eager"), runtime)
        with pytest.raises(dormouse.StateError, match=REFUSED):
            CALLS[name](other)
    assert learner.error is None
    dense_backward(plain, group())
    got = {name.replace("_orig_mod.", ""): each for name, each in take_gradients(model).items()}
    assert distance(got, take_gradients(plain)) <= FP64_BOUND


def test_a_forked_child_holds_nothing():
    module = torch.nn.Linear(1, 1)
    with holder_of(module, "parent's").inside():
        child = os.fork()
        if child == 0:
            try:
                with holding(module):
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_another_model_is_not_refused(runtime):
    learner = learner_of(SharedPrefix(tiny(num_hidden_layers=2), runtime))
    with learner.inside():
        SharedPrefix(tiny(num_hidden_layers=2), runtime).score(group())
    assert learner.error is None


def test_the_same_thread_may_score_in_a_loss(runtime):
    shared, scored = SharedPrefix(tiny(num_hidden_layers=2), runtime), []

    def loss(logits, labels, i):
        scored.append(shared.score(group()).log_probabilities[i])
        return loss_fn(logits, labels, i)

    shared.backward(group(), loss)
    assert len(scored) == len(group().responses)


def test_an_error_lets_go(runtime):
    shared = SharedPrefix(tiny(num_hidden_layers=2), runtime)
    with pytest.raises(ZeroDivisionError):
        shared.backward(group(), lambda logits, labels, i: 1 / 0)
    with learner_of(shared).inside():
        pass


def test_a_backward_begins_beside_passes_and_holds_a_free_model():
    module = torch.nn.Linear(1, 1)

    def on_another_thread(**options) -> str | None:
        found = []

        def enter():
            try:
                with holding(module, **options):
                    found.append(None)
            except dormouse.StateError as error:
                found.append(str(error))

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(SECONDS_MAX)
        return found[0]

    with contextlib.ExitStack() as later:
        with holding(module):
            assert on_another_thread(in_backward=True) is None
            assert on_another_thread() is not None
            later.enter_context(holder_of(module, "backward", in_backward=True).inside())
        # It began beside other passes, and still runs.
        with pytest.raises(dormouse.StateError, match="thread 'backward' runs passes"):
            later.enter_context(holding(module))
    with holding(module, in_backward=True):
        assert on_another_thread() is not None
    assert on_another_thread() is None
