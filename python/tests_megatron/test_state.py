"""The state of the model in a call: the passes run in one state, and a state is checked once."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
import conftest
import dormouse.megatron
from dormouse.hf import UnsupportedModelError
from dormouse.hf.prefix import PrefixForward
from dormouse.megatron import UnsupportedTrainerError
from dormouse.megatron.shared_gpt import SharedGPT
from models import distance
from rank_workers import left_by_ranks

from state_worker import CHANGES

CASE = cases.Case()
EXACT = 1e-10
WORKER = Path(__file__).with_name("state_worker.py")
SECONDS_MAX = 300
LAST = 1


@pytest.fixture(scope="module")
def runtime():
    cases.join()
    with conftest.a_runtime() as runtime:
        yield runtime


def shared(runtime, **options):
    return dormouse.megatron.share(get_forward_backward_func(), runtime=runtime, **options)


def forward_step_in_evaluation(data_iterator, model):
    """Calls the model in evaluation mode, in a schedule that runs in training mode."""
    model.eval()
    losses, loss_func = cases.forward_step(CASE, data_iterator, model)
    model.train()
    return losses, loss_func


def test_a_mode_that_differs_in_the_backward_is_refused(runtime):
    """The second forward would draw the masks that the first did not."""
    model = cases.model_of(cases.Case(config={"hidden_dropout": 0.5}))
    function = shared(runtime, graphs="twice")
    # In training mode the model is refused before anything runs.
    with torch.no_grad():
        cases.run(CASE, function, model.eval(), cases.batches_of(), forward_only=True)
    model.train()
    own = {"forward_step_func": forward_step_in_evaluation}
    with pytest.raises(UnsupportedModelError, match="changed between the call .*training changed"):
        cases.run(CASE, function, model, cases.batches_of(), **own)


def test_a_function_assigned_again_is_no_change(runtime):
    """A trainer assigns ``optimizer.scale_loss``, each time a new object, before each call."""
    model, function = cases.model_of(CASE), shared(runtime)
    scaler = Scaler()
    own = SharedGPT._check
    with mock.patch.object(SharedGPT, "_check", autospec=True, side_effect=own) as check:
        for _ in range(3):
            model.config.grad_scale_func = scaler.scale
            cases.run(CASE, function, model, cases.batches_of())
        assert check.call_count == 1
        # Of another object.
        model.config.grad_scale_func = Scaler().scale
        cases.run(CASE, function, model, cases.batches_of())
        assert check.call_count == 2


OVERLAPPED = cases.Case(ddp={"overlap_grad_reduce": True})


def test_reductions_before_the_last_microbatch_are_refused(runtime):
    model, function = cases.model_of(OVERLAPPED), shared(runtime)
    model.config.no_sync_func = None
    message = "no_sync_func None with 3 microbatches: .*accepted: no_sync_func=model.no_sync"
    with pytest.raises(UnsupportedTrainerError, match=message):
        cases.run(OVERLAPPED, function, model, cases.batches_of())


@pytest.mark.parametrize("options", [{"microbatch_rows": 6}, {}])
def test_reductions_in_the_last_microbatch_are_accepted(runtime, options):
    """It is the only one, or the schedule says so: shared calls and others may be mixed."""
    model, function = cases.model_of(OVERLAPPED), shared(runtime)
    if options:
        model.config.no_sync_func = None
    batches, found = cases.batches_of(**options), []
    for each in (get_forward_backward_func(), function) * 2:
        cases.run(OVERLAPPED, each, model, batches)
        found.append(cases.gradients(model))
    assert function.sharing.prompts > 0
    assert max(distance(found[0], each) for each in found) < EXACT


class Scaler:
    """Of losses."""

    def scale(self, loss):
        return 2 * loss


def test_losses_outside_the_mask_are_zero_with_balanced_experts(runtime):
    """Routers read these rows, so passes run them: neither values nor gradients reach a loss."""
    model, function = cases.model_of(cases.Case(config=cases.BALANCED)), shared(runtime)
    of_masks = []

    def forward_step(data_iterator, model, reads_all):
        batch = next(data_iterator)
        losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        masks = batch["loss_mask"].cumsum(1) * batch["loss_mask"].flip(1).cumsum(1).flip(1)
        of_masks.append((losses.detach(), masks > 0))
        read = losses if reads_all else losses * (masks > 0)
        return read.sum(), lambda total: (total.clone(), {})

    found = []
    for reads_all in (False, True):
        step = functools.partial(forward_step, reads_all=reads_all)
        cases.run(CASE, function, model, cases.batches_of(), forward_step_func=step)
        found.append(cases.gradients(model))
    assert all(not losses[~inside].any() and losses[inside].all() for losses, inside in of_masks)
    assert distance(*found) == 0


def test_forwards_without_a_graph_keep_no_hidden_states(runtime):
    """Megatron adds biases under ``enable_grad``, whatever the caller is in."""
    model = cases.model_of(cases.Case(config={"add_bias_linear": True}))
    kept, own = [], PrefixForward.forward

    def forward(self, *args, **named):
        own(self, *args, **named)
        kept.append((self.has_graph, len(self.outputs)))

    with torch.no_grad(), mock.patch.object(PrefixForward, "forward", forward):
        cases.run(CASE, shared(runtime), model, cases.batches_of(), forward_only=True)
    assert [outputs for has_graph, outputs in kept if not has_graph] == [0, 0]


@pytest.fixture(scope="module")
def stages(tmp_path_factory) -> dict[str, list]:
    """What each stage left, of each case."""
    directory = tmp_path_factory.mktemp("stages")
    return left_by_ranks(WORKER, directory, seconds_max=SECONDS_MAX)


@pytest.mark.parametrize("name, message", [
    ("an attribute", "the model of a pipeline is changed after its passes have run: .*scale chan"),
    ("an attribute of a chunk", "the model of a pipeline is changed after its passes have run: "),
    ("a mode behind the last call", "the model of a pipeline is changed .*training changed"),
    ("autocast", "autocast is torch.bfloat16 in a pipeline's call of the model, and off in its "),
])
def test_what_forward_steps_change_in_a_pipeline_is_refused(stages, name, message):
    """The stages have run forward before they are called, and the others call none."""
    first, last = stages[name]
    assert re.match(f"UnsupportedTrainerError: {message}", last)
    assert first == f"RankFailedError: rank {LAST} failed: {last}"


def test_every_change_is_tested():
    (mark,) = test_what_forward_steps_change_in_a_pipeline_is_refused.pytestmark
    assert {name for name, _ in mark.args[1]} == set(CHANGES)


def test_a_stage_is_checked_once(stages):
    """The schedule numbers microbatches, and keeps what a stage received last."""
    for own in stages["checks"]:
        assert own["checks"] == 1
        assert own["distance"] < EXACT
