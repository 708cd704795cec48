"""Saved tensors that wait outside: the same gradients bit for bit, and each storage moved once."""

from __future__ import annotations

import threading

import pytest
import torch
from hooked import ROWS, STORAGE_BYTES, gradient, matrix, moved, on, same_bits, stashed_bytes
from models import dense_backward, group, loss_fn, take_gradients, tiny
from torch.multiprocessing.reductions import StorageWeakRef

from dormouse.modes.copying import SavedTensorOffload

ROW = 1 / ROWS
# More than an allocator has free places of one size.
ATTEMPTS_MAX = 1000


def twice(view, other):
    """One storage saved in two views of it."""

    def make(x):
        doubled = 2 * x
        return view(doubled) @ other(doubled)

    return make


def counted_apart(x):
    """Parts of one storage, each with a counter of changes of its own, at the same count."""
    above, below = torch.unsafe_split(2 * x, ROWS // 2)
    above.mul_(2)
    squares = above * above
    below.mul_(3)
    return torch.cat([squares, below * below])


# What is saved, and how many matrices it is.
SAVES = {
    "two storages": (lambda x: (2 * x) * (3 * x), 2),
    "one storage twice by one operation": (twice(lambda a: a, lambda a: a), 1),
    # Same address, type and shape: only the strides tell the two apart.
    "a square and its transpose": (twice(lambda a: a, lambda a: a.t()), 1),
    "part of a transpose": (lambda x: (2 * x).t() @ (3 * x)[:, 5:], 2),
    "an offset": (twice(lambda a: a[5:, 7:], lambda a: a[7:, 11:]), 1),
    "overlapping views": (lambda x: (lambda a: a[:40] * a[24:])(2 * x), 1),
    "windows that overlap themselves": (
        lambda x: (lambda a: a.unfold(0, 5, 1) * a.unfold(0, 5, 1).exp())(2 * x),
        1 + 5 * (ROWS - 4) * ROW,
    ),
    "a broadcast row": (lambda x: (x[:1] * 2).expand(ROWS, ROWS) * (3 * x), 1 + ROW),
    "a broadcast number": (
        lambda x: (x.sum() * 2).expand(ROWS, ROWS) * (3 * x),
        1 + ROW * ROW,
    ),
    "an operation's own result": (lambda x: (2 * x).exp().tanh(), 2),
    "a result and its input": (lambda x: (2 * x).pow(2) + (2 * x).exp(), 2),
    "steps in both directions": (
        lambda x: torch.nn.functional.softmax(2 * x, -1)[::3, ::2].cumprod(-1),
        None,
    ),
    "another type on the same storage": (
        lambda x: torch.view_as_complex((2 * x).view(ROWS, -1, 2)).abs(),
        None,
    ),
    "half as wide": (lambda x: (lambda a: a * a.flip(0))((2 * x).bfloat16()), 1),
    "parts that are counted apart": (counted_apart, 2),
    "nothing": (lambda x: (2 * x)[:0].exp().sum() + (3 * x).sin().sum(), 1),
    # Views that say "conjugated" and "negated" beside where their elements lie.
    "a conjugate": (
        lambda x: (torch.complex(2 * x, 3 * x).conj() * torch.complex(x, x)).real,
        None,
    ),
    "a negative": (lambda x: torch.complex(2 * x, 3 * x).conj().imag * (5 * x), None),
}


@pytest.mark.parametrize("name", SAVES)
def test_gradients_are_the_same_bits(runtime, name):
    make, storages = SAVES[name]
    before = stashed_bytes(runtime)
    seen = same_bits(runtime, make)
    assert seen.out > 0
    if storages is not None:
        assert seen.out == storages * STORAGE_BYTES, "each storage once"
    assert seen.back == seen.out, "and once back"
    assert stashed_bytes(runtime) == before


def model_step(model, case, loss=loss_fn) -> dict[str, torch.Tensor]:
    dense_backward(model, case, loss)
    return take_gradients(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model(runtime, kind):
    model, case = tiny(kind, dtype=torch.float32), group()
    awake = model_step(model, case)
    before, waiting = stashed_bytes(runtime), []

    def loss(logits, labels, i):
        waiting.append(stashed_bytes(runtime) - before)
        return loss_fn(logits, labels, i)

    with SavedTensorOffload(runtime, model.buffers(), min_bytes=1).hooks():
        copied = model_step(model, case, loss)
    assert min(waiting) > 0
    assert awake.keys() == copied.keys()
    assert all(torch.equal(awake[name], copied[name]) for name in awake)
    assert stashed_bytes(runtime) == before


def test_many_steps_with_an_optimizer(runtime):
    """Weights change in place and addresses come again: no step may see another's copies."""

    def train(hooked: bool) -> list[torch.Tensor]:
        model = tiny(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        offload = SavedTensorOffload(runtime, model.buffers(), min_bytes=1)
        for seed in range(4):
            with offload.hooks() if hooked else torch.enable_grad():
                dense_backward(model, group(seed=seed))
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, train(hooked=True), train(hooked=False)))


def test_the_bytes_leave(runtime):
    """The graph holds neither the storage nor a copy of it in memory that is ours to count."""
    rows = 1024
    leaf = torch.linspace(-1, 1, rows * rows).requires_grad_()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        doubled = leaf * 2
        storage = StorageWeakRef(doubled.untyped_storage())
        out = (doubled * doubled).sum()
        held = runtime.stats()["allocated"]["current_bytes"]
        del doubled
    assert storage.expired()
    assert runtime.stats()["allocated"]["current_bytes"] <= held - 4 * rows * rows
    assert runtime.stats()["tiers"]["nvme"]["current_bytes"] >= 4 * rows * rows
    out.backward()


def test_views_come_back_on_one_storage(runtime):
    before = stashed_bytes(runtime)
    leaf = torch.ones(1 << 16, requires_grad=True)
    with SavedTensorOffload(runtime, min_bytes=0).hooks(), moved(runtime) as seen:
        doubled = leaf * 2
        out = (doubled[::2] * doubled[1::2]).sum()
        del doubled
    assert seen.out == leaf.nbytes
    node = out.grad_fn.next_functions[0][0]
    with moved(runtime) as seen:
        first, second, again = node._saved_self, node._saved_other, node._saved_self
    assert seen.back == leaf.nbytes
    addresses = {each.untyped_storage().data_ptr() for each in (first, second, again)}
    assert len(addresses) == 1
    assert first.stride() == second.stride() == again.stride() == (2,)
    assert [each.storage_offset() for each in (first, second, again)] == [0, 1, 0]
    del node, first, second, again, out
    assert stashed_bytes(runtime) == before


def test_saved_by_two_operations_is_moved_once_each_way(runtime):
    """The second reader comes when the first has let go of the bytes."""
    seen = same_bits(runtime, lambda x: (2 * x).exp().sin())
    assert (seen.out, seen.back) == (STORAGE_BYTES, STORAGE_BYTES)


def test_what_came_back_leaves_again(runtime):
    """With its last reader, though the graph and its copy are kept."""
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        doubled = 2 * leaf
        out = (doubled * doubled).sum()
        del doubled
    node = out.grad_fn.next_functions[0][0]
    storage = StorageWeakRef(node._saved_self.untyped_storage())
    assert not storage.expired(), "another reader is to come"
    assert node._saved_other.untyped_storage()._cdata == storage.cdata
    assert storage.expired()


def test_what_somebody_keeps_is_not_brought_back(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        kept = 2 * leaf
        out = (kept * kept).sum()
    with moved(runtime) as seen:
        assert out.grad_fn.next_functions[0][0]._saved_self.data_ptr() == kept.data_ptr()
        out.backward()
    assert seen.back == 0
    assert torch.equal(leaf.grad, gradient(lambda x: (2 * x) * (2 * x)))


def test_an_address_used_again_is_another_storage(runtime):
    """Tensors one after the other at one address, each of them saved."""
    leaf, offload, memory = (
        matrix(),
        SavedTensorOffload(runtime, min_bytes=0),
        bytearray(STORAGE_BYTES),
    )
    outs = []
    with offload.hooks():
        for factor in range(60):
            fixed = on(memory, factor)
            outs.append((leaf * fixed).sum())
            del fixed  # last, so that the next one gets its place among torch's objects too
    for factor, out in enumerate(outs):
        (copied,) = torch.autograd.grad(out, leaf)
        assert torch.equal(copied, torch.full_like(leaf, factor))


def test_memory_given_up_and_taken_anew_is_another_storage(runtime):
    """A storage that is resized to nothing and filled again, as sharded parameters are."""
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks(), moved(runtime) as seen:
        gathered = torch.full((ROWS, ROWS), 2.0)
        storage = gathered.untyped_storage()
        address = storage.data_ptr()
        first = leaf * gathered
        others = []  # until one has the old memory, so that the new is elsewhere
        while storage.data_ptr() in (0, address):
            storage.resize_(0)
            others.append(torch.empty(ROWS, ROWS))
            storage.resize_(STORAGE_BYTES)
            assert len(others) < ATTEMPTS_MAX
        with torch.autograd._unsafe_preserve_version_counter(gathered):
            gathered.fill_(3.0)
        second = leaf * gathered
        storage.resize_(0)
    assert seen.out == 2 * STORAGE_BYTES
    first.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2))
    leaf.grad = None
    second.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 3))


