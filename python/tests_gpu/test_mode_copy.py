"""Mode copy: what autograd saves leaves the GPU by copy, and comes back as it was."""

from __future__ import annotations

import pytest
import torch
from alone import alone
from conftest import LATE_MS, busy, random_bytes, settled

import dormouse

MIB = 1 << 20


def floats(seed: int) -> torch.Tensor:
    """Finite numbers that no kernel made, so that they are true on the stand-in too."""
    return random_bytes(MIB, seed=seed).float()


def saved(out: torch.Tensor) -> list[torch.Tensor]:
    return [out.grad_fn._saved_self, out.grad_fn._saved_other]


def stashed(installed) -> int:
    return installed.runtime.stats()["tiers"]["host"]["current_bytes"]


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A strided tensor by a copy of its whole storage: gathering it on the GPU takes a kernel."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().cpu())
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@alone()
def test_saved_tensors_leave_and_come_back():
    installed = dormouse.install(mode="copy")
    torch.cuda.init()
    data = [floats(1), floats(2)]
    with installed.saved_tensor_offload().hooks():
        weights = [each.cuda().requires_grad_() for each in data]
        activations = [each.clone() for each in weights]
        out = activations[0] * activations[1]
    held = torch.cuda.memory_allocated()
    del activations
    assert torch.cuda.memory_allocated() == held - 8 * MIB, "the graph holds no GPU memory"
    assert stashed(installed) >= 8 * MIB
    back = saved(out)
    assert all(each.is_cuda for each in back)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(back, data, strict=True))
    out.backward(torch.ones_like(out))
    del out, back
    assert settled(installed.runtime)["tiers"]["host"]["current_bytes"] == 0


@alone()
def test_views_of_one_storage_are_one_copy():
    installed = dormouse.install(mode="copy")
    data = floats(3)
    with installed.saved_tensor_offload().hooks():
        base = data.cuda().requires_grad_().clone().view(1024, 1024)
        out = base[:, 3:7].t() * base[:1, :1].expand(4, 1024)
    assert stashed(installed) == data.nbytes
    del base
    first, second = saved(out)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert torch.equal(on_cpu(first), data.view(1024, 1024)[:, 3:7].t())
    assert torch.equal(on_cpu(second), data[:1].expand(4, 1024))
    assert (first.stride(), second.stride()) == ((1, 1024), (0, 0))


@alone()
def test_the_copy_out_waits_for_the_stream_that_writes():
    installed = dormouse.install(mode="copy")
    data, side = floats(4).pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(side), installed.saved_tensor_offload().hooks():
        late = torch.zeros(MIB, device="cuda").requires_grad_().clone()
        busy(LATE_MS)
        late.detach().copy_(data, non_blocking=True)
        out = late * late
    del late
    torch.cuda.synchronize()
    assert torch.equal(saved(out)[0].cpu(), data)


@alone()
def test_parameters_and_small_tensors_stay():
    installed = dormouse.install(mode="copy")
    weight = torch.nn.Parameter(floats(5).cuda())
    small = torch.ones(10, device="cuda").requires_grad_()
    with installed.saved_tensor_offload([weight]).hooks():
        out = [weight * weight, small * small]
    assert stashed(installed) == 0
    assert saved(out[0])[0].data_ptr() == weight.data_ptr()


@alone()
def test_backward_on_another_thread_gets_the_bytes():
    """torch runs backward of GPU tensors on a thread of its own, on the forward's stream."""
    installed = dormouse.install(mode="copy")
    data, side, seen = floats(6), torch.cuda.Stream(), []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            seen.append((x.cpu(), torch.cuda.current_stream()))
            return grad

    with torch.cuda.stream(side):
        with installed.saved_tensor_offload().hooks():
            out = Seen.apply(data.cuda().requires_grad_().clone())
        out.backward(torch.ones_like(out))
    ((bytes_seen, stream),) = seen
    assert torch.equal(bytes_seen, data)
    assert stream == side


@alone()
def test_in_mode_allocator():
    installed = dormouse.install(mode="allocator")
    data = floats(7)
    with installed.saved_tensor_offload().hooks():
        activation = data.cuda().requires_grad_().clone()
        out = activation * activation
    held = torch.cuda.memory_allocated()
    del activation
    assert torch.cuda.memory_allocated() == held - data.nbytes
    assert torch.equal(saved(out)[0].cpu(), data)


@alone()
def test_a_graph_that_is_dropped_lets_go():
    installed = dormouse.install(mode="copy")
    with pytest.raises(ZeroDivisionError), installed.saved_tensor_offload().hooks():
        activation = floats(8).cuda().requires_grad_().clone()
        out = activation * activation
        assert stashed(installed) >= out.nbytes
        raise ZeroDivisionError
    del activation, out
    assert settled(installed.runtime)["tiers"]["host"]["current_bytes"] == 0


@alone()
def test_a_change_after_the_save_is_an_error():
    installed = dormouse.install(mode="copy")
    with installed.saved_tensor_offload().hooks():
        activation = floats(9).cuda().requires_grad_().clone()
        out = activation * activation
    activation.detach().zero_()
    del activation
    with pytest.raises(RuntimeError, match="inplace operation.*version 1; expected version 0"):
        out.sum().backward()


@alone()
def test_without_room_the_tensor_stays():
    installed = dormouse.install(mode="copy")
    installed.runtime.set_budget("host", 0)
    with installed.saved_tensor_offload().hooks():
        activation = floats(10).cuda().requires_grad_().clone()
        out = activation * activation
    assert installed.runtime.stats()["declined"] == 2, "each save asks anew"
    assert saved(out)[0].data_ptr() == activation.data_ptr()


@alone()
def test_what_a_capture_saves_stays():
    """A graph's addresses are fixed, and a blocking copy is not captured."""
    installed = dormouse.install(mode="copy")
    leaf = floats(11).cuda().requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with installed.saved_tensor_offload().hooks():
        with torch.cuda.graph(graph):
            captured = leaf.clone()
            out = captured * captured
        assert stashed(installed) == 0
        after = leaf.clone()
        product = after * after
    assert saved(out)[0].data_ptr() == captured.data_ptr()
    assert stashed(installed) == after.nbytes
    graph.replay()
    # What waits outside cannot come back in a capture, but what somebody kept is there.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert saved(product)[0].data_ptr() == after.data_ptr()
        del after
        with pytest.raises(dormouse.StateError, match="cannot be captured"):
            saved(product)
        leaf.clone()  # torch warns of graphs without nodes
    assert saved(product)[0].nbytes == 4 * MIB
