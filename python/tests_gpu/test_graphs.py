"""CUDA graphs in mode allocator: a graph owns what its capture allocated, until it is gone."""

from __future__ import annotations

import pytest
import torch
from alone import alone
from conftest import LATE_MS, busy, random_bytes

import dormouse
from dormouse.modes import allocator

MIB = 1 << 20


def filled(count: int, seed: int) -> torch.Tensor:
    return random_bytes(count, seed=seed).cuda()


def empty(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def overlaps(tensor: torch.Tensor, address: int, count: int) -> bool:
    return tensor.data_ptr() < address + count and address < tensor.data_ptr() + tensor.nbytes


def torchs_own(source: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph to keep, and what torch reserves while one is: 2.11 a page for its generator."""
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source[:512].copy_(source[512:1024])
    return graph, torch.cuda.memory_reserved() - before


@alone()
def test_memory_of_a_capture_is_nobody_elses_after_its_tensors_died():
    dormouse.install()
    source = filled(8 * MIB, 1)
    _kept, own = torchs_own(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passing = source.clone()
        result = passing.clone()
        address = passing.data_ptr()
        del passing
        assert empty(8).data_ptr() == address, "the same capture may have it again"
    assert not overlaps(result, address, 8 * MIB)
    reserved = torch.cuda.memory_reserved()
    for stream in (torch.cuda.current_stream(), torch.cuda.graph.default_capture_stream):
        with torch.cuda.stream(stream):
            others = [empty(mib) for mib in (1, 2, 4, 8)]
        assert not any(overlaps(each, address, 8 * MIB) for each in others)
        del others
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved, "a graph's pages stay"
    graph.reset()
    del result
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == source.nbytes + own


@alone()
def test_replays_read_and_write_their_own_bytes():
    dormouse.install()
    source = filled(4 * MIB, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passing = source.clone()
        result = passing.clone()
        del passing
    assert not torch.equal(result.cpu(), source.cpu()), "nothing has run yet"
    for seed in range(2, 6):
        data = random_bytes(4 * MIB, seed=seed)
        source.copy_(data)
        # Whoever got the graph's memory would be overwritten, and would overwrite it.
        others = {seed: filled(4 * MIB, seed) for seed in range(20, 24)}
        torch.cuda.empty_cache()
        graph.replay()
        assert torch.equal(result.cpu(), data)
        for other, tensor in others.items():
            assert torch.equal(tensor.cpu(), random_bytes(4 * MIB, seed=other))
        del others


@alone()
def test_graphs_that_share_a_pool_use_the_same_memory_until_the_last_is_gone():
    dormouse.install()
    source = filled(8 * MIB, 1)
    _kept, own = torchs_own(source)
    graphs, results, addresses = [], [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None):
            passing = source.clone()
            results.append(passing.clone())
            addresses.append(passing.data_ptr())
            del passing
        graphs.append(graph)
    assert addresses[0] == addresses[1]
    assert torch.cuda.memory_reserved() == 4 * source.nbytes + own
    graphs[0].reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 4 * source.nbytes + own, "the other one replays on it"
    assert not overlaps(empty(8), addresses[0], 8 * MIB)
    data = random_bytes(8 * MIB, seed=9)
    source.copy_(data)
    graphs[1].replay()
    assert torch.equal(results[1].cpu(), data)
    graphs[1].reset()
    results.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == source.nbytes + own


@alone()
def test_a_replay_under_way_keeps_its_memory_after_its_graph_is_gone():
    dormouse.install()
    source = filled(8 * MIB, 1)
    seen = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    other = random_bytes(8 * MIB, pinned=True, seed=2)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        empty(1)  # dormouse knows the stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passing = source.clone()
        busy(LATE_MS)
        seen.copy_(passing, non_blocking=True)
        del passing
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    graph.reset()
    assert not side.query(), "the reset waited"
    with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
        others = [torch.empty_like(source).copy_(other, non_blocking=True) for _ in range(4)]
    assert not side.query(), "the replay was not late enough"
    side.synchronize()
    assert torch.equal(seen, source.cpu())
    del others


@alone()
def test_streams_and_threads_of_a_capture_share_its_pool():
    """Work forked to another stream, and gradients that autograd's own thread allocates."""
    dormouse.install()
    leaf = torch.ones(2 * MIB, device="cuda", requires_grad=True)
    leaf.grad = torch.zeros_like(leaf)
    side = torch.cuda.Stream()
    _kept, _own = torchs_own(filled(MIB, 1))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        (leaf * 2).pow(2).sum().backward()
        shared = leaf.detach().clone()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            forked = shared.clone()
            shared.record_stream(side)
        address = shared.data_ptr()
        del shared
        assert not overlaps(empty(8), address, 8 * MIB), "the other stream may still use it"
        main.wait_stream(side)
    held = torch.cuda.memory_allocated() - before
    assert held == forked.nbytes
    assert not overlaps(empty(8), address, 8 * MIB)
    graph.replay()
    assert torch.equal(forked.cpu(), leaf.detach().cpu())
    graph.reset()
    del forked
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


@alone()
def test_others_allocate_their_ordinary_way_during_a_capture():
    dormouse.install()
    source = filled(4 * MIB, 1)
    _kept, own = torchs_own(source)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = source.clone()
        with torch.cuda.stream(side):
            other = empty(8)
        del other
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == source.nbytes + result.nbytes + own


@alone(STANDIN_CUDA_TOTAL_BYTES=str(256 * MIB))
def test_running_out_during_a_capture_is_torchs_error_and_another_capture_works():
    dormouse.install()
    source = filled(20 * MIB, 1)
    kept = torch.cuda.CUDAGraph()
    with torch.cuda.graph(kept):
        source.clone().add_(1)
    failed = torch.cuda.CUDAGraph()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        with torch.cuda.graph(failed):
            held = [source.clone() for _ in range(100)]
    assert "20.0 MiB kept for graphs" in str(caught.value), str(caught.value)
    # The error's frames hold what was allocated, and the graph what its capture got.
    del caught
    held = None
    failed.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = source.clone()
    graph.replay()
    assert torch.equal(result.cpu(), source.cpu())
    assert held is None


@alone()
def test_a_capture_that_broke_leaves_nothing_behind():
    dormouse.install()
    source = filled(4 * MIB, 1)
    _kept, own = torchs_own(source)
    pool = torch.cuda.graph_pool_handle()
    broken = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError):
        with torch.cuda.graph(broken, pool=pool):
            lost = source.clone()
            torch.cuda.synchronize()
    lost = None
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 2 * source.nbytes + own
    # torch 2.11 refuses another capture into the pool of a broken one, and never releases it.
    is_lost = torch.__version__.startswith("2.11.")
    for shared in (None,) if is_lost else (None, pool):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=shared):
            result = source.clone()
        graph.replay()
        assert torch.equal(result.cpu(), source.cpu())
        graph.reset()
        del result
    broken.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == (2 if is_lost else 1) * source.nbytes + own
    assert lost is None


