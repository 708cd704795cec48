"""What by-copy hooks leave where it is, and that it is right and freed all the same."""

from __future__ import annotations

import gc

import pytest
import torch
from hooked import (
    ROWS,
    STORAGE_BYTES,
    alone,
    gradient,
    matrix,
    moved,
    on,
    same_bits,
    stashed_bytes,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear
from torch.testing._internal.two_tensor import TwoTensor

from dormouse.modes.copying import SavedTensorOffload


def weight(requires_grad: bool = True) -> torch.nn.Parameter:
    return torch.nn.Parameter(matrix().detach() + 2, requires_grad)


def tied() -> torch.nn.Parameter:
    """Another parameter on another one's storage."""
    return torch.nn.Parameter(weight().data[1:])


# What of a parameter is saved. The operation saves its input as well, which is a leaf here.
PARAMETERS = {
    "a parameter": weight,
    "a transposed parameter": lambda: weight().t(),
    "a broadcast row of a parameter": lambda: weight()[:1].expand(ROWS, ROWS),
    "a frozen parameter": lambda: weight(False),
    "a view of a frozen parameter": lambda: weight(False)[:, :].t(),
    "a tied parameter": tied,
    "a part of a tied parameter": lambda: tied()[:32],
    "a leaf that is no parameter": matrix,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_stay(runtime, name):
    kept = PARAMETERS[name]()
    assert same_bits(runtime, lambda x: linear(x, kept)).out == 0


@pytest.mark.parametrize(
    "sharing", [lambda p: p.data, lambda p: p.detach()[3:], lambda p: p.detach().t()]
)
def test_what_shares_a_kept_storage_stays(runtime, sharing):
    """Nothing but its storage says that it is a parameter's."""
    parameter = weight()
    shared = sharing(parameter)

    def make(x):
        return linear(x, shared)

    assert same_bits(runtime, make).out == STORAGE_BYTES
    assert same_bits(runtime, make, keep=[parameter]).out == 0
    # Tensors made for the occasion do for naming a storage.
    assert same_bits(runtime, make, keep=(p.detach() for p in [parameter])).out == 0


def test_buffers_stay(runtime):
    norm = torch.nn.BatchNorm1d(ROWS).eval()
    norm.running_mean.uniform_(-1, 1)
    seen = same_bits(runtime, lambda x: norm(2 * x), keep=norm.buffers())
    assert seen.out == STORAGE_BYTES, "the input alone"


def test_a_kept_address_is_not_kept_for_others(runtime):
    """What is kept is a storage, not whatever comes to lie at its address later."""
    memory = bytearray(STORAGE_BYTES)
    gone = on(memory, 1)
    offload = SavedTensorOffload(runtime, [gone], min_bytes=0)
    del gone
    for again in range(20):
        with offload.hooks(), moved(runtime) as seen:
            matrix() * on(memory, again)
        assert seen.out == STORAGE_BYTES


def test_the_floor_is_in_bytes_of_the_storage(runtime):
    def moves(make, min_bytes):
        return same_bits(runtime, make, min_bytes=min_bytes).out

    def whole(x):
        return (2 * x).sin()

    assert moves(whole, STORAGE_BYTES) == STORAGE_BYTES
    assert moves(whole, STORAGE_BYTES + 1) == 0
    assert moves(lambda x: (2 * x).double().sin(), STORAGE_BYTES + 1) == 2 * STORAGE_BYTES
    # A small view holds all of a large storage, a large view no more than a small one.
    assert moves(lambda x: (2 * x)[:1].sin(), STORAGE_BYTES) == STORAGE_BYTES
    wide = moves(lambda x: (2 * x[:1]).expand(ROWS, ROWS).sin(), STORAGE_BYTES)
    assert wide == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_moves_nothing(runtime, mode):
    offload = SavedTensorOffload(runtime, min_bytes=0)

    def make(x):
        with moved(runtime) as seen, mode():
            (2 * x.detach()).sin().exp()
        assert seen.out == 0
        return (2 * x).sin()

    before = stashed_bytes(runtime)
    with moved(runtime) as seen:
        result = gradient(make, offload.hooks())
    assert (seen.out, seen.back) == (STORAGE_BYTES, STORAGE_BYTES)
    assert torch.equal(result, gradient(lambda x: (2 * x).sin()))
    assert stashed_bytes(runtime) == before


@pytest.mark.parametrize("min_bytes", [0, 1 << 30])
@pytest.mark.parametrize("result", [torch.exp, lambda x: torch.softmax(x, -1), torch.relu])
def test_a_result_that_its_own_operation_saved_is_freed(runtime, result, min_bytes):
    """The node holds what its hook gave, and must not be held by that in turn."""
    with SavedTensorOffload(runtime, min_bytes=min_bytes).hooks():
        out = result(2 * matrix())
    storage, node = StorageWeakRef(out.untyped_storage()), type(out.grad_fn).__name__
    del out
    assert storage.expired(), node
    gc.collect()


class Marked(torch.Tensor):
    """A subclass that says nothing of itself."""


class Refuses(torch.Tensor):
    """A subclass whose functions cannot be called but where autograd does."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        if function in (torch.Tensor.detach, torch.Tensor.untyped_storage):
            raise TypeError(f"{function} of {cls}")
        return super().__torch_function__(function, types, arguments, named or {})


class Sine(torch.autograd.Function):
    """Saves its input as it is, subclass and all, where no function of torch's is under way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.as_subclass(torch.Tensor).sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.as_subclass(torch.Tensor).cos()


@pytest.mark.parametrize("sine", [torch.sin, Sine.apply])
@pytest.mark.parametrize("kind", [Marked, Refuses])
def test_a_subclass_is_passed_through(runtime, kind, sine):
    def make(x):
        return sine((2 * x).as_subclass(kind)).as_subclass(torch.Tensor)

    assert same_bits(runtime, make).out == 0


def test_a_subclass_of_several_tensors_is_passed_through(runtime):
    def step(hooks: bool) -> TwoTensor:
        leaf = TwoTensor(matrix().detach(), 3 * matrix().detach()).requires_grad_()
        with SavedTensorOffload(runtime, min_bytes=0).hooks() if hooks else torch.enable_grad():
            out = (2 * leaf).sin().exp() * leaf
        out.sum().backward()
        return leaf.grad

    with moved(runtime) as seen:
        copied = step(hooks=True)
    awake = step(hooks=False)
    assert seen.out == 0
    assert torch.equal(copied.a, awake.a)
    assert torch.equal(copied.b, awake.b)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nested.as_nested_tensor([2 * x, (3 * x)[:5]]).sin().to_padded_tensor(0),
        lambda x: (
            torch.nested.as_nested_tensor([2 * x, (3 * x)[:5]], layout=torch.jagged).sin().values()
        ),
        lambda x: torch.sparse.mm((2 * x).to_sparse(), 3 * x),
        lambda x: torch.relu((2 * x).to_mkldnn()).to_dense().sin(),
        lambda x: torch.vmap(lambda row: (2 * row) * (3 * row).exp())(x),
    ],
    ids=["nested", "jagged", "sparse", "mkldnn", "vmap"],
)
def test_other_layouts(runtime, make):
    same_bits(runtime, make)


