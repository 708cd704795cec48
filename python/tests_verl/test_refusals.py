"""What the adapter refuses by name, and that it refuses by running."""

from __future__ import annotations

import on_cpu
import pytest
import torch
from models import distance
from verl.utils import tensordict_utils
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead
from verl_runs import FP64, batch_of, exact, made, run, saved, whole

import dormouse.verl
from dormouse.hf.whole_weights import WholeWeights
from dormouse.verl import UnsupportedTrainerError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


def test_other_classes_are_refused():
    class Other(FSDPEngineWithLMHead):
        def forward_step(self, micro_batch, loss_function):
            raise AssertionError

    for each in (object, Other):
        with pytest.raises(UnsupportedTrainerError, match=r"accepted: FSDPEngineWithLMHead"):
            dormouse.verl.share(each)


SETTINGS = {
    "ulysses_sequence_parallel_size is 2": {
        "engine": {"ulysses_sequence_parallel_size": 2},
        "model": {"use_remove_padding": True},
    },
    "use_fused_kernels": {"model": {"use_fused_kernels": True}},
    "use_liger": {"model": {"use_liger": True}},
    "enable_activation_offload": {"model": {"enable_activation_offload": True}},
}


@pytest.mark.parametrize("seen", SETTINGS)
def test_settings(seen, directory, runtime, monkeypatch):
    exact(monkeypatch)
    if "ulysses" in seen:
        # Its mesh needs as many ranks.
        monkeypatch.setattr(FSDPEngineWithLMHead, "_init_device_mesh", lambda self: None)
    with pytest.raises(UnsupportedTrainerError, match=seen):
        made(monkeypatch, directory, runtime=runtime, **SETTINGS[seen])


@pytest.mark.parametrize("vendor", [None, "another"])
def test_registered_engines(vendor, directory, runtime, monkeypatch, caplog):
    """verl's default strategy flattens weights."""
    exact(monkeypatch)
    if vendor:
        monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    engines = EngineRegistry._engines["language_model"]
    for strategy in dormouse.verl.BACKENDS:
        monkeypatch.setitem(engines, strategy, dict(engines[strategy]))
    monkeypatch.setitem(engines, "another_strategy", {})
    dormouse.verl.register(runtime=runtime)
    told = [each.getMessage() for each in caplog.records if "share prompts" in each.getMessage()]
    assert len(told) == 1 and "another_strategy" in told[0]
    fp64 = {"model_dtype": "fp64", "mixed_precision": FP64}
    assert on_cpu.worker(directory, engine=fp64).engine.sharing.rows == 0
    for strategy in ("fsdp", "fsdp_turbo"):
        match = f"strategy is {strategy}, .*accepted: strategy=fsdp2"
        with pytest.raises(UnsupportedTrainerError, match=match):
            on_cpu.worker(directory, engine=fp64 | {"strategy": strategy})


def images(data):
    parts = [{"pixel_values": torch.ones(1)}, *[{}] * (len(data) - 1)]
    tensordict_utils.assign_non_tensor_stack(data, "multi_modal_inputs", parts)


def other_positions(data):
    data["position_ids"].values().add_(1)


def no_prompts(data):
    del data["prompts"]


def temperatures(data):
    del data["temperature"]
    data["temperature"] = torch.linspace(0.5, 1.0, len(data))


def setting(name: str):
    return lambda data: tensordict_utils.assign_non_tensor(data, **{name: True})


BATCHES = {
    "the batch has multi_modal_inputs": images,
    "use_fused_kernels is set": setting("use_fused_kernels"),
    "calculate_sum_pi_squared is set": setting("calculate_sum_pi_squared"),
    "distillation_use_topk is set": setting("distillation_use_topk"),
    "position_ids do not count": other_positions,
    "no prompts and responses": no_prompts,
    "temperatures of rows are 0.5 to 1": temperatures,
}