def test_memory_taken_anew_at_its_old_address_is_another_storage(runtime):
    leaf = torch.ones(1 << 15, requires_grad=True)
    with SavedTensorOffload(runtime, min_bytes=0).hooks(), moved(runtime) as seen:
        elsewhere = []  # kept, so that the next attempt does not find the same place
        for _ in range(ATTEMPTS_MAX):
            gathered = torch.full_like(leaf, 2.0, requires_grad=False)
            most, storage = gathered[:-16], gathered.untyped_storage()
            address = storage.data_ptr()
            first = leaf * gathered
            storage.resize_(0)
            storage.resize_(most.nbytes)
            if storage.data_ptr() == address:
                break
            elsewhere.append(storage)
        assert storage.data_ptr() == address
        with torch.autograd._unsafe_preserve_version_counter(most):
            most.fill_(3.0)
        second = leaf[:-16] * most
    assert seen.out == (len(elsewhere) + 1) * leaf.nbytes + most.nbytes
    second.sum().backward()
    assert leaf.grad[:-16].eq(3).all()
    leaf.grad = None
    first.sum().backward()
    assert leaf.grad.eq(2).all()


def test_a_graph_can_be_walked_twice(runtime):
    leaf = matrix()
    before = stashed_bytes(runtime)
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        out = (leaf * 2).pow(3).sum()
    out.backward(retain_graph=True)
    first, leaf.grad = leaf.grad, None
    assert stashed_bytes(runtime) > before
    out.backward()
    assert torch.equal(first, leaf.grad)
    assert torch.equal(first, gradient(lambda x: (x * 2).pow(3)))
    assert stashed_bytes(runtime) == before


