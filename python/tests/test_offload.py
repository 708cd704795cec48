"""dormouse.offload: a step's saved activations sleep; loss and gradients stay the same bits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import NVME_DIR, WINDOW_LAYERS
from hooked import ALONE_SECONDS_MAX
from models import tiny
from test_sleep import ASLEEP_WAIT_S, nvme_fd
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dormouse
from dormouse import ArgumentError, StateError

ROWS, WIDTH, LAYERS = 1024, 256, 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """Blocks in a list. ``order``: of their calls."""

    def __init__(self, layers: int = LAYERS, order=None, use_reentrant: bool | None = None):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.order = order or range(layers)
        self.use_reentrant = use_reentrant
        self.hidden = []

    def forward(self, x):
        for at in self.order:
            block = self.blocks[at]
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def seeded(make=Net, *args, **named) -> nn.Module:
    torch.manual_seed(1)
    return make(*args, **named).train()


def rows(seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()


def step(model, x=None, between=lambda out: None):
    """Returns the loss and all gradients of a step."""
    torch.manual_seed(3)
    x = rows() if x is None else x
    out = model(x)
    between(out)
    loss = out.square().mean()
    del out
    loss.backward()
    return loss.detach(), *gradients(model)


def gradients(model) -> list[torch.Tensor | None]:
    found = [each.grad for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def same(a, b) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def share(report) -> float:
    """The part of the saved bytes outside the last layers that may sleep. In place a busy disk may
    not have all of it before backward begins."""
    outside = report.saved_bytes - report.window_bytes
    return report.prefix.get("dormant_bytes", report.asleep_bytes) / outside


def left(runtime) -> int:
    gc.collect()
    stats = runtime.stats()
    tiers = stats["tiers"]
    return stats["asleep"]["current_bytes"] + sum(
        tiers[name]["current_bytes"] for name in ("host", "nvme")
    )


WAYS = pytest.mark.parametrize("in_place", [True, False])


@WAYS
def test_a_step_is_the_plain_one_bit_for_bit(runtime, in_place):
    model = seeded()
    plain = step(model)
    with dormouse.offload(model, runtime, in_place=in_place) as off:
        for forwards in (1, 2):
            assert same(step(model), plain)
            report = off.report()
            assert report.forwards == forwards and report.layer_calls == LAYERS
            # By copy, masks of dropout are smaller than what leaves.
            assert (0.9 if in_place else 0.8) <= share(report) <= 1.05
            assert 0 < report.window_bytes < report.saved_bytes
            assert report.stray_wakes == 0
    assert left(runtime) == 0


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_language_model_of_transformers(runtime, use_reentrant):
    model = tiny(
        dtype=torch.float32,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        head_dim=32,
        num_hidden_layers=LAYERS,
        attention_dropout=0.1,
    ).train()
    if use_reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    ids = torch.randint(0, 97, (2, 300), generator=torch.Generator().manual_seed(0))

    def run():
        torch.manual_seed(3)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), *gradients(model)

    plain = run()
    with dormouse.offload(model, runtime) as off:
        assert same(run(), plain)
    report, input_bytes = off.report(), ids.numel() * 256 * 4
    assert report.stray_wakes == 0
    if use_reentrant is None:
        assert share(report) >= 0.9
    else:
        # The input of the first layer was made before it.
        assert report.prefix["dormant_bytes"] == (LAYERS - WINDOW_LAYERS) * input_bytes


def test_memory_is_gone_between_forward_and_backward(runtime):
    model = seeded()
    plain = step(model)
    with dormouse.offload(model, runtime) as off:
        step(model)
        most_bytes = off.report().prefix["dormant_bytes"]
        assert most_bytes > 16 << 20

        def wait(out):
            # A forward whose graph is alive is not in the report.
            assert off.report().forwards == 1
            sleep_until(runtime, most_bytes)

        assert same(step(model, between=wait), plain)
    report = off.report()
    assert report.asleep_bytes == report.file_bytes == most_bytes
    assert report.asleep_share == share(report) >= 0.9
    assert left(runtime) == 0


def sleep_until(runtime, asleep_bytes: int) -> None:
    deadline = time.monotonic() + ASLEEP_WAIT_S
    while runtime.stats()["asleep"]["current_bytes"] < asleep_bytes:
        assert time.monotonic() < deadline, runtime.stats()["asleep"]
        time.sleep(0.001)


@WAYS
def test_several_forwards_and_backwards_in_one_context(runtime, in_place):
    model = seeded()

    def accumulate():
        torch.manual_seed(3)
        for seed in range(3):
            model(rows(seed)).square().mean().backward()
        return gradients(model)

    def pairs():
        """Two forwards for one loss, and an evaluation between them."""
        torch.manual_seed(3)
        one = model(rows(4))
        with torch.no_grad():
            model(rows(5))
        (one - model(rows(6))).square().mean().backward()
        return gradients(model)

    plain = accumulate(), pairs()
    with dormouse.offload(model, runtime, in_place=in_place) as off:
        assert same(accumulate(), plain[0])
        assert same(pairs(), plain[1])
    assert off.report().forwards == 5
    assert off.report().stray_wakes == 0
    assert left(runtime) == 0


@WAYS
def test_nothing_sleeps_without_a_graph(runtime, in_place):
    model = seeded()
    before = runtime.stats()["copies"]
    with dormouse.offload(model, runtime, in_place=in_place) as off, torch.no_grad():
        model(rows())
    assert off.report().forwards == 0
    assert runtime.stats()["copies"] == before


@WAYS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_have_their_inputs_asleep(runtime, use_reentrant, in_place):
    model = seeded(use_reentrant=use_reentrant)
    plain = step(model)
    with dormouse.offload(model, runtime, in_place=in_place) as off:
        assert same(step(model), plain)
        assert same(step(model), plain)
    report, input_bytes = off.report(), ROWS * WIDTH * 4
    # The input of the first layer was made before it. What reentrant checkpoints save counts as the
    # layer's, though an input is memory of the layer before: by copy there is one less.
    fewer = not in_place and use_reentrant
    got = report.prefix["dormant_bytes"] if in_place else report.asleep_bytes
    assert got == (LAYERS - WINDOW_LAYERS - fewer) * input_bytes
    assert report.stray_wakes == 0
    assert left(runtime) == 0


@pytest.mark.filterwarnings("ignore:dormouse.offload")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_the_model_is_run_again_awake(runtime, use_reentrant):
    """Backward follows at once. Only the first run of it has a graph, or none."""
    model = seeded()

    def around(x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    around.parameters, around.zero_grad = model.parameters, model.zero_grad
    plain = step(around)
    with dormouse.offload(model, runtime) as off:
        assert same(step(around), plain)
    assert off.report().forwards == (not use_reentrant)
    assert off.report().saved_bytes == 0


@WAYS
def test_layers_that_are_called_twice(runtime, in_place):
    order = [0, 1, 2, 0, 1, 2, 2, 1, 0]
    model = seeded(layers=3, order=order)
    plain = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with dormouse.offload(model, runtime, in_place=in_place) as off:
            # The first forward tells how many calls there are.
            assert same(step(model), plain)
            assert same(step(model), plain)
    report = off.report()
    assert report.layer_calls == len(order)
    assert share(report) >= 0.8
    assert report.stray_wakes == 0


def test_a_sequential_of_blocks_and_chosen_layers(runtime):
    model = seeded(lambda: nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)))
    plain = step(model)
    for layers in (None, list(model)[:-1]):
        with dormouse.offload(model, runtime, layers=layers) as off:
            assert same(step(model), plain)
        assert share(off.report()) >= 0.9


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Block() for _ in range(9)])


def test_the_default_is_the_outermost_list_of_layers(runtime):
    model = seeded(lambda: nn.ModuleDict({"layers": nn.ModuleList([Experts() for _ in range(4)])}))
    assert dormouse.offload(model, runtime)._layers == list(model["layers"])


def test_distributed_data_parallel(runtime, tmp_path):
    model = seeded()
    plain = step(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        with dormouse.offload(wrapped, runtime) as off:
            assert same(step(wrapped), plain)
        assert share(off.report()) >= 0.9
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("where", ["before", "inside"])
def test_what_the_caller_holds_stays_awake(runtime, where):
    """A hook keeps hidden states, and the trainer reads them before backward."""
    model = seeded()
    kept = []
    for block in model.blocks[:4]:
        block.up.register_forward_hook(lambda module, args, out: kept.append(out))

    def read(out):
        return sum(float(each.detach().sum()) for each in kept)

    plain = step(model)
    kept.clear()
    with dormouse.offload(model, runtime) as off:
        assert same(step(model, between=read), plain)
        if where == "inside":
            kept.clear()
    kept.clear()
    report = off.report()
    assert report.stray_wakes == 0
    # Of each of the four layers what the hook kept is a quarter or more.
    assert 0 < share(report) < 0.8


class Skipping(nn.Module):
    """Each block's input is read by the block after it too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([SkipBlock() for _ in range(LAYERS)])

    def forward(self, x):
        before = x
        for block in self.blocks:
            x, before = block(x, before), x
        return x


