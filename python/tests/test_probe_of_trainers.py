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
