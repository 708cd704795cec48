"""Passes of one model on two threads: the second is refused, and the first stays exact."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

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


class Learner(threading.Thread):
    """A step that waits in its first loss until it is let go."""

    def __init__(self, shared: SharedPrefix):
        super().__init__(name="learner")
        self._shared, self._is_inside, self._may_go = shared, threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        def loss(logits, labels, i):
            self._is_inside.set()
            assert self._may_go.wait(SECONDS_MAX)
            return loss_fn(logits, labels, i)

        try:
            self._shared.backward(group(), loss)
        except BaseException as error:  # noqa: BLE001
            self.error = error

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.start()
        assert self._is_inside.wait(SECONDS_MAX)
        try:
            yield
        finally:
            self._may_go.set()
            self.join(SECONDS_MAX)


@pytest.mark.parametrize("name", CALLS)
def test_passes_of_another_thread_are_refused(name, runtime):
    model, plain = tiny(num_hidden_layers=2), tiny(num_hidden_layers=2)
    learner = Learner(SharedPrefix(model, runtime))
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
    model = tiny(num_hidden_layers=2)
    shared = SharedPrefix(model, runtime)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    learner = Learner(shared)
    with learner.inside():
        other = shared if is_same else SharedPrefix(torch.compile(model, backend="eager"), runtime)
        with pytest.raises(dormouse.StateError, match=REFUSED):
            CALLS[name](other)
    assert learner.error is None and take_gradients(model)


def test_a_forked_child_holds_nothing():
    module, may_end = torch.nn.Linear(1, 1), threading.Event()
    is_held = threading.Event()

    def hold():
        with holding(module):
            is_held.set()
            may_end.wait(SECONDS_MAX)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait(SECONDS_MAX)
    child = os.fork()
    if child == 0:
        try:
            with holding(module):
                os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    may_end.set()
    thread.join(SECONDS_MAX)
    assert status == 0


def test_another_model_is_not_refused(runtime):
    learner = Learner(SharedPrefix(tiny(num_hidden_layers=2), runtime))
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
    with Learner(shared).inside():
        pass


class Backward(threading.Thread):
    """A node of a backward that runs until it is let go."""

    def __init__(self, module: torch.nn.Module):
        super().__init__(name="backward")
        self._module, self._is_inside, self._may_go = module, threading.Event(), threading.Event()

    def run(self) -> None:
        with holding(self._module, in_backward=True):
            self._is_inside.set()
            self._may_go.wait(SECONDS_MAX)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.start()
        assert self._is_inside.wait(SECONDS_MAX)
        try:
            yield
        finally:
            self._may_go.set()
            self.join(SECONDS_MAX)


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
            backward = Backward(module)
            later.enter_context(backward.inside())
        # It began beside other passes, and still runs.
        with pytest.raises(dormouse.StateError, match="thread 'backward' runs passes"):
            later.enter_context(holding(module))
    with holding(module, in_backward=True):
        assert on_another_thread() is not None
    assert on_another_thread() is None
