"""Recurrent layers: states of convolutions and scans are boundary tensors with gradients."""

from __future__ import annotations

import threading

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import distance, group, loss_fn, take_gradients
from test_architectures import dense_backward
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from dormouse.hf import SharedPrefix, UnsupportedModelError, calls, graph, sharding, support
from dormouse.hf.recurrent import _RECURRENCES, States

FP64_BOUND = 1e-10
# Shorter and longer than a convolution and than a chunk of a delta rule (64 tokens) and of a scan
# (16 here); responses of 1, equal and unequal lengths.
SHAPES = [(2, (1,)), (3, (14, 1, 3)), (70, (66, 1, 9)), (65, (1,) * 33)]
KINDS = ("qwen3_next", "mamba2", "bamba")
# Other models with the same functions.
SIMILAR = (
    *("qwen3_5_text", "olmo_hybrid", "kimi_linear"),
    *("falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "lfm2"),
    *("jamba", "mamba", "falcon_mamba", "zamba"),
)


def error(model, shared, case, **options) -> float:
    """Returns the distance of the shared gradients from the dense ones."""
    dense_backward(model, case)
    dense = take_gradients(model)
    shared.backward(case, loss_fn, microbatch_tokens=20, **options)
    return distance(take_gradients(model), dense)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_dense_ones(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        shared = SharedPrefix(model, runtime)
        for prompt, lengths in SHAPES:
            assert error(model, shared, group(prompt, lengths)) <= FP64_BOUND, (prompt, lengths)


@pytest.mark.parametrize("kind", SIMILAR)
def test_similar_models(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        assert error(model, SharedPrefix(model, runtime), group(9, (14, 1, 3))) <= FP64_BOUND


RECURRENT_ENDS = {
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"] * 2},
    "bamba": {"attn_layer_indices": [0, 2]},
}


@pytest.mark.parametrize("kind", RECURRENT_ENDS)
def test_a_recurrent_last_layer(kind, runtime):
    with in_fp64():
        model = zoo_model(kind, **RECURRENT_ENDS[kind])
        case = group(70, (5, 1, 9))
        assert error(model, SharedPrefix(model, runtime), case) <= FP64_BOUND
        # Without gradients in the states of the first layers, and in any.
        for parameter in model.model.layers[:2].parameters():
            parameter.requires_grad = False
        model.model.embed_tokens.weight.requires_grad = False
        assert error(model, SharedPrefix(model, runtime), case) <= FP64_BOUND
        model.model.requires_grad_(False)
        assert error(model, SharedPrefix(model, runtime), case) <= FP64_BOUND


def test_layers_sleep(runtime):
    with in_fp64():
        model = zoo_model("bamba")
        shared, case = SharedPrefix(model, runtime), group(300, (5, 9, 3))
        dense_backward(model, case)
        dense = take_gradients(model)
        report = shared.backward(case, loss_fn, microbatch_tokens=20)
        assert report.prefix["asleep_at_b_bytes"] > 0 and not report.notes
        assert distance(take_gradients(model), dense) <= FP64_BOUND


def test_a_graph_that_is_too_large_stays_awake(runtime, monkeypatch):
    with in_fp64():
        model = zoo_model("qwen3_next")
        shared, case = SharedPrefix(model, runtime), group(130, (5, 9, 3))
        shared.backward(case, loss_fn, microbatch_tokens=20)
        take_gradients(model)
        monkeypatch.setattr(graph, "NODES_MAX", 200)
        dense_backward(model, case)
        dense = take_gradients(model)
        report = shared.backward(case, loss_fn, microbatch_tokens=20)
        assert "stays awake: its graph has more than 200 nodes" in report.notes[0]
        assert distance(take_gradients(model), dense) <= FP64_BOUND


# In BF16 that of method §10: the dense run is far off, and a gradient of zeros is at 1.
@pytest.mark.parametrize(("dtype", "ratio_max"), [(torch.float32, 1.5), (torch.bfloat16, 1.25)])
def test_lower_precision(dtype, ratio_max, runtime):
    """As far from FP64 as the dense run."""
    case = group(70, (5, 1, 9, 3))
    with in_fp64():
        model = zoo_model("qwen3_next")
        # Values of the lower precision, so that all runs compute with the same.
        model.to(dtype).to(torch.float64)
        dense_backward(model, case)
        truth = take_gradients(model)
    model.to(dtype)
    dense_backward(model, case)
    floor = distance(take_gradients(model), truth)
    SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=20)
    accepted = ratio_max * floor + 1e-6
    assert accepted < 1, "a gradient of zeros would be accepted"
    assert distance(take_gradients(model), truth) <= accepted


def draw(*shape, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def convolution(tokens):
    return bamba.causal_conv1d_fn, (draw(2, 6, tokens, seed=1), draw(6, 4, seed=2)), {}


def delta_rule(tokens):
    query, key, value = (draw(2, tokens, 2, 8, seed=i) for i in range(3))
    others = {"g": -draw(2, tokens, 2, seed=3).abs(), "beta": draw(2, tokens, 2, seed=4).sigmoid()}
    return qwen3_next.torch_chunk_gated_delta_rule, (query, key, value), others


def state_space_scan(tokens):
    rows, steps = draw(2, tokens, 4, 8, seed=1), draw(2, tokens, 4, seed=2)
    rates, (into, out) = -draw(4, seed=3).abs(), (draw(2, tokens, 1, 6, seed=i) for i in (4, 5))
    others = {"chunk_size": 8, "D": draw(4, seed=6), "dt_bias": draw(4, seed=7)}
    others["dt_softplus"] = True
    return bamba.mamba2_chunk_scan, (rows, steps, rates, into, out), others


def selective_scan(tokens):
    rows, steps, gate = (draw(2, 6, tokens, seed=i) for i in range(3))
    rates, (into, out) = -draw(6, 5, seed=3).abs(), (draw(2, 5, tokens, seed=i) for i in (4, 5))
    others = {"D": draw(6, seed=6), "z": gate, "delta_bias": draw(6, seed=7)}
    others["delta_softplus"] = True
    return jamba.mamba_selective_scan, (rows, steps, rates, into, out), others


@pytest.mark.parametrize("make", [convolution, delta_rule, state_space_scan, selective_scan])
@pytest.mark.parametrize("first", [1, 2, 11, 64])
def test_two_parts_are_one(make, first):
    """Outputs and state of a sequence are those of its two parts, the second after the first."""
    tokens = 75
    with in_fp64():
        function, args, kwargs = make(tokens)
        recurrence = _RECURRENCES[function.__name__]
        axis = -1 if recurrence.tokens_last else 1

        def part(start: int, end: int) -> calls.FunctionCall:
            def of(value):
                if isinstance(value, torch.Tensor) and value.dim() > 2:
                    return value.narrow(axis, start, end - start)
                return value

            others = {name: of(value) for name, value in kwargs.items()}
            own = function, tuple(map(of, args)), others
            return calls.FunctionCall(None, 0, function.__name__, *own)

        whole, end = recurrence.run(part(0, tokens), None)
        head, state = recurrence.run(part(0, first), None)
        tail, last = recurrence.run(part(first, tokens), state)
        assert torch.allclose(torch.cat([head, tail], axis), whole, rtol=0, atol=1e-11)
        assert torch.allclose(last, end, rtol=0, atol=1e-11)


def a_kernel(columns, *args, **options):
    """As that of mamba_ssm: outputs have the dtype of the columns, and the state no gradient."""
    out, state = jamba.mamba_selective_scan(columns, *args, **options)
    return out.to(columns.dtype), state.detach()


def a_scan(function, *, dtype: torch.dtype, size: float) -> calls.FunctionCall:
    """A call whose state is about eight times ``size`` squared."""
    columns, steps = (torch.full((1, 6, 8), each, dtype=dtype) for each in (size, 0.0))
    into, out = (torch.full((1, 5, 8), each, dtype=dtype) for each in (size, 1.0))
    columns.requires_grad_()
    options = {"z": torch.ones_like(columns), "delta_softplus": True}
    args = (columns, steps, torch.full((6, 5), -0.01), into, out)
    return calls.FunctionCall(None, 0, calls.SELECTIVE_SCAN, function, args, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_state_is_the_kernels_own(dtype):
    recurrence = _RECURRENCES[calls.SELECTIVE_SCAN]
    call = a_scan(a_kernel, dtype=dtype, size=20.0)
    _, end = recurrence.run(call, None)
    _, wanted = a_kernel(*call.args, **call.kwargs, return_last_state=True)
    assert wanted.max() > 2000 and torch.equal(end, wanted)
    # Gradients that FP16 hardly represents are not divided.
    scale = 2.0**-22
    (got,) = torch.autograd.grad((end * scale).sum(), call.args[0])
    own = a_scan(jamba.mamba_selective_scan, dtype=torch.float32, size=20.0)
    _, state = own.function(*own.args, **own.kwargs, return_last_state=True)
    (found,) = torch.autograd.grad((state * scale).sum(), own.args[0])
    torch.testing.assert_close(got.float(), found, rtol=0.02, atol=0)


def test_what_a_state_adds_is_the_same_under_autocast():
    """Of FP32 tensors, as of those of mamba_ssm's kernel, which computes in their dtype."""
    function, args, kwargs = selective_scan(12)
    args = [each.float().requires_grad_() for each in args]
    kwargs = {
        name: each.float() if isinstance(each, torch.Tensor) else each
        for name, each in kwargs.items()
    }
    start = draw(2, 6, 5, seed=9).float().requires_grad_()

    def kernel(columns, *args, **options):
        return torch.zeros_like(columns)

    call = calls.FunctionCall(None, 0, function.__name__, kernel, tuple(args), kwargs)

    def results() -> list[torch.Tensor]:
        out, _ = _RECURRENCES[function.__name__].run(call, start, wants_state=False)
        read = [args[1], args[2], args[4], start]
        return [out, *torch.autograd.grad(out, read, torch.ones_like(out))]

    wanted = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, results(), wanted))


def test_a_scan_of_responses_has_their_tokens_alone(runtime, monkeypatch):
    own, lengths = jamba.mamba_selective_scan, []

    def counted(columns, *args, **options):
        lengths.append((columns.shape[-1], options.get("return_last_state")))
        return own(columns, *args, **options)

    with in_fp64():
        monkeypatch.setattr(jamba, "mamba_selective_scan", counted)
        shared = SharedPrefix(zoo_model("jamba"), runtime)
        shared.backward(group(40, (5, 9)), loss_fn, microbatch_tokens=20)
        # Of the check.
        lengths.clear()
        shared.backward(group(40, (5, 9)), loss_fn, microbatch_tokens=20)
    assert {tokens for tokens, wants_state in lengths if not wants_state} == {5, 9}
    assert len(lengths) > 2


def test_a_state_is_kept_apart_and_wide():
    """BF16 would lose the last of many equal gradients."""
    states, module = States(), torch.nn.Identity()
    columns = draw(1, 6, 20, seed=1).bfloat16().requires_grad_()
    args = (columns, draw(6, 4, seed=2).bfloat16())
    call = calls.FunctionCall(module, 0, "causal_conv1d_fn", bamba.causal_conv1d_fn, args, {})
    record = states.recorder(lambda: 3)
    record(call)
    with pytest.raises(UnsupportedModelError, match="Identity runs outside a layer or more than"):
        record(call)
    (leaf,) = (state.leaf for state in states._states.values())
    assert leaf.untyped_storage().nbytes() == 6 * 3 * torch.float32.itemsize
    for _ in range(512):
        leaf.to(torch.bfloat16).sum().backward()
    ((layer, live, seed),) = states.seeds()
    assert layer == 3 and live is states.of(3)[0] and states.need_backward
    assert seed.dtype is torch.bfloat16 and bool((seed == 512).all())


def test_shards_are_refused():
    model = zoo_model("bamba")
    with pytest.raises(UnsupportedModelError, match=r"recurrent layers \(BambaMixer\)"):
        sharding._check_sharded(model, support.resolve(model), {"": model})


def mutated(monkeypatch, runtime) -> tuple[str, float]:
    """Returns the check's refusal of a mutated step, and its error without the check."""
    with in_fp64():
        model = zoo_model("qwen3_next")
        with pytest.raises(UnsupportedModelError) as refusal:
            SharedPrefix(model, runtime).check()
        monkeypatch.setattr(SharedPrefix, "_check_if_needed", lambda *_: None)
        return str(refusal.value), error(model, SharedPrefix(model, runtime), group(70, (5, 9)))


def test_states_without_gradient(runtime, monkeypatch):
    monkeypatch.setattr(States, "seeds", lambda self: [])
    refusal, distance_ = mutated(monkeypatch, runtime)
    assert "not exact" in refusal and distance_ > 1e3 * FP64_BOUND


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"])
def test_responses_that_start_from_nothing(name, runtime, monkeypatch):
    kind = type(_RECURRENCES[name])
    real = kind.run
    monkeypatch.setattr(kind, "run", lambda self, call, start, **own: real(self, call, None, **own))
    refusal, distance_ = mutated(monkeypatch, runtime)
    assert "not exact" in refusal and distance_ > 1e3 * FP64_BOUND


def test_another_thread_evaluates_meanwhile(runtime):
    """Outside the step's thread, and after it, the functions are the model's own."""
    with in_fp64():
        model = zoo_model("qwen3_next")
        tokens = torch.arange(3, 20).unsqueeze(0)
        with torch.no_grad():
            wanted = model(input_ids=tokens, use_cache=False).logits
        own = qwen3_next.torch_chunk_gated_delta_rule
        seen = []

        def evaluate(module, args, output):
            if threading.current_thread() is threading.main_thread() and not seen:
                other = threading.Thread(target=compute)
                other.start()
                other.join()

        def compute():
            inside = qwen3_next.torch_chunk_gated_delta_rule
            with torch.no_grad():
                seen.append((inside, model(input_ids=tokens, use_cache=False).logits))

        shared, case = SharedPrefix(model, runtime), group(9, (5, 3))
        shared.check()
        with model.model.layers[1].register_forward_hook(evaluate):
            assert error(model, shared, case) <= FP64_BOUND
        inside, logits = seen[0]
        assert torch.equal(logits, wanted)
        assert qwen3_next.torch_chunk_gated_delta_rule is own