class SkipBlock(Block):
    def forward(self, x, before):
        return super().forward(x.sin()) + before.cos()


def test_what_a_layer_after_the_next_one_saves_stays_awake(runtime):
    """Its backward waits for its own layer and for the one below alone."""
    model = seeded(Skipping)
    plain = step(model)
    outputs = []
    for block in model.blocks[:2]:
        block.register_forward_hook(lambda module, args, out: outputs.append(out.data_ptr()))
    roles = []

    def look(out):
        roles.extend(runtime.query(address)["role"] for address in outputs)

    with dormouse.offload(model, runtime) as off:
        assert same(step(model, between=look), plain)
    assert roles == ["none", "none"]
    assert off.report().stray_wakes == 0
    assert share(off.report()) > 0.6


def test_casts_that_autocast_reuses_stay_awake(runtime):
    model = seeded()

    def run():
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [model(rows(seed)).float().square().mean() for seed in range(2)]
        sum(losses).backward()
        return gradients(model)

    plain = run()
    with dormouse.offload(model, runtime) as off:
        assert same(run(), plain)
    assert off.report().stray_wakes == 0
    assert off.report().prefix["dormant_bytes"] > 4 << 20


@WAYS
def test_backward_after_the_context_and_twice(runtime, in_place):
    model = seeded()

    def run(around):
        torch.manual_seed(3)
        with around:
            loss = model(rows()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    plain = run(warnings.catch_warnings())
    off = dormouse.offload(model, runtime, in_place=in_place)
    assert same(run(off), plain)
    assert share(off.report()) >= 0.8
    assert left(runtime) == 0


@WAYS
def test_gradients_of_some_layers_first(runtime, in_place):
    """The first backward ends at a layer in the middle; the second one wakes the rest."""
    model = seeded()

    def run():
        torch.manual_seed(3)
        loss = model(rows()).square().mean()
        first = torch.autograd.grad(loss, list(model.blocks[4].parameters()), retain_graph=True)
        loss.backward()
        return [*first, *gradients(model)]

    plain = run()
    with dormouse.offload(model, runtime, in_place=in_place) as off:
        assert same(run(), plain)
    assert off.report().stray_wakes == 0
    assert left(runtime) == 0


class EarlyExit(Net):
    """Returns the output of a block in the middle too."""

    def forward(self, x):
        for at, block in enumerate(self.blocks):
            x = block(x)
            if at == 3:
                early = x
        return x, early


@WAYS
def test_the_loss_of_an_early_exit_first(runtime, in_place):
    """Its backward begins in the middle; the second one reads the layers above."""
    model = seeded(EarlyExit, layers=12)

    def run(between=lambda: None):
        torch.manual_seed(3)
        out, early = model(rows())
        loss, aside = out.square().mean(), early.square().mean()
        del out, early
        between()
        aside.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    plain = run()
    with dormouse.offload(model, runtime, in_place=in_place) as off:
        assert same(run(), plain)
        if in_place:
            most_bytes = off.report().prefix["dormant_bytes"]
            assert same(run(lambda: sleep_until(runtime, most_bytes)), plain)
    assert off.report().stray_wakes == 0
    assert left(runtime) == 0


@WAYS
def test_gradients_of_gradients(runtime, in_place):
    model = seeded(layers=LAYERS)

    def run():
        torch.manual_seed(3)
        x = rows()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()
        return gradients(model)

    plain = run()
    with dormouse.offload(model, runtime, in_place=in_place):
        assert same(run(), plain)
    assert left(runtime) == 0


@WAYS
def test_a_change_of_what_was_saved_is_the_error_of_autograd(runtime, in_place):
    model = seeded()
    kept = []
    model.blocks[1].up.register_forward_hook(lambda module, args, out: kept.append(out))
    with dormouse.offload(model, runtime, in_place=in_place):
        loss = model(rows()).square().mean()
        with torch.no_grad():
            kept.pop().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_changed_byte_is_an_error_and_never_a_wrong_gradient(runtime):
    model = seeded()
    plain = step(model)

    def damage(out):
        sleep_until(runtime, most_bytes)
        fd = nvme_fd()
        with Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as file:
            for offset in range(0, min(os.fstat(fd).st_size, 64 << 20), 4096):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x40]))

    with dormouse.offload(model, runtime) as off:
        step(model)
        most_bytes = off.report().prefix["dormant_bytes"]
        with pytest.raises(dormouse.StorageError, match="(?i)checksum|crc"):
            step(model, between=damage)
        model.zero_grad(set_to_none=True)
        assert same(step(model), plain)
    assert left(runtime) == 0


