"""What a call leaves of DeepSpeed's engine, what is refused, and a rank that fails."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path

import deepspeed
import deepspeed_cases as cases
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from models import distance, group, tiny
from padded_batch import mixed_loss, padded_values
from rank_workers import run_ranks
from test_token_scores import padded

from dormouse.hf import SharedPrefix, UnsupportedModelError, deepspeed_engine

FAILING = Path(__file__).with_name("deepspeed_failing_worker.py")
FAILING_SECONDS_MAX = 200
# Large enough that a layer's saved tensors are blocks of the heap.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
ASLEEP_BYTES_MIN = 8 << 20
ASLEEP_SECONDS_MAX = 60


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A process group of one rank."""
    meeting = tmp_path_factory.mktemp("world") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    # DeepSpeed adds what torchrun sets, which would have TRL join other ranks.
    before = dict(os.environ)
    os.environ.setdefault("LOCAL_RANK", "0")
    cases.join_ranks()
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def engines(world):
    """Makes engines of a stage; they are destroyed after the test."""
    made = []

    def make(stage: int, model: torch.nn.Module | None = None, **config):
        case = cases.Case(stage, zero=cases.NO_PERSISTENT if stage == 3 else {}, config=config)
        made.append(cases.engine_of(case, model))
        return made[-1]

    yield make
    for engine in made:
        engine.destroy()


def padded_loss(engine):
    ids, mask, keep = cases.batch_of(0, 1)
    return mixed_loss(*padded_values(engine, ids, mask, keep), mask[:, -keep:])


def held(engine) -> set:
    """What parameters of stage 3 are."""
    return {parameter.ds_status for parameter in engine.module.parameters()}


def shared_values(shared, **options):
    ids, mask, keep = cases.batch_of(0, 1)
    return shared.score(ids, mask, keep=keep, **options).log_probabilities