def test_gradients_of_gradients(runtime):
    def twice_over(hooks: bool) -> torch.Tensor:
        leaf = matrix()
        offload = SavedTensorOffload(runtime, min_bytes=0)
        with offload.hooks() if hooks else torch.enable_grad():
            out = (2 * leaf).sin().pow(3).sum()
            (first,) = torch.autograd.grad(out, leaf, create_graph=True)
            loss = (first * first).sum()
        loss.backward()
        return leaf.grad

    assert torch.equal(twice_over(hooks=True), twice_over(hooks=False))


class Leaks(torch.autograd.Function):
    """Hands out views of what it saved when its backward runs."""

    escaped: list[torch.Tensor] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        Leaks.escaped.append(x.t()[3:])
        return grad * x


def test_views_that_escape_stay_what_they_were(runtime):
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        out = Leaks.apply(2 * leaf)
    before = stashed_bytes(runtime)
    out.sum().backward()
    del out
    assert stashed_bytes(runtime) < before
    for _ in range(8):  # whatever reuses memory
        gradient(lambda x: (5 * x).exp(), SavedTensorOffload(runtime, min_bytes=0).hooks())
    assert torch.equal(Leaks.escaped.pop(), (2 * leaf.detach()).t()[3:])


def test_backward_on_other_threads(runtime):
    """Several at once, which share a storage."""
    leaf = matrix()
    with SavedTensorOffload(runtime, min_bytes=0).hooks():
        shared = 2 * leaf
        outs = [(shared * factor).sin().sum() + shared.exp().sum() for factor in range(1, 9)]
        del shared
    results = [None] * len(outs)

    def walk(i):
        (results[i],) = torch.autograd.grad(outs[i], leaf, retain_graph=True)

    threads = [threading.Thread(target=walk, args=(i,)) for i in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for factor, result in enumerate(results, 1):

        def plain(x, factor=factor):
            doubled = 2 * x
            return (doubled * factor).sin() + doubled.exp()

        assert torch.equal(result, gradient(plain))


def test_forward_on_another_thread_is_its_own(runtime):
    """Hooks are of the thread that entered them."""
    leaf, outs = matrix(), []
    with SavedTensorOffload(runtime, min_bytes=0).hooks(), moved(runtime) as seen:
        thread = threading.Thread(target=lambda: outs.append((2 * leaf).sin().sum()))
        thread.start()
        thread.join()
    assert seen.out == 0
    outs[0].backward()
    assert torch.equal(leaf.grad, gradient(lambda x: (2 * x).sin()))


def test_other_hooks_inside_take_over(runtime):
    packed = []

    def make(x):
        inner = torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(1) or t.clone(), lambda t: t
        )
        first = (2 * x).sin()
        with inner:
            second = (3 * x).sin()
        return first + second

    assert same_bits(runtime, make).out == STORAGE_BYTES
    assert packed