@alone()
def test_a_graphs_memory_does_not_sleep():
    runtime = dormouse.install().runtime
    source = filled(4 * MIB, 1)
    graph = torch.cuda.CUDAGraph()
    with runtime.tag("collected") as tag:
        with tag.collect(), torch.cuda.graph(graph):
            result = source.clone()
        assert tag.sleep("host") is None
        assert runtime.query(result.data_ptr())["state"] == "awake", "nobody collects it"
        tag.wake()
    with runtime.tag("by hand") as tag, pytest.raises(dormouse.StateError, match="keeps its pages"):
        tag.add(result)
    graph.replay()
    assert torch.equal(result.cpu(), source.cpu())


@alone()
def test_where_torch_announces_no_capture_its_memory_is_refused_by_name():
    allocator.GRAPH_HOOKS["set_something_fn"] = "torch_end_pool"
    installed = dormouse.install()
    assert installed.mode == "allocator"
    assert any("no set_something_fn: memory for CUDA graphs is refused" in s for s in installed.why)
    source = filled(4 * MIB, 1)
    other = torch.empty_like(source)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="memory for a CUDA graph.*no capture was announced"):
        with torch.cuda.graph(graph):
            other.copy_(source)
            source.clone()
    graph.replay()
    assert torch.equal(other.cpu(), source.cpu()), "what needs no memory can be captured"