@pytest.mark.parametrize("seen", BATCHES)
def test_batches(seen, directory, runtime, monkeypatch):
    exact(monkeypatch)
    worker = made(monkeypatch, directory, runtime=runtime)
    data = batch_of()
    BATCHES[seen](data)
    tensordict_utils.assign_non_tensor(data, compute_loss=False)
    with pytest.raises(UnsupportedTrainerError, match=seen):
        worker.infer_batch(data)
    # Nothing is left of it.
    good = batch_of()
    tensordict_utils.assign_non_tensor(good, compute_loss=False)
    assert tensordict_utils.get(worker.infer_batch(good), "log_probs") is not None


def test_empty_images_are_text(directory, runtime, monkeypatch):
    exact(monkeypatch)
    worker = made(monkeypatch, directory, runtime=runtime)
    data = batch_of()
    tensordict_utils.assign_non_tensor(data, compute_loss=False)
    wanted = tensordict_utils.get(worker.infer_batch(data.copy()), "log_probs")
    tensordict_utils.assign_non_tensor_stack(data, "multi_modal_inputs", [{}] * len(data))
    got = tensordict_utils.get(worker.infer_batch(data), "log_probs")
    assert torch.equal(got.values(), wanted.values())


def test_a_forward_that_is_another_is_found_by_running(directory, runtime, monkeypatch):
    """verl's values are compared with the shared ones once."""
    exact(monkeypatch)
    own = FSDPEngineWithLMHead.prepare_model_outputs

    def scaled(self, output, output_args, micro_batch, logits_processor_func):
        output.logits = output.logits * 1.01
        return own(self, output, output_args, micro_batch, logits_processor_func)

    monkeypatch.setattr(FSDPEngineWithLMHead, "prepare_model_outputs", scaled)
    with pytest.raises(UnsupportedTrainerError, match="own log-probabilities of a small batch"):
        run(monkeypatch, directory, runtime=runtime)


def update(worker) -> dict:
    """One update; returns its gradients."""
    left, step = {}, worker.engine.optimizer_step

    def recorded():
        parameters = worker.engine.module.named_parameters()
        left.update({name: whole(parameter.grad) for name, parameter in parameters})
        return step()

    worker.engine.optimizer_step = recorded
    data = batch_of()
    tensordict_utils.assign_non_tensor(data, global_batch_size=8, calculate_entropy=True)
    try:
        worker.train_batch(data)
    finally:
        worker.engine.optimizer_step = step
    return left


class Interrupted(Exception):
    pass


def interrupt(*arguments, **named):
    raise Interrupted


def test_an_interrupted_batch_leaves_nothing(directory, runtime, monkeypatch):
    """An error in the second loss, and one after the passes of the last backward: the next batch's
    gradients are its own."""
    exact(monkeypatch)
    wanted = update(made(monkeypatch, directory, runtime=runtime))
    worker = made(monkeypatch, directory, runtime=runtime)
    loss, losses = worker.loss_fn, []

    def failing(**arguments):
        losses.append(0)
        return loss(**arguments) if len(losses) < 2 else interrupt()

    worker.set_loss_fn(failing)
    with pytest.raises(Interrupted):
        update(worker)
    worker.set_loss_fn(loss)
    with monkeypatch.context() as patched:
        patched.setattr(WholeWeights, "handed", interrupt)
        with pytest.raises(Interrupted):
            update(worker)
    assert distance(update(worker), wanted) < 1e-10


def test_a_last_microbatch_without_a_backward_into_the_model(directory, runtime, monkeypatch):
    """Its loss reads nothing of the model; gradients of the others wait for it."""
    exact(monkeypatch)
    found = []
    # Else verl itself reduces nothing before a backward of the last micro-batch.
    engine = {"use_no_sync_for_gradient_accumulation": False}
    for own in (None, runtime):
        worker = made(monkeypatch, directory, runtime=own, engine=engine)
        loss, losses = worker.loss_fn, []

        def silent(loss=loss, losses=losses, **arguments):
            value, metrics = loss(**arguments)
            losses.append(value)
            return (value, metrics) if len(losses) < 4 else (value.detach() + one, metrics)

        one = torch.ones((), dtype=torch.float64, requires_grad=True)
        worker.set_loss_fn(silent)
        found.append(update(worker))
        assert len(losses) == 4 and one.grad is not None
    assert any(bool(each.any()) for each in found[0].values())
    assert distance(found[1], found[0]) < 1e-10
