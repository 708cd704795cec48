"""Compiled layers sleep as others do, unless something that they read or compute is read late."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from models import dense_backward, distance, group, loss_fn, take_gradients, tiny

from dormouse.hf import SharedPrefix, check, compiled_layers, graph, support
from dormouse.hf.probe import TouchRecorder

FP64_BOUND = 1e-10
LAYERS = 4
# More than the last layer saves in phase A, which ends at its K and V.
LAST_LAYER_BYTES = 2 << 20
# Large enough that a layer's saved tensors are blocks of the heap.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


# Lengths that vary, so that none is compiled by itself.
OPTIONS = {"backend": "aot_eager", "dynamic": True}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    # Layers share their code; above the limit torch runs it without compiling.
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def wide(layers: int = LAYERS, dtype: torch.dtype = torch.float32):
    return tiny(dtype=dtype, num_hidden_layers=layers, **WIDE)


def long_group():
    return group(600, (40, 24, 33, 8), seed=3)


def step(model, runtime, *, sleep: bool = True, loss=loss_fn):
    """Returns gradients and the report of a step; names as without torch.compile."""
    report = SharedPrefix(model, runtime, sleep=sleep).backward(
        long_group(), loss, microbatch_tokens=40
    )
    assert not sleep or report.prefix["stray_wakes"] == 0, report.prefix["first_stray"]
    found = take_gradients(model).items()
    return {name.replace("_orig_mod.", ""): gradient for name, gradient in found}, report


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def identical(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def whole(model, **options):
    return torch.compile(model, **(OPTIONS | options))


def layers(model, **options):
    for layer in model.model.layers:
        layer.compile(**(OPTIONS | options))
    return model


def forwards(model, **options):
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, **(OPTIONS | options))
    return model


def parts(model, **options):
    for layer in model.model.layers:
        layer.mlp.compile(**(OPTIONS | options))
    return model


@pytest.fixture(scope="module")
def eager_bytes(runtime):
    """What sleeps of the model without torch.compile."""
    _, report = step(wide(), runtime)
    return report.prefix["dormant_bytes"]


@pytest.mark.parametrize("compiled", [layers, whole, forwards, parts])
def test_compiled_layers_sleep(compiled, runtime, eager_bytes):
    model = compiled(wide())
    awake, _ = step(model, runtime, sleep=False)
    asleep, report = step(model, runtime)
    assert identical(asleep, awake)
    assert report.notes == []
    assert report.prefix["dormant_bytes"] > 0.5 * eager_bytes
    assert report.prefix["asleep_at_b_bytes"] > 0.5 * eager_bytes


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [layers, parts])
def test_gradients_are_the_dense_ones(compiled, runtime, eager_bytes):
    plain = wide(dtype=torch.float64)
    got, report = step(compiled(wide(dtype=torch.float64)), runtime)
    dense_backward(plain, long_group())
    assert distance(got, take_gradients(plain)) <= FP64_BOUND
    assert report.prefix["dormant_bytes"] > eager_bytes


@pytest.mark.slow
def test_the_check_and_the_probe_leave_layers_compiled(runtime):
    """With a graph for each length: dense runs of the check compile none, so that torch's limit
    suffices. torch 2.11 skips code for ever that it was to compile under a dispatch mode."""
    lengths, stances, nodes = set(), set(), set()
    entered = TouchRecorder.__enter__

    def backend(code, inputs):
        lengths.update(each.shape[1] for each in inputs if each.dim() == 3)
        return torch._dynamo.lookup_backend("aot_eager")(code, inputs)

    def enter(recorder):
        stances.add(stance())
        return entered(recorder)

    def loss(logits, labels, i):
        nodes.update(graph.collect([logits], set()).signature)
        return loss_fn(logits, labels, i)

    model = forwards(wide(2, torch.bfloat16), backend=backend, dynamic=False)
    shared = SharedPrefix(model, runtime)
    with (
        torch._dynamo.config.patch(recompile_limit=8),
        mock.patch.object(TouchRecorder, "__enter__", enter),
    ):
        checked = shared.check()
        # Of the prompt and of two microbatches.
        assert len(lengths) == 3 and checked.tokens - 1 not in lengths
        for _ in range(2):
            nodes.clear()
            shared.backward(group(600, (40, 40, 40), seed=3), loss, microbatch_tokens=40)
    assert {599, 40} < lengths
    # As an eager MLP has it.
    assert compiled_layers.NODE in nodes and "SiluBackward0" not in nodes
    assert stances == {"force_eager"} and stance() == "default"


def test_dense_runs_keep_compiled_code_that_attention_may_need():
    model = tiny(dtype=torch.float32, num_hidden_layers=1)

    def own_code():
        return check._own_code(support.resolve(model, True))

    assert own_code() is compiled_layers.EAGER
    model.set_attn_implementation("flex_attention")
    assert own_code() is not compiled_layers.EAGER
    model.set_attn_implementation("sdpa")
    assert own_code() is compiled_layers.EAGER
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert own_code() is not compiled_layers.EAGER


def test_the_last_of_two_threads_puts_the_stance_back():
    """Of which the first leaves while the second is inside."""

    is_inside, may_leave, found = threading.Event(), threading.Event(), []

    def second():
        with compiled_layers.EAGER:
            is_inside.set()
            assert may_leave.wait(60)
            found.append(stance())

    thread = threading.Thread(target=second)
    with compiled_layers.EAGER:
        thread.start()
        assert is_inside.wait(60)
    may_leave.set()
    thread.join()
    assert found == ["force_eager"] and stance() == "default"


@pytest.mark.slow
def test_the_default_backend(runtime, eager_bytes):
    model = layers(wide(3), backend="inductor")
    awake, _ = step(model, runtime, sleep=False)
    asleep, report = step(model, runtime)
    assert identical(asleep, awake)
    assert report.notes == []
    # Three layers of four, and inductor saves less.
    assert report.prefix["dormant_bytes"] > 0.5 * 3 / LAYERS * eager_bytes


def refused(model, runtime, reason: str) -> None:
    """Checks that no compiled layer sleeps, for this reason, and that gradients are those without
    sleep. ``model``: by :func:`parts`; of its last layer, phase A runs no compiled code."""
    awake, _ = step(model, runtime, sleep=False)
    asleep, report = step(model, runtime)
    assert identical(asleep, awake)
    assert report.prefix["dormant_bytes"] < LAST_LAYER_BYTES
    count = len(model.model.layers) - 1
    expected = [f"layer {n} stays awake: it is compiled, and {reason}" for n in range(count)]
    assert report.notes == expected


class Kept(torch.nn.Module):
    """An MLP of which one layer keeps a tensor that another adds. No eager graph saves it, and its
    own layer does not read it."""

    def __init__(self, inner, kept: list, *, reads: bool):
        super().__init__()
        self.inner, self.kept, self.reads = inner, kept, reads

    def forward(self, x):
        out = self.inner(x)
        if self.reads:
            return out + self.kept.pop()
        self.kept.append(out * 0.5)
        return out


@pytest.mark.slow
@pytest.mark.parametrize("late", [2, 3])
def test_a_tensor_that_a_later_layer_reads_from_elsewhere(late, runtime):
    model, kept = wide(5), []
    for number in (0, late):
        layer = model.model.layers[number]
        layer.mlp = Kept(layer.mlp, kept, reads=number > 0)
    refused(parts(model), runtime, f"layer {late} reads a tensor that layer 0 read or computed")


def test_a_tensor_that_a_hook_keeps(runtime):
    model, kept = wide(), []
    model.model.layers[2].mlp.register_forward_hook(lambda _, args, out: kept.append(out.detach()))
    refused(parts(model), runtime, "something else holds a tensor that layer 2 read or computed")


class Scaled(torch.nn.Module):
    """An MLP that scales by a table, built at need."""

    def __init__(self, inner, *, is_buffer: bool):
        super().__init__()
        self.inner = inner
        if is_buffer:
            self.register_buffer("table", None, persistent=False)
        self.table = torch.ones(1, 256)

    def forward(self, x):
        rows = x.shape[1]
        if self.table.shape[0] < rows:
            self.table = torch.linspace(0.5, 1.5, 256).repeat(rows, 1)
        return self.inner(x) * self.table[:rows]


@pytest.mark.slow
def test_a_table_that_microbatches_read_again(runtime):
    """The probe finds it although it does not build it: a check before has built a longer one."""
    model = wide()
    layer = model.model.layers[1]
    layer.mlp = Scaled(layer.mlp, is_buffer=False)
    refused(parts(model), runtime, "microbatches read a tensor that layer 1 read or computed")


@pytest.mark.slow
def test_a_buffer_that_a_layer_replaces_stays_awake(runtime):
    """The step looks at buffers as they are when the layer has run."""
    model, roles = wide(), set()
    layer = model.model.layers[1]
    layer.mlp = scaled = Scaled(layer.mlp, is_buffer=True)
    parts(model)
    awake, _ = step(model, runtime, sleep=False)
    scaled.table = torch.ones(1, 256)

    def loss(logits, labels, i):
        roles.add(runtime.query(scaled.table.data_ptr())["role"])
        return loss_fn(logits, labels, i)

    asleep, report = step(model, runtime, loss=loss)
    assert identical(asleep, awake)
    assert roles == {"none"}
    assert report.notes == [] and report.prefix["dormant_bytes"] > 0


@pytest.mark.slow
def test_what_all_layers_are_passed_stays_awake(runtime):
    model, given, roles = wide(), [], set()

    def keep(module, args, kwargs):
        given[:] = kwargs["position_embeddings"]

    @torch.compiler.disable
    def hook(*arguments):
        if len(given) < 2 and arguments[2]["position_embeddings"][0].shape[1] > 500:
            keep(*arguments)

    model.model.layers[2].register_forward_pre_hook(hook, with_kwargs=True)
    layers(model)

    def loss(logits, labels, i):
        roles.update(runtime.query(each.data_ptr())["role"] for each in given)
        return loss_fn(logits, labels, i)

    _, report = step(model, runtime, loss=loss)
    assert roles == {"none"}
    assert report.notes == [] and report.prefix["dormant_bytes"] > 0


def test_a_layer_that_differs_without_torch_compile_stays_awake(runtime):
    """Only a compiled layer has a graph of its own for a good reason."""
    assert compiled_layers.why_awake(("MmBackward0",), None) == compiled_layers.NOT_PROBED
    assert compiled_layers.why_awake(("MmBackward0", compiled_layers.NODE), None) is None


def test_layers_that_replay_cuda_graphs_stay_awake(runtime):
    import torch._inductor.cudagraph_trees as trees

    with mock.patch.object(torch.cuda, "device_count", return_value=1):
        with mock.patch.object(trees, "get_manager", return_value=object()):
            reason = "compiled code replays CUDA graphs (mode='reduce-overhead', say)"
            refused(parts(wide()), runtime, reason)
        signature = (compiled_layers.NODE,)
        # Without a manager; then on a thread of which nothing is known.
        assert compiled_layers.why_awake(signature, None) is None
        with mock.patch.object(trees, "get_manager", side_effect=AssertionError):
            assert "CUDA graphs" in compiled_layers.why_awake(signature, None)


@pytest.mark.parametrize(
    ("name", "value"), [("triton.cudagraph_trees", False), ("cudagraph_policy", object())]
)
def test_cuda_graphs_of_another_kind_keep_layers_awake(name, value):
    import torch._inductor.config as config

    with config.patch({name: value}):
        reason = compiled_layers.why_awake((compiled_layers.NODE,), None)
    assert f"torch._inductor.config.{name} is" in reason


def test_compiled_autograd_keeps_layers_awake():
    signature = (compiled_layers.NODE,)
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert "compiled autograd" in compiled_layers.why_awake(signature, None)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        assert "compiled autograd" in compiled_layers.why_awake(signature, None)
    assert compiled_layers.why_awake(signature, None) is None
