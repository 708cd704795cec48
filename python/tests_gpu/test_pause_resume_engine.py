"""Engines over memory that is paused and resumed: CUDA graphs, and steps of a trainer.

Each test runs with tags of mode allocator and with pools of mode pool. Kernels do nothing on the
stand-in: what they would have left is copied in, and graphs are of copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from alone import alone
from conftest import SLACK_BYTES
from pausing import MIB, UNIT, data_of, fill, filled, free_bytes, has_more, holds

import dormouse

# A segment of its own in torch's allocator.
SIZE = max(12 * MIB, UNIT)


def tags() -> Callable:
    return dormouse.install().runtime.tag


def pools() -> Callable:
    return dormouse.install(mode="pool").pool


def region_of(sleeper):
    """The context whose memory a tag or a pool has."""
    return sleeper.collect() if hasattr(sleeper, "collect") else sleeper.use()


def replayed_over_memory_that_slept(make: Callable) -> None:
    cache = make("kv_cache", backup=False)
    with region_of(cache):
        block = data_of(SIZE, 0).cuda()
    result, graph = torch.zeros_like(block), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        passing = block.clone()
        result.copy_(passing)
        del passing
    graph.replay()
    assert holds(result, 0)
    address = block.data_ptr()
    torch.cuda.empty_cache()
    before = free_bytes()
    for seed in range(1, 3):
        assert cache.sleep("host") is None
        assert has_more(before, SIZE)
        other = data_of(SIZE, 10).cuda()
        assert has_more(before, 0)
        del other
        torch.cuda.empty_cache()
        cache.wake()
        assert block.data_ptr() == address
        beside = data_of(MIB, 11).cuda()
        fill(block, seed)
        graph.replay()
        assert holds(result, seed) and holds(beside, 11)
        del beside
        torch.cuda.empty_cache()


@alone()
def test_a_graph_is_replayed_over_a_tag_that_slept():
    replayed_over_memory_that_slept(tags())


@alone()
def test_a_graph_is_replayed_over_a_pool_that_slept():
    replayed_over_memory_that_slept(pools())


def weights_and_cache_in_turn(make: Callable) -> None:
    weights, cache = make("weights"), make("kv_cache", backup=False)
    with region_of(cache):
        block = data_of(SIZE, 0).cuda()
    with region_of(weights):
        model = torch.nn.Linear(1024, SIZE // 4096, bias=False, device="cuda")
    weight = model.weight.detach()
    fill(weight, 1)
    addresses = [block.data_ptr(), weight.data_ptr()]
    graph, results = torch.cuda.CUDAGraph(), [torch.zeros_like(each) for each in (block, weight)]
    with torch.cuda.graph(graph):
        for result, source in zip(results, (block, weight), strict=True):
            result.copy_(source.clone())
    graph.replay()
    assert holds(results[0], 0) and holds(results[1], 1)
    torch.cuda.empty_cache()
    before = free_bytes()
    for asleep, each in enumerate((cache, weights), 1):
        assert each.sleep("host") is None
        assert has_more(before, asleep * SIZE)
    for awake, each in enumerate((weights, cache), 1):
        each.wake()
        assert has_more(before, (2 - awake) * SIZE)
    assert [block.data_ptr(), weight.data_ptr()] == addresses
    fill(block, 2)
    graph.replay()
    assert holds(results[0], 2) and holds(results[1], 1), "the weights are as they were"
    fill(weight, 3)
    graph.replay()
    assert holds(results[0], 2) and holds(results[1], 3)
    assert cache.sleep("host") is None
    assert holds(weight, 3)
    cache.wake()


@alone()
def test_weights_and_cache_of_a_graph_sleep_in_turn_under_tags():
    weights_and_cache_in_turn(tags())


@alone()
def test_weights_and_cache_of_a_graph_sleep_in_turn_in_pools():
    weights_and_cache_in_turn(pools())


class Engine(torch.nn.Module):
    """A model without matrix products, which the stand-in does not have, and its optimizer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Parameter(torch.empty((2, SIZE // 4), device="cuda"))
        self.optimizer = torch.optim.AdamW(self.parameters(), foreach=False)

    def step(self) -> None:
        row = torch.ones(SIZE // 4, device="cuda")
        for layer in self.layers:
            row = row * layer
        row.sum().backward()
        self.optimizer.step()

    def held(self) -> list[torch.Tensor]:
        """The parameter and its moments."""
        state = self.optimizer.state[self.layers]
        return [self.layers.detach(), state["exp_avg"], state["exp_avg_sq"]]


def built_in(sleeper) -> Engine:
    """An engine that was built and has stepped twice with the region open."""
    with region_of(sleeper):
        engine = Engine()
        for _ in range(2):
            engine.step()
    for seed, each in enumerate(engine.held()):
        fill(each, seed)
    torch.cuda.empty_cache()
    return engine


def sleeps_with_what_its_thread_built(sleeper) -> None:
    beside = data_of(MIB, 10).cuda()
    engine = built_in(sleeper)
    held = engine.held()
    addresses = [each.data_ptr() for each in held]
    before = free_bytes()
    assert sleeper.sleep("host") is None
    slept = free_bytes()
    assert slept >= before + 6 * SIZE - SLACK_BYTES
    others = data_of(8 * SIZE, 11).cuda()
    assert has_more(slept, -8 * SIZE)
    assert holds(others, 11) and holds(beside, 10)
    del others
    torch.cuda.empty_cache()
    assert has_more(slept, 0)
    sleeper.wake()
    assert has_more(before, 0)
    assert [each.data_ptr() for each in held] == addresses
    assert all(holds(each, seed) for seed, each in enumerate(held))
    allocated = torch.cuda.memory_allocated()
    engine.step()
    assert torch.cuda.memory_allocated() == allocated
    # What is cached makes way for a request that finds no room beside it.
    free = free_bytes()
    halves = [filled(free // 10 * 4) for _ in range(2)]
    del halves
    assert filled(free // 10 * 8).is_cuda
    assert holds(beside, 10)


@alone()
def test_a_training_engine_sleeps_under_a_tag():
    sleeps_with_what_its_thread_built(tags()("engine"))


@alone()
def test_a_training_engine_sleeps_in_a_pool():
    sleeps_with_what_its_thread_built(pools()("engine"))


@alone()
def test_gradients_that_autograds_thread_allocates_stay_awake():
    runtime = dormouse.install().runtime
    tag = runtime.tag("engine")
    engine = built_in(tag)
    grad = engine.layers.grad
    fill(grad, 10)
    assert tag.sleep("host") is None
    states = [runtime.query(each.data_ptr())["state"] for each in (*engine.held(), grad)]
    assert states == ["host", "host", "host", "awake"]
    assert holds(grad, 10)
    tag.wake()
