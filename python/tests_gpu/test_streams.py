"""Streams run in order within and in no order between them, except where an event says so."""

from __future__ import annotations

import pytest
import torch
from conftest import LATE_MS, busy, random_bytes



@pytest.fixture
def side():
    return torch.cuda.Stream()


def test_an_event_completes_when_its_stream_gets_there():
    event = torch.cuda.Event()
    assert event.query()
    busy(LATE_MS)
    event.record()
    assert not event.query()
    assert not torch.cuda.current_stream().query()
    event.synchronize()
    assert event.query()
    assert torch.cuda.current_stream().query()


def test_elapsed_time_spans_the_work_between():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    busy(LATE_MS)
    end.record()
    with pytest.raises(RuntimeError, match="completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert LATE_MS <= start.elapsed_time(end) < 100 * LATE_MS
    assert end.elapsed_time(start) <= -LATE_MS


def test_an_event_without_a_clock_tells_no_time():
    start, end = torch.cuda.Event(), torch.cuda.Event()
    start.record()
    end.record()
    torch.cuda.synchronize()
    with pytest.raises((RuntimeError, ValueError)):
        start.elapsed_time(end)


def test_streams_do_not_wait_for_each_other(side):
    data = random_bytes(1 << 20, pinned=True)
    busy(LATE_MS)
    with torch.cuda.stream(side):
        device = data.to("cuda", non_blocking=True)
        side.synchronize()
        assert not torch.cuda.default_stream().query()
    assert torch.equal(device.cpu(), data)


def hand_over(side, order) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``side`` reads of a buffer that the main stream fills late; and the filling."""
    filling = random_bytes(1 << 20, pinned=True)
    device = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    seen = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    busy(LATE_MS)
    device.copy_(filling, non_blocking=True)
    order()
    with torch.cuda.stream(side):
        seen.copy_(device, non_blocking=True)
    side.synchronize()
    return seen, filling


def test_an_event_orders_two_streams(side):
    def order():
        side.wait_event(torch.cuda.current_stream().record_event())

    seen, filling = hand_over(side, order)
    assert torch.equal(seen, filling)


def test_waiting_for_a_stream_orders_two_streams(side):
    seen, filling = hand_over(side, lambda: side.wait_stream(torch.cuda.current_stream()))
    assert torch.equal(seen, filling)


def test_without_an_event_there_is_no_order(side):
    seen, _ = hand_over(side, lambda: None)
    assert not seen.any()


def test_a_wait_is_for_the_record_before_it(side):
    event = torch.cuda.Event()
    event.record()
    side.wait_event(event)
    busy(LATE_MS)
    event.record()
    side.synchronize()
    assert not event.query()


def test_synchronising_an_event_does_not_wait_for_what_follows():
    event = torch.cuda.Event()
    event.record()
    busy(LATE_MS)
    event.synchronize()
    assert not torch.cuda.current_stream().query()


def test_priorities():
    least, greatest = torch.cuda.Stream.priority_range()
    assert greatest < least
    assert torch.cuda.Stream(priority=greatest).priority == greatest
    assert torch.cuda.Stream(priority=least).priority == least


def test_the_device_waits_for_all_streams(side):
    with torch.cuda.stream(side):
        busy(LATE_MS)
    assert not side.query()
    torch.cuda.synchronize()
    assert side.query()