def hooks_of(model) -> list:
    return [
        list(hooks)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_engine_runs_its_own_forward_between_calls(stage, engines, runtime):
    engine = engines(stage)
    shared = SharedPrefix(engine, runtime)
    before = hooks_of(engine.module)
    assert any(before)
    ids, mask, keep = cases.batch_of(0, 1)
    checks = set()
    for _ in range(2):
        engine.backward(padded_loss(engine))
        engine.step()
        scores = shared.score(*(batch := cases.batch_of(0, 1))[:2], keep=batch[2])
        checks.add(scores.checked.reason)
        assert hooks_of(engine.module) == before
        engine.backward(scores.log_probabilities.sum())
        engine.step()
        assert hooks_of(engine.module) == before
    assert engine.global_steps == 4
    # The engine's hooks count in attributes of modules, which is no change of the model.
    assert checks == {"the first step"}


def test_all_weights_are_gathered_in_passes_alone(engines, runtime):
    engine = engines(3)
    shared = SharedPrefix(engine, runtime)
    seen = []
    layer = engine.module.model.layers[1]
    handle = layer.register_forward_hook(lambda *call: seen.append(held(engine)))
    ids, mask, keep = cases.batch_of(0, 1)
    scores = shared.score(ids, mask, keep=keep)
    forward = len(seen)
    assert scores.graphs == "twice", "kept graphs would keep weights"
    assert held(engine) == {ZeroParamStatus.NOT_AVAILABLE}
    engine.backward(scores.log_probabilities.sum())
    handle.remove()
    assert held(engine) == {ZeroParamStatus.NOT_AVAILABLE}
    assert 0 < forward < len(seen)
    assert all(each == {ZeroParamStatus.AVAILABLE} for each in seen)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("graphs", ["kept", "twice"])
def test_one_backward_of_two_calls(stage, graphs, engines, runtime, monkeypatch):
    gather, gathers = deepspeed_engine._all_weights, []

    def counted(engine):
        gathers.append(engine)
        return gather(engine)

    monkeypatch.setattr(deepspeed_engine, "_all_weights", counted)
    ids, mask, keep = cases.batch_of(0, 1)
    engine = engines(stage)
    shared = SharedPrefix(engine, runtime)
    options = {"keep": keep, "graphs": graphs}
    parts = [shared.score(ids[rows], mask[rows], **options) for rows in cases.parts(len(ids), 2)]
    engine.backward(sum((part.log_probabilities**2).sum() for part in parts))
    # Two forwards and a backward.
    assert len(gathers) == (3 if stage == 3 else 0)
    ours = cases.gradients(engine)
    own = engines(stage)
    own.backward((padded_values(own, ids, mask, keep)[0] ** 2).sum())
    # FP32, of two orders of summation; a part that is lost is far more.
    assert distance(ours, cases.gradients(own)) < 1e-4
    assert stage == 2 or held(engine) == {ZeroParamStatus.NOT_AVAILABLE}


SUMMED_PROMPTS = 128


@pytest.mark.parametrize("graphs", ["kept", "twice"])
def test_sums_of_passes_are_as_wide_as_those_of_microbatches(graphs, engines, runtime):
    """A call has more passes than the engine has microbatches, which it adds up in FP32."""
    prompts = [3 + row // 2 for row in range(2 * SUMMED_PROMPTS)]
    ids, mask, keep = padded(prompts, [6] * len(prompts))
    # Gradients of equal responses point one way: their rounding averages out, that of sums does not.
    ids[:, -keep:] = ids[0, -keep:]

    def loss_of(values, rows=slice(None)):
        return (values * mask[rows, -keep:]).sum()

    wide = {"bf16": {"enabled": True}, **cases.FP32_SUMS}
    # Of few layers, whose own rounding is less than that of sums.
    first = tiny(dtype=torch.float32, num_hidden_layers=1)
    own = engines(1, copy.deepcopy(first), gradient_accumulation_steps=SUMMED_PROMPTS, **wide)
    for rows in cases.parts(len(ids), SUMMED_PROMPTS):
        own.backward(loss_of(padded_values(own, ids[rows], mask[rows], keep)[0], rows))
        if not own.is_gradient_accumulation_boundary():
            own.step()
    plain = cases.gradients(own)
    engine = engines(1, copy.deepcopy(first), **wide)
    scores = SharedPrefix(engine, runtime).score(
        ids, mask, keep=keep, graphs=graphs, microbatch_tokens=64
    )
    # The engine divides by the number of microbatches.
    engine.backward(loss_of(scores.log_probabilities) / SUMMED_PROMPTS)
    model = tiny(num_hidden_layers=1)
    model.load_state_dict({n: p.to(torch.bfloat16) for n, p in first.state_dict().items()})
    (loss_of(padded_values(model, ids, mask, keep)[0]) / SUMMED_PROMPTS).backward()
    truth = {name: p.grad for name, p in model.named_parameters()}
    ours, theirs = (distance(each, truth) for each in (cases.gradients(engine), plain))
    print(f"SUMS {graphs}: shared {ours:.4f}, the engine's own {theirs:.4f}")
    assert 0 < ours <= 1.25 * theirs < 0.1


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a backward that fails")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_backward_of_a_call_and_of_the_engines_forward(stage, engines, runtime):
    ids, mask, keep = cases.batch_of(0, 1)
    engine = engines(stage)
    scores = SharedPrefix(engine, runtime).score(ids, mask, keep=keep)
    own = padded_values(engine, ids, mask, keep)[0]
    engine.backward((scores.log_probabilities * own).sum())
    ours = cases.gradients(engine)
    other = engines(stage)
    other.backward((padded_values(other, ids, mask, keep)[0] ** 2).sum())
    assert distance(ours, cases.gradients(other)) < 1e-4


@pytest.mark.parametrize("graphs", ["kept", "twice"])
def test_weights_are_freed_after_a_backward_that_failed(graphs, engines, runtime):
    engine = engines(3)
    shared = SharedPrefix(engine, runtime)
    # Older than the call, so that its backward runs after the call's.
    later = Failing.apply(torch.ones((), requires_grad=True))
    values = shared_values(shared, graphs=graphs)
    with pytest.raises(ValueError, match="a backward that fails"):
        engine.backward(values.sum() + later)
    with torch.no_grad():
        assert torch.equal(shared_values(shared), values)
    assert held(engine) == {ZeroParamStatus.NOT_AVAILABLE}


@pytest.mark.parametrize("graphs", ["kept", "twice"])
def test_autocast_is_the_engines(graphs, engines, runtime):
    engine = engines(2, **cases.AUTOCAST)
    shared = SharedPrefix(engine, runtime)
    seen = []
    layer = engine.module.model.layers[1]
    layer.register_forward_hook(lambda *call: seen.append(torch.is_autocast_enabled("cpu")))
    # The check, which runs with FP32 too.
    engine.backward(shared_values(shared, graphs=graphs).sum())
    assert any(seen)
    seen.clear()
    values = shared_values(shared, graphs=graphs)
    forward = len(seen)
    engine.backward(values.sum())
    assert forward > 0 and all(seen)
    assert (len(seen) > forward) == (graphs == "twice")
    assert torch.bfloat16 in {state for state, _, _ in shared._state.checks}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("graphs", ["kept", "twice"])
def test_weights_that_the_optimizer_changed_are_noticed(stage, graphs, engines, runtime):
    """ZeRO writes through flat tensors, which versions of parameters do not show."""
    engine = engines(stage)
    values = shared_values(SharedPrefix(engine, runtime), graphs=graphs)
    engine.backward(padded_loss(engine))
    engine.step()
    with pytest.raises(UnsupportedModelError, match="weights were changed"):
        engine.backward(values.sum())


@pytest.mark.parametrize("stage", [2, 3])
def test_asleep_equals_awake_bit_for_bit(stage, engines, runtime):
    ids, mask, keep = padded([600] * 3, [16, 9, 12])
    found = []
    for sleep in (False, True):
        engine = engines(stage, tiny(dtype=torch.float32, **WIDE))
        shared = SharedPrefix(engine, runtime, sleep=sleep)
        values = shared.score(ids, mask, keep=keep, graphs="kept")
        deadline = time.monotonic() + ASLEEP_SECONDS_MAX
        while sleep and runtime.stats()["asleep"]["current_bytes"] < ASLEEP_BYTES_MIN:
            assert time.monotonic() < deadline, "the prompt did not fall asleep"
            time.sleep(0.001)
        engine.backward(values.log_probabilities.sum())
        found.append(cases.gradients(engine))
    assert all(torch.equal(found[1][name], awake) for name, awake in found[0].items())


def test_scores_without_a_graph(engines, runtime):
    engine = engines(3)
    shared = SharedPrefix(engine, runtime)
    with torch.no_grad():
        plain = shared_values(shared)
    assert not plain.requires_grad
    assert torch.equal(plain, shared_values(shared).detach())
    values = shared.score(group()).log_probabilities
    assert [len(each) for each in values] == [5, 1, 9, 3]


def test_what_reads_weights_gathers_them(engines, runtime):
    """Weights of stage 3 have no rows outside passes."""
    engine = engines(3)
    shared = SharedPrefix(engine, runtime)
    assert shared.check().tokens >= 0
    assert shared.predict(group())["speedup"] > 0


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_backwards_of_other_methods_are_refused(stage, engines, runtime):
    shared = SharedPrefix(engines(stage), runtime)
    ids, mask, keep = cases.batch_of(0, 1)

    def loss_fn(logits, labels, *places):
        return logits.sum()

    owns = "owns the backward; accepted: score"
    with pytest.raises(UnsupportedModelError, match=r"backward\(\) runs backwards.*" + owns):
        shared.backward(group(), loss_fn)
    with pytest.raises(UnsupportedModelError, match=r"step\(\) runs backwards.*" + owns):
        shared.step([group()], loss_fn)
    with pytest.raises(UnsupportedModelError, match="reduces after every backward"):
        shared.window(ids, mask, keep=keep)


@pytest.mark.parametrize(
    ("stage", "attribute", "value", "message"),
    [
        (2, "mp_world_size", 2, "tensor parallelism"),
        (2, "autotp_size", lambda: 2, "tensor parallelism"),
        (2, "sequence_parallel_size", 2, "sequence_parallel_size is 2"),
        (2, "has_moe_layers", True, "experts are spread"),
        (2, "_is_compiled", True, "compile"),
        (2, "random_ltd_enabled", lambda: True, "random_ltd"),
        (2, "flops_profiler_enabled", lambda: True, "flops_profiler"),
        (2, "autotuning_enabled", lambda: True, "autotuning"),
        (2, "zenflow", True, "zenflow"),
        (3, "zero_hpz_partition_size", lambda: 2, "zero_hpz_partition_size is 2"),
        (3, "zero_quantized_weights", lambda: True, "zero_quantized_weights"),
        (3, "zero_quantized_nontrainable_weights", lambda: True, "zero_quantized_weights"),
    ],
)
def test_engines_refused_by_name(stage, attribute, value, message, engines, runtime, monkeypatch):
    engine = engines(stage)
    shared = SharedPrefix(engine, runtime)
    monkeypatch.setattr(engine, attribute, value)
    for attempt in (lambda: SharedPrefix(engine, runtime), lambda: shared_values(shared)):
        with pytest.raises(UnsupportedModelError, match=message):
            attempt()
    # The engine's own name of what it is must not change before the fixture destroys it.
    monkeypatch.undo()


def test_leaf_modules_are_refused(engines, runtime):
    model = tiny(dtype=torch.float32)
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    with pytest.raises(UnsupportedModelError, match="leaf module"):
        SharedPrefix(engines(3, model), runtime)


def test_a_pipeline_is_refused(world, runtime):
    pipeline = PipelineModule(
        layers=[torch.nn.Linear(4, 4)], num_stages=1, loss_fn=torch.nn.functional.mse_loss
    )
    engine, *_ = deepspeed.initialize(model=pipeline, config=cases.Case(0).engine_config)
    with pytest.raises(UnsupportedModelError, match="PipelineEngine has a forward of its own"):
        SharedPrefix(engine, runtime)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_whose_loss_raises_does_not_hold_the_others(stage, tmp_path):
    """Its error is told to the other, which waits in a group of DeepSpeed, and both end."""
    codes = run_ranks(FAILING, tmp_path, stage, seconds_max=FAILING_SECONDS_MAX)
    assert codes == [1, 1]
    errors = [(tmp_path / f"error.{rank}").read_text() for rank in range(2)]
    assert errors[0] == "ValueError: a loss of one rank"
    assert errors[1] == "RankFailedError: rank 0 failed: ValueError: a loss of one rank"
