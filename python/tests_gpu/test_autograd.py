"""Autograd across host and device: what offloading trainers do to saved activations."""

from __future__ import annotations

import torch
from conftest import busy, random_bytes

COUNT = 1 << 18


def floats(seed: int) -> torch.Tensor:
    """Finite numbers that no kernel made, so that they are true on the stand-in too."""
    return random_bytes(COUNT, seed=seed).float()


class Offload:
    """Saved tensors go to pinned memory on one stream and come back on another."""

    def __init__(self):
        self.out, self.back = torch.cuda.Stream(), torch.cuda.Stream()
        self.returned: list[torch.Tensor] = []

    def pack(self, saved):
        self.out.wait_stream(torch.cuda.current_stream())
        host = torch.empty_like(saved, device="cpu", pin_memory=True)
        with torch.cuda.stream(self.out):
            host.copy_(saved, non_blocking=True)
            saved.record_stream(self.out)
        return host, self.out.record_event()

    def unpack(self, packed):
        host, written = packed
        self.back.wait_event(written)
        with torch.cuda.stream(self.back):
            saved = host.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.back)
        saved.record_stream(torch.cuda.current_stream())
        self.returned.append(saved)
        return saved


def test_saved_tensors_go_out_and_come_back():
    offload = Offload()
    layers = [floats(seed) for seed in range(4)]
    weights = [layer.cuda().requires_grad_() for layer in layers]
    with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        products = [a * b for a, b in zip(weights[::2], weights[1::2], strict=True)]
    busy(20)
    torch.autograd.backward(products, [torch.ones_like(p) for p in products])
    torch.cuda.synchronize()
    seen = sorted(tensor.cpu().sum().item() for tensor in offload.returned)
    assert seen == sorted(layer.sum().item() for layer in layers)
    assert all(weight.grad.shape == weight.shape for weight in weights)


def test_torch_saves_on_cpu():
    a, b = floats(1), floats(2)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        product = a.cuda().requires_grad_() * b.cuda()
    assert torch.equal(product.grad_fn._saved_other.cpu(), b)


def test_gradients_pass_through_copies_and_views():
    leaf = floats(3).requires_grad_()
    part = leaf.cuda().view(4, -1)[1:3].cpu()
    assert torch.equal(part, leaf.detach().view(4, -1)[1:3])
    grad = floats(4).view(4, -1)[:2]
    part.backward(grad)
    # Of the rest torch says 0, by a kernel or by a fill: kernels do nothing on the stand-in.
    assert torch.equal(leaf.grad.view(4, -1)[1:3], grad)


def test_backward_runs_on_the_stream_of_the_forward():
    side = torch.cuda.Stream()
    leaf = floats(5).pin_memory().requires_grad_()
    streams = []

    with torch.cuda.stream(side):
        device = leaf.to("cuda", non_blocking=True)
        device.register_hook(lambda _: streams.append(torch.cuda.current_stream()))
        back = device.clone().to("cpu")
    back.backward(torch.ones(COUNT))
    assert streams == [side]
    assert leaf.grad.eq(1).all()
