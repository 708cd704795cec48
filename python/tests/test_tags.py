"""``sleep`` and ``wake`` of whatever has a tag: weights, optimizer state, caches, on the CPU."""

from __future__ import annotations

import mmap
import signal

import pytest
import torch
from conftest import NVME_DIR, a_runtime
from hooked import alone

import dormouse
from dormouse import _native as native

WIDTH = 384  # a weight is a block of the heap, a bias is not
WEIGHT_BYTES = WIDTH * WIDTH * 4


def module() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH)
    )


def step(model, optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(16, WIDTH, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def held(model, optimizer) -> list[torch.Tensor]:
    """All that outlives a step."""
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    return [*model.parameters(), *(each for state in states for each in state.values())]


def copies(tensors) -> list[torch.Tensor]:
    return [each.detach().clone() for each in tensors]


def a_block(seed: int = 0) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def state(runtime, tensor) -> str:
    return runtime.query(tensor.data_ptr())["state"]


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_what_sleeps_is_read_and_stays_asleep(runtime, tier):
    with runtime.tag("weights") as tag:
        with tag.collect():
            block = a_block()
        with pytest.raises(dormouse.StateError, match="awake memory"):
            runtime.read(block)
        assert tag.sleep(tier) is None
        assert torch.equal(runtime.read(block), a_block())
        assert torch.equal(runtime.read(block.T), a_block().T)
        assert state(runtime, block) == tier
        tag.wake()
        assert torch.equal(block, a_block())


def test_what_is_read_has_the_sign_and_the_conjugation_of_the_tensor(runtime):
    with runtime.tag("weights") as tag:
        with tag.collect():
            numbers = torch.complex(a_block(1), a_block(2))
        views = {
            "conjugate": numbers.conj(),
            "negative": numbers.conj().imag,
            "both": torch._neg_view(numbers).conj(),
        }
        assert views["negative"].is_neg() and views["both"].is_neg() and views["both"].is_conj()
        wanted = {name: view.resolve_conj().resolve_neg() for name, view in views.items()}
        assert tag.sleep() is None
        for name, view in views.items():
            assert torch.equal(runtime.read(view), wanted[name]), name


class Marked(torch.Tensor):
    """A subclass, which may mean anything by its bytes."""


NOT_PLAIN = {
    "qint8": lambda block: torch.quantize_per_tensor(block, 0.1, 0, torch.qint8),
    "Marked": lambda block: block.as_subclass(Marked),
    "sparse": lambda block: block.to_sparse(),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_bytes_alone_do_not_define_is_not_read(runtime, name):
    with runtime.tag("weights") as tag:
        with tag.collect():
            tensor = NOT_PLAIN[name](a_block())
        tag.sleep()
        with pytest.raises(dormouse.ArgumentError, match=f"{name}.* accepted: "):
            runtime.read(tensor)
        tag.wake()


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_weights_and_optimizer_state_sleep_between_steps(runtime, tier):
    """Steps around a sleep give the bits of steps without one, at unchanged addresses."""
    awake = module()
    awake_optimizer = torch.optim.AdamW(awake.parameters(), lr=1e-2)
    with runtime.tag("weights") as weights, runtime.tag("optimizer") as moments:
        with weights.collect():
            model = module()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(awake, awake_optimizer, 0)
        with moments.collect():
            step(model, optimizer, 0)
        addresses = [each.data_ptr() for each in held(model, optimizer)]
        for seed in range(1, 4):
            before = copies(held(model, optimizer))
            assert weights.sleep(tier) is None
            assert moments.sleep(tier) is None
            stats = runtime.stats()
            # Two weights, and two moments of each.
            assert stats["asleep"]["current_bytes"] >= 6 * WEIGHT_BYTES
            assert stats["tiers"][tier]["current_bytes"] >= 6 * WEIGHT_BYTES
            assert state(runtime, model[0].weight) == tier
            moments.wake()
            weights.wake()
            assert runtime.stats()["asleep"]["current_bytes"] == 0
            assert [each.data_ptr() for each in held(model, optimizer)] == addresses
            assert all(map(torch.equal, held(model, optimizer), before))
            step(model, optimizer, seed)
            step(awake, awake_optimizer, seed)
        assert all(map(torch.equal, held(model, optimizer), held(awake, awake_optimizer)))


def test_what_exists_already_is_added(runtime):
    model = module()
    wanted = copies(model.parameters())
    with runtime.tag("weights") as tag:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                tag.add(parameter)
                tag.add(parameter.t()[3:])  # a view is its storage; twice is once
        assert tag.sleep() is None
        assert state(runtime, model[2].weight) == "nvme"
        tag.wake()
    assert all(map(torch.equal, model.parameters(), wanted))


def test_without_backup_memory_comes_back_zeroed(runtime):
    with runtime.tag("cache", backup=False) as tag:
        with tag.collect():
            cache = torch.ones(WIDTH, WIDTH)
        address = cache.data_ptr()
        for value in (1.0, 2.0):
            cache.fill_(value)
            written = runtime.stats()["copies"]
            assert tag.sleep() is None
            assert state(runtime, cache) == "empty"
            assert runtime.stats()["copies"] == written, "nothing is copied"
            tag.wake()
            assert cache.data_ptr() == address
            assert not cache.any()
        assert state(runtime, cache) == "awake"


def test_what_was_there_is_not_in_the_tag(runtime):
    before = a_block(1)
    with runtime.tag("weights") as tag:
        with tag.collect():
            inside = a_block(2)
        after = a_block(3)
        assert tag.sleep() is None
        states = [state(runtime, each) for each in (before, inside, after)]
        assert states == ["awake", "nvme", "awake"]
        assert torch.equal(before, a_block(1)) and torch.equal(after, a_block(3))
        tag.wake()
        assert torch.equal(inside, a_block(2))


def test_the_innermost_tag_has_it(runtime):
    with runtime.tag("outer") as outer, runtime.tag("inner") as inner:
        with outer.collect():
            first = a_block(1)
            with inner.collect():
                second = a_block(2)
            third = a_block(3)
        assert inner.sleep() is None
        assert [state(runtime, each) for each in (first, second, third)] == [
            "awake",
            "nvme",
            "awake",
        ]
        assert outer.sleep() is None
        inner.wake()
        assert [state(runtime, each) for each in (first, second, third)] == [
            "nvme",
            "awake",
            "nvme",
        ]
        assert torch.equal(second, a_block(2))
        outer.wake()
        assert torch.equal(first, a_block(1)) and torch.equal(third, a_block(3))


def test_a_tag_is_entered_twice_and_not_closed_inside(runtime):
    with runtime.tag("weights") as tag:
        with tag.collect(), tag.collect():
            first = a_block(1)
            with pytest.raises(dormouse.StateError, match="entered 2 times"):
                tag.close()
        assert tag.sleep() is None
        assert tag.sleep() is None, "asleep already"
        tag.wake()
        tag.wake()
        assert torch.equal(first, a_block(1))


def test_an_exception_inside_leaves_the_tag(runtime):
    with runtime.tag("weights") as tag:
        with pytest.raises(ZeroDivisionError), tag.collect():
            raise ZeroDivisionError
        outside = a_block()
        assert tag.sleep() is None
        assert state(runtime, outside) == "awake"


def test_a_name_is_used_again_once_it_is_free(runtime):
    with runtime.tag("weights"), pytest.raises(dormouse.ArgumentError, match="not in use"):
        runtime.tag("weights")
    block = a_block(4)
    for _ in range(2):
        with runtime.tag("weights") as tag:
            tag.add(block)
            assert tag.sleep() is None
        # A tag that ends wakes what sleeps.
        assert state(runtime, block) == "awake"
        assert torch.equal(block, a_block(4))


@alone
def test_a_tag_that_is_lost_asleep_without_room_ends_once_there_is_some():
    """An error while memory is full loses the only handle of a tag that sleeps."""
    mib = 1 << 20
    settings = {"nvme_file_bytes": 256 * mib, "alloc_budget_bytes": 96 * mib}
    NVME_DIR.mkdir(parents=True, exist_ok=True)
    with dormouse.Runtime(nvme_dir=NVME_DIR, **settings) as runtime:
        for end_with in (lambda: runtime.tag("weights").close(), runtime.close):
            tag = runtime.tag("weights")
            with tag.collect():
                block = torch.arange(60 * mib // 8)
            assert tag.sleep() is None
            other = torch.zeros(70 * mib, dtype=torch.uint8)
            with pytest.raises(ZeroDivisionError), tag:
                raise ZeroDivisionError
            del tag
            del other
            assert state(runtime, block) == "nvme"
            end_with()
            if end_with != runtime.close:
                assert state(runtime, block) == "awake"
                assert runtime.stats()["stray_wakes"] == 0
            assert torch.equal(block[::512], torch.arange(0, len(block), 512))
            del block


def test_a_block_has_one_tag(runtime):
    block = a_block()
    with runtime.tag("first") as first, runtime.tag("second") as second:
        first.add(block)
        with pytest.raises(dormouse.StateError, match="belongs to region"):
            second.add(block)


def test_what_is_freed_asleep_leaves_nothing(runtime):
    before = runtime.stats()
    with runtime.tag("weights") as tag:
        with tag.collect():
            block = a_block()
        assert tag.sleep() is None
        del block
        after = runtime.stats()
        assert after["asleep"]["current_bytes"] == before["asleep"]["current_bytes"]
        assert after["tiers"]["nvme"] | {"peak_bytes": 0} == before["tiers"]["nvme"] | {
            "peak_bytes": 0
        }


NOT_OURS = {
    "small": lambda: torch.ones(8),
    "mapped": lambda: torch.frombuffer(mmap.mmap(-1, WEIGHT_BYTES), dtype=torch.uint8),
    "shared": lambda: torch.ones(WIDTH, WIDTH).share_memory_(),
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_memory_that_is_not_ours_is_refused(runtime, name):
    tensor = NOT_OURS[name]()
    with runtime.tag("weights") as tag:
        with pytest.raises(dormouse.MemoryTierError, match="no live block"):
            tag.add(tensor)
        assert tag.sleep() is None


def test_tensors_without_memory_are_refused(runtime):
    with runtime.tag("weights") as tag, pytest.raises(dormouse.ArgumentError, match="ptr"):
        tag.add(torch.empty(0))


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_another_tier_is_refused_by_name(runtime, tier):
    with runtime.tag("weights") as tag, pytest.raises(dormouse.ArgumentError, match="accepted"):
        tag.sleep(tier)
    with pytest.raises(dormouse.ArgumentError, match="accepted"):
        runtime.set_budget("disk", 1)


@alone
def test_what_finds_no_place_stays_awake_and_says_so():
    with a_runtime() as runtime:
        runtime.set_budget("nvme", WEIGHT_BYTES + (64 << 10))
        with runtime.tag("weights") as tag:
            with tag.collect():
                blocks = [a_block(seed) for seed in range(2)]
            stayed = tag.sleep("nvme")
            assert "weights" in stayed and stayed.is_partial
            assert sorted(state(runtime, each) for each in blocks) == ["awake", "nvme"]
            tag.wake()
            assert all(torch.equal(each, a_block(seed)) for seed, each in enumerate(blocks))
            runtime.set_budget("nvme", 64 << 10)
            stayed = tag.sleep("nvme")
            assert "weights" in stayed and not stayed.is_partial
            assert all(state(runtime, each) == "awake" for each in blocks)
            runtime.set_budget("nvme", 0)
            with pytest.raises(dormouse.MemoryTierError, match="closed"):
                tag.sleep("nvme")
            assert tag.sleep("host") is None
            tag.wake()
            assert all(torch.equal(each, a_block(seed)) for seed, each in enumerate(blocks))


def test_no_interrupt_leaves_a_thread_inside_a_tag(runtime):
    """Else all that it allocates from then on would sleep with the tag."""

    class Cut(BaseException):
        pass

    armed = False

    def cut(*_):
        # Another thread may take the signal and tell this one after the timer was stopped.
        if armed:
            raise Cut

    before = signal.signal(signal.SIGALRM, cut)
    cuts = 0
    try:
        with runtime.tag("cut short") as tag:
            for attempt in range(4000):
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + attempt % 50))
                    with tag.collect():
                        pass
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Cut:
                    cuts += 1
                armed = False
                with pytest.raises(dormouse.DormouseError):
                    native.call("tag_leave", tag._handle)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert cuts > 0


def test_collection_at_the_interpreters_exit_is_silent(runtime, monkeypatch):
    """The names of the module are None by then."""
    tag = dormouse.Tag(runtime, "left")
    with monkeypatch.context() as exiting:
        for name in ("contextlib", "native"):
            exiting.setattr(f"dormouse.runtime.{name}", None)
        tag.__del__()
    tag.close()