def test_another_threads_forward_meanwhile(runtime):
    model, other = seeded(), seeded()
    plain = step(model)
    results = []

    def evaluate(out):
        thread = threading.Thread(target=lambda: results.append(model(rows(9)).sum().backward()))
        state = torch.get_rng_state()
        gradients_before = [each.grad for each in model.parameters()]
        thread.start()
        thread.join()
        assert all(each is None for each in gradients_before)
        model.zero_grad(set_to_none=True)
        torch.set_rng_state(state)

    with dormouse.offload(model, runtime) as off:
        assert same(step(model, between=evaluate), plain)
        assert results == [None]
        # Another model in the context is no forward of it.
        other(rows()).sum().backward()
    assert off.report().forwards == 1


def test_nothing_that_can_sleep_is_one_warning_that_says_why(runtime):
    model = seeded(layers=3)
    with (
        pytest.warns(RuntimeWarning, match="the last 3 stay awake; use more layers") as caught,
        dormouse.offload(model, runtime),
    ):
        step(model)
        step(model)
        gc.collect()
    assert len(caught) == 1

    model = seeded()
    with (
        pytest.warns(RuntimeWarning, match="below the smallest size that sleeps; use larger"),
        dormouse.offload(model, runtime),
    ):
        model(rows()[:4]).sum().backward()

    info = runtime.info()
    try:
        runtime.set_budget("nvme", 0)
        runtime.set_budget("host", 0)
        with (
            pytest.warns(RuntimeWarning, match="no tier is open .* pass nvme_dir="),
            dormouse.offload(model, runtime),
        ):
            step(model)
    finally:
        runtime.set_budget("nvme", info["nvme_file_bytes"])
        runtime.set_budget("host", info["host_budget_bytes"])

    model = seeded()
    with (
        pytest.warns(RuntimeWarning, match="hooks entered inside, .* enter hooks") as caught,
        dormouse.offload(model, runtime),
        torch.autograd.graph.save_on_cpu(),
    ):
        step(model)
        step(model)
        gc.collect()
    assert len(caught) == 1

    class Around(nn.Module):
        """Reaches its layers by their ``forward``, so that no hook sees them."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x):
            for block in self.blocks:
                x = block.forward(x)
            return x

    model = seeded(Around)
    with (
        pytest.warns(RuntimeWarning, match="no layer ran in a call of the model"),
        dormouse.offload(model, runtime),
    ):
        model(rows()).sum().backward()


def without_preload():
    """Runs in a process of its own, with dormouse installed and no runtime named."""
    torch.set_num_threads(1)
    model = seeded()
    plain = step(model)
    dormouse.install("host", nvme_dir=NVME_DIR, nvme_file_bytes=1 << 28)
    with dormouse.offload(model) as off:
        assert same(step(model), plain)
    report = off.report()
    assert (report.way, report.forwards) == ("by copy", 1)
    assert share(report) >= 0.8
    with pytest.raises(ArgumentError, match="in_place=True is not possible: .*LD_PRELOAD"):
        dormouse.offload(model, in_place=True)


def test_a_process_without_the_preload_library_copies(runtime):
    here = Path(__file__).resolve().parent
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent)])
    code = "import test_offload; test_offload.without_preload()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=ALONE_SECONDS_MAX,
    )
    assert done.returncode == 0, done.stderr


def test_refusals(runtime):
    model = seeded()
    with pytest.raises(ArgumentError, match=r"Block has no ModuleList .* accepted: layers="):
        dormouse.offload(model.blocks[0], runtime)
    with pytest.raises(ArgumentError, match="a Block is not inside the model"):
        dormouse.offload(model, runtime, layers=[Block()])
    with pytest.raises(ArgumentError, match="a Net is not inside the model"):
        dormouse.offload(model, runtime, layers=[model])
    with pytest.raises(ArgumentError, match="layers has 2 entries and 1 modules"):
        dormouse.offload(model, runtime, layers=[model.blocks[0]] * 2)
    with pytest.raises(ArgumentError, match="a Linear is inside a Block"):
        dormouse.offload(model, runtime, layers=[model.blocks[0], model.blocks[0].up])
    with pytest.raises(ArgumentError, match="parameters on meta; accepted: all on cpu"):
        dormouse.offload(seeded().to("meta"), runtime)
    with pytest.raises(StateError, match=r"no runtime: .* accepted: offload\(model, runtime="):
        dormouse.offload(model)
    with (
        dormouse.offload(model, runtime),
        pytest.raises(StateError, match="in another dormouse.offload context"),
        dormouse.offload(model, runtime),
    ):
        pass
    model.blocks[2] = torch.compile(model.blocks[2])
    with (
        pytest.raises(ArgumentError, match=r"blocks\.2 is compiled by torch.compile"),
        dormouse.offload(model, runtime),
    ):
        pass