def test_hooks_inside_hooks_of_their_own(runtime):
    outer, inner = (
        SavedTensorOffload(runtime, min_bytes=0),
        SavedTensorOffload(runtime, min_bytes=1 << 30),
    )

    def make(x):
        doubled = 2 * x
        with inner.hooks(), moved(runtime) as seen:
            stays = doubled.sin()
        assert seen.out == 0
        return stays + doubled.exp()

    with moved(runtime) as seen:
        result = gradient(make, outer.hooks())
    assert seen.out == STORAGE_BYTES
    assert torch.equal(result, gradient(lambda x: (lambda a: a.sin() + a.exp())(2 * x)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_part(runtime, reentrant):
    def block(x):
        return (2 * x).sin().pow(3)

    def make(x):
        y = torch.utils.checkpoint.checkpoint(block, 3 * x, use_reentrant=reentrant)
        return (5 * y).exp()

    assert same_bits(runtime, make).out == 2 * STORAGE_BYTES, "its input, and exp's result"


def test_hooks_inside_a_checkpointed_part(runtime):
    offload = SavedTensorOffload(runtime, min_bytes=0)

    def block(hooked, x):
        with offload.hooks() if hooked else torch.enable_grad():
            return (2 * x).sin().pow(3)

    def make(hooked):
        return lambda x: torch.utils.checkpoint.checkpoint(
            block, hooked, 3 * x, use_reentrant=False
        )

    before = stashed_bytes(runtime)
    assert torch.equal(gradient(make(True)), gradient(make(False)))
    assert stashed_bytes(runtime) == before


def test_under_autocast(runtime):
    """Casts of weights are cached, and saved by several operations."""
    weight = torch.nn.Parameter(matrix().detach().clone())

    def make(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.nn.functional.linear(torch.nn.functional.linear(x, weight), weight)

    awake, cast = gradient(make), weight.grad.clone()
    weight.grad = None
    with moved(runtime) as seen:
        assert torch.equal(gradient(make, SavedTensorOffload(runtime, min_bytes=0).hooks()), awake)
    assert torch.equal(weight.grad, cast)
    # Two inputs and one weight, of two bytes an element.
    assert seen.out == 3 * STORAGE_BYTES / 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_function(runtime, backend):
    torch.compiler.reset()
    function = torch.compile(lambda x: (2 * x).sin() @ (3 * x).exp(), backend=backend)
    assert same_bits(runtime, function).out > 0
    torch.compiler.reset()


def test_hooks_inside_a_compiled_function(runtime):
    torch.compiler.reset()
    offload = SavedTensorOffload(runtime, min_bytes=0)

    def plain(x):
        return (2 * x).sin() @ (3 * x).exp()

    def hooked(x):
        with offload.hooks():
            return plain(x)

    result = gradient(torch.compile(hooked, backend="aot_eager"))
    assert torch.equal(result, gradient(plain))
    torch.compiler.reset()
