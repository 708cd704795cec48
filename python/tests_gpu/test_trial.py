"""Where the gradients of a check's first run wait for those of its second."""

from __future__ import annotations

import pytest
import torch

from dormouse.hf.trial import KEPT_ROOM, Trial

GRADIENT_BYTES = 8 * 8 * 4


def taken(monkeypatch, free_bytes: int, cached_bytes: int = 0, **how: bool) -> torch.Tensor:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 + cached_bytes)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    model = torch.nn.Linear(8, 8, bias=False, device="cuda")
    with Trial(model, None) as trial:
        model.weight.grad = torch.ones_like(model.weight)
        (gradient,) = trial.take(**how).values()
    return gradient


@pytest.mark.parametrize("short_bytes, device", [(0, "cuda"), (1, "cpu")])
@pytest.mark.parametrize("cached_bytes", [0, 64])
def test_kept_gradients_stay_where_there_is_room(monkeypatch, short_bytes, device, cached_bytes):
    free_bytes = KEPT_ROOM * GRADIENT_BYTES - short_bytes - cached_bytes
    assert taken(monkeypatch, free_bytes, cached_bytes, kept=True).device.type == device


def test_others_stay(monkeypatch):
    assert taken(monkeypatch, 0).device.type == "cuda"