class Scale(torch.autograd.Function):
    """Saves whatever it is given as it is."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad * (1 + (factor.dequantize() if factor.is_quantized else factor)), None


@pytest.mark.parametrize("kind", ["quantized", "zeros without memory"])
def test_what_is_no_plain_memory_is_passed_through(runtime, kind):
    if kind == "quantized":
        factor = torch.quantize_per_tensor(matrix().detach(), 0.1, 0, torch.quint8)
    else:
        factor = torch._efficientzerotensor((ROWS, ROWS))
    assert same_bits(runtime, lambda x: Scale.apply(x, factor)).out == 0


@alone
def test_a_distributed_tensor_is_passed_through():
    import torch.distributed as dist
    from conftest import a_runtime
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def step(hooks) -> torch.Tensor:
        leaf = distribute_tensor(matrix().detach(), mesh, [Shard(0)]).requires_grad_()
        with hooks:
            out = (2 * leaf).sin().exp()
            assert type(out) is DTensor
        out.sum().backward()
        return leaf.grad.to_local()

    with a_runtime() as runtime:
        with moved(runtime) as seen:
            copied = step(SavedTensorOffload(runtime, min_bytes=0).hooks())
        assert seen.out == 0
    assert torch.equal(copied, step(torch.enable_grad()))
    dist.destroy_process_group()


def test_tensors_of_another_device_stay(runtime):
    with SavedTensorOffload(runtime, min_bytes=0).hooks(), moved(runtime) as seen:
        leaf = torch.ones(ROWS, device="meta", requires_grad=True)
        out = (2 * leaf).sin()
    assert seen.out == 0
    assert out.grad_fn._saved_self.device.type == "meta"


def seeded_rrelu(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.nn.functional.rrelu(2 * x, training=True)


def test_what_is_filled_after_its_save_is_right_inside_hooks_that_keep_it(runtime):
    """The noise of rrelu: the documentation says so, and what it advises works."""
    wanted = gradient(seeded_rrelu)

    def kept(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            return seeded_rrelu(x)

    def hooks():
        return SavedTensorOffload(runtime, min_bytes=1).hooks()

    assert torch.equal(gradient(kept, hooks()), wanted)
    assert not torch.equal(gradient(seeded_rrelu, hooks()), wanted), "the docs say it is wrong"
