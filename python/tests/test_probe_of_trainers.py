"""The small batch by which an adapter compares its trainer's values with the shared ones."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from models import tiny

from dormouse.trainers import UnsupportedTrainerError, probe

CPU = torch.device("cpu")


def test_token_ids_of_a_partitioned_embedding():
    """DeepSpeed's stage 3 leaves a weight of no elements, with its shape beside."""
    model = tiny()
    wanted = probe.small_batch_of(model, CPU)
    weight = model.get_input_embeddings().weight
    weight.ds_shape, weight.data = weight.shape, weight.new_empty(0)
    got = probe.small_batch_of(model, CPU)
    assert all(torch.equal(a, b) for a, b in zip(got[:2], wanted[:2], strict=True))
    assert wanted[0].max() > 1


@pytest.mark.parametrize("factor", [1, 2])
def test_parameters_on_another_device_than_the_values(factor):
    """As those of FSDP2's CPUOffloadPolicy. "meta" stands for where the parameters are, and the CPU
    for the device of the runtime."""
    shared = SimpleNamespace(device=CPU, unreduced=nullcontext)

    def own(ids, mask, keep):
        assert ids.device == mask.device == CPU
        return ids[:, -keep:].double(), None

    def ours(ids, mask, keep):
        return factor * ids[:, -keep:].double(), None

    other = pytest.raises(UnsupportedTrainerError, match="distance of 1 ")
    with torch.no_grad(), nullcontext() if factor == 1 else other:
        probe.compare(tiny(dtype=torch.float32).to("meta"), shared, own, ours)


@pytest.mark.parametrize("changed", [None, (0, 0), (2, 4), (5, 1)])
def test_gradients_are_compared_in_blocks(changed, monkeypatch):
    """A norm of some blocks misses the change, or sees more than it."""
    monkeypatch.setattr(probe, "BLOCK_NUMEL", 4)
    generator = torch.Generator().manual_seed(3)
    wanted = [torch.randn(6, 5, generator=generator), torch.randn(3, generator=generator)]
    got = [each.clone() for each in wanted]
    expected = 0.0
    if changed is not None:
        got[0][changed] += 2
        expected = 2 / float(torch.cat([each.flatten() for each in wanted]).double().norm())
    assert probe._distance(got, wanted) == pytest.approx(expected, rel=1e-6)


def test_own_gradients_are_kept_in_host_memory_if_a_device_is_full(monkeypatch):
    """A tensor that notes where it goes stands for those of a GPU."""
    moved = []

    class Noted(torch.Tensor):
        def cpu(self):
            moved.append(self.shape)
            return torch.zeros(self.shape)

    own = [torch.zeros(2, 3).as_subclass(Noted), torch.zeros(4).as_subclass(Noted)]
    monkeypatch.setattr(probe, "_is_plain", lambda tensor: True)
    for room, wanted in ((True, []), (False, [each.shape for each in own])):
        monkeypatch.setattr(probe, "has_room", lambda tensors, room=room: room)
        probe._aside(own)
        assert moved == wanted
