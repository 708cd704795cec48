"""Which attention kernel serves which call: measurements on the CPU, with clocks of the test."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from models import group, take_gradients
from test_sleep import identical, wide
from torch.nn.attention import SDPBackend, sdpa_kernel

from dormouse.hf import SharedPrefix, attention, attention_choices, log_probabilities, measured
from dormouse.hf.kernels import CpuFlash, CudaEfficient, Pieces, Plain, PlainPieces, Scores

SCORES = Scores(0.25)


class Fake:
    """A correct kernel with a name; ``changes``: of what it returns."""

    is_deterministic = True

    def __init__(self, name: str, **changes):
        self.name, self.calls = name, []
        self._changes = changes

    def is_enabled(self) -> bool:
        return True

    def serves(self, query, key, causal) -> bool:
        return True

    def forward(self, *args):
        self.calls.append("forward")
        return self._changes.get("forward", lambda *x: x)(*PlainPieces.forward(*args))

    def backward(self, *args):
        self.calls.append("backward")
        args = self._changes.get("given", lambda x: x)(args)
        grads = PlainPieces.backward(*args)
        return self._changes.get("backward", lambda *x: x)(*grads)


def tensors(rows=6, keys=None, batch=1, dtype=torch.float32, heads=(4, 2), width=8):
    generator = torch.Generator().manual_seed(5)
    shapes = [(batch, heads[0], rows, width)] + 2 * [(batch, heads[1], keys or rows, width)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def one_of(*kernels, seconds=()) -> measured.Measured:
    """``seconds``: what each timed measurement takes, in turn; each runs once."""
    taken = iter(seconds)

    def seconds_of(run, device) -> float:
        run()
        return next(taken, 1.0)

    return measured.Measured(kernels, seconds_of)


def refused(kernels: measured.Measured) -> dict[str, str]:
    (choice,) = kernels.choices.known().values()
    return choice.refused


def test_each_type_has_its_kernel():
    for device, dtype, kernel in (
        ("cpu", torch.bfloat16, CpuFlash),
        ("cpu", torch.float64, CpuFlash),
        ("cuda", torch.bfloat16, measured.MEASURED),
        ("cuda", torch.float16, measured.MEASURED),
        ("cuda", torch.float32, CudaEfficient),
        ("cuda", torch.float64, Plain),
    ):
        tensor = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        assert measured.kernel_for(tensor, SCORES) is kernel
        assert measured.kernel_for(tensor, SCORES._replace(softcap=5.0)) is Plain
        masked = CpuFlash if device == "cpu" else Plain
        assert measured.kernel_for(tensor, SCORES, torch.zeros(1)) is masked


def test_the_fastest_serves_forward_and_backward():
    slow, fast = Fake("slow"), Fake("fast")
    kernels = one_of(slow, fast, seconds=(2.0, 1.0))
    args = tensors()
    out, lse = kernels.forward(*args, True, SCORES)
    # A measurement compares once, and the clock runs it once.
    assert slow.calls == ["forward", "backward"] * 2
    assert fast.calls == ["forward", "backward"] * 2 + ["forward"]
    kernels.backward(out, *args, out, lse, True, SCORES)
    assert fast.calls[-1] == "backward"
    assert len(slow.calls) == 4


def test_a_backward_may_come_first():
    fast, slow = Fake("fast"), Fake("slow")
    kernels = one_of(slow, fast, seconds=(2.0, 1.0))
    args = tensors()
    out, lse = PlainPieces.forward(*args, True, SCORES)
    kernels.backward(out, *args, out, lse, True, SCORES)
    assert fast.calls[-1] == "backward" and len(fast.calls) == 5


def test_sizes_of_a_kind_are_rounded_up():
    kernels = one_of(Fake("one"))
    for rows in (1, 6, 256):
        kernels.forward(*tensors(rows), True, SCORES)
    assert len(kernels.choices.known()) == 1
    kernels.forward(*tensors(257), True, SCORES)
    kernels.forward(*tensors(512), True, SCORES)
    assert len(kernels.choices.known()) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 300},
        {"rows": 6, "keys": 300, "causal": False},
        {"causal": False},
        {"causal": Pieces((2, 4))},
        {"batch": 2},
        {"dtype": torch.bfloat16},
        {"heads": (4, 4)},
        {"heads": (2, 2)},
        {"width": 16},
    ],
)
def test_other_calls_are_other_kinds(other):
    kernels = one_of(Fake("one"))
    kernels.forward(*tensors(), True, SCORES)
    causal = other.pop("causal", True)
    kernels.forward(*tensors(**other), causal, SCORES)
    assert len(kernels.choices.known()) == 2
    assert all(choice.refused == {} for choice in kernels.choices.known().values())


def test_kinds_are_described():
    query, key, value = tensors(300, 700)
    kind = measured.kind_of(query, key, value[..., :4], False, ())
    assert str(kind) == "all keys, 1 × up to 512 rows × 1024 keys, 4/2 heads of 8/4, float32"
    kind = measured.kind_of(*tensors(700), Pieces((100, 600)), ())
    assert str(kind) == "pieces, 2 × up to 1024 rows × 1024 keys, 4/2 heads of 8/8, float32"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"forward": lambda out, lse: (out, lse / torch.tensor(2.0).log())}, "log-sum-exp"),
        ({"forward": lambda out, lse: (1.1 * out, lse)}, "output"),
        ({"forward": lambda out, lse: (out * torch.nan, lse)}, "output"),
        ({"backward": lambda q, k, v: (1.1 * q, k, v)}, "query gradient"),
        ({"backward": lambda q, k, v: (q, 1.1 * k, v)}, "key gradient"),
        ({"backward": lambda q, k, v: (q, k, 1.1 * v)}, "value gradient"),
        # A backward that computes the log-sum-exp again, and one that does so with the output.
        ({"given": lambda a: (*a[:5], a[5] - torch.tensor(2.0).log(), *a[6:])}, "query gradient"),
        ({"given": lambda a: (*a[:4], 2 * a[4], *a[5:])}, "query gradient"),
    ],
)
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_with_other_results_is_refused(changes, what, rows, dtype):
    """The fastest by far, and it serves no call."""
    wrong, right = Fake("wrong", **changes), Fake("right")
    kernels = one_of(wrong, right, seconds=(1.0,))
    args = tensors(rows, dtype=dtype)
    got = kernels.forward(*args, True, SCORES)
    wanted = PlainPieces.forward(*args, True, SCORES)
    assert all(map(torch.equal, got, wanted))
    if rows > 1:
        # One row of one key has little to tell apart: which result differs first may vary.
        assert refused(kernels)["wrong"].startswith(f"DiffersError: {what} differs")
    assert set(refused(kernels)) == {"wrong"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False, Pieces((5, 90, 33, 1))])
def test_kernels_that_round_otherwise_serve(dtype, causal):
    """Torch's on the CPU, whose order of sums and roundings is its own."""

    class Torch(Fake):
        def _each(self, tensors, causal, run):
            if not isinstance(causal, Pieces):
                return run(*tensors, causal)
            splits = (x.split(causal.lengths, 2) for x in tensors)
            parts = [run(*each, True) for each in zip(*splits, strict=True)]
            return [torch.cat(each, 2) for each in zip(*parts, strict=True)]

        def forward(self, query, key, value, causal, scores):
            run = lambda *args: CpuFlash.forward(*args, scores)  # noqa: E731
            return self._each((query, key, value), causal, run)

        def backward(self, *args):
            *args, causal, scores = args
            return self._each(args, causal, lambda *each: CpuFlash.backward(*each, scores))

    rows = sum(causal.lengths) if isinstance(causal, Pieces) else 129
    kernels = one_of(Torch("torch"))
    kernels.forward(*tensors(rows, dtype=dtype, width=64), causal, SCORES)
    assert refused(kernels) == {}


def test_when_all_refuse_matrix_products_serve():
    def cannot(*_):
        raise RuntimeError("head dimension 8")

    kernels = one_of(Fake("one", forward=cannot))
    for causal in (True, Pieces((2, 4))):
        got = kernels.forward(*tensors(), causal, SCORES)
        assert all(map(torch.equal, got, PlainPieces.forward(*tensors(), causal, SCORES)))


def test_measurements_are_laid_out_as_the_call_and_leave_it_alone():
    seen = []

    class Looking(Fake):
        def forward(self, *args):
            seen.append([(x.data_ptr(), x.shape, x.stride()) for x in args[:3]])
            return super().forward(*args)

    packed = tensors(12)
    args = [x[0].unflatten(1, (2, 6)).transpose(0, 1)[:, :, 1:] for x in packed]
    before, state = [x.clone() for x in packed], torch.get_rng_state()
    one_of(Looking("one"), seconds=(1.0,)).forward(*args, True, SCORES)
    measurements, call = seen[:-1], seen[-1]
    assert len(measurements) == 2
    for measurement in measurements:
        assert [each[1:] for each in measurement] == [each[1:] for each in call]
        assert not {each[0] for each in measurement} & {each[0] for each in call}
    assert all(map(torch.equal, packed, before))
    assert torch.equal(torch.get_rng_state(), state)


def test_measurements_keep_no_graph():
    args = [x.requires_grad_() for x in tensors()]
    got = []

    class Looking(Fake):
        def forward(self, *args):
            out, lse = super().forward(*args)
            got.append(out.requires_grad)
            return out, lse

    one_of(Looking("one"), seconds=(1.0,)).forward(*args, True, SCORES)
    assert got == [False, False, True]


# The second: of a torch whose out-of-memory error cannot be thrown.
@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("no room"), RuntimeError("CUDA out of memory. Tried"),
])
def test_want_of_memory_in_a_measurement_takes_the_first_listed(error, monkeypatch):
    def short(*_):
        raise error

    first, second = Fake("first"), Fake("second", forward=short)
    kernels = one_of(first, second, seconds=(5.0,))
    kernels.forward(*tensors(), True, SCORES)
    assert first.calls[-1] == "forward"
    assert refused(kernels) == {"measurements": f"{type(error).__name__}: {error}"}
    # Nor have the matrix products of the comparison room.
    monkeypatch.setattr(measured._Measurement, "_draw", short)
    kernels.forward(*tensors(300), True, SCORES)
    assert [len(choice.ranked) for choice in kernels.choices.known().values()] == [2, 2]


def test_deterministic_algorithms_take_the_first_that_is_and_time_nothing():
    loose, first, second = Fake("loose"), Fake("first"), Fake("second")
    loose.is_deterministic = False

    def never(run, device):
        raise AssertionError

    kernels = measured.Measured((loose, first, second), never)
    torch.use_deterministic_algorithms(True)
    try:
        kernels.forward(*tensors(), True, SCORES)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (loose.calls, first.calls, second.calls) == ([], ["forward"], [])


def test_torchs_switches_take_candidates_away():
    names = lambda: [k.name for k in measured.MEASURED._candidates if k.is_enabled()]  # noqa: E731
    assert names() == ["flash 2", "cudnn"]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert names() == ["flash 2"]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        assert names() == ["cudnn"]


def test_a_kernel_that_is_switched_off_serves_nothing():
    one, other = Fake("one"), Fake("other")
    kernels = one_of(one, other)
    kernels.forward(*tensors(), True, SCORES)
    one.is_enabled = lambda: False
    kernels.forward(*tensors(), True, SCORES)
    assert other.calls[-1] == "forward"


def test_calls_that_a_kernel_does_not_serve_are_a_kind_of_their_own():
    one, other = Fake("one"), Fake("other")
    one.serves = lambda query, key, causal: causal or key.shape[2] % 2 == 0
    kernels = one_of(one, other)
    for keys, causal, server in ((8, False, one), (7, False, other), (8, False, one)):
        query, key, value = tensors(8, keys)
        calls = len(server.calls)
        out, lse = kernels.forward(query, key, value, causal, SCORES)
        kernels.backward(out, query, key, value, out, lse, causal, SCORES)
        assert server.calls[calls:][-2:] == ["forward", "backward"], keys
    assert [kind.candidates for kind in kernels.choices.known()] == [("one", "other"), ("other",)]


def test_choices_are_reported(monkeypatch):
    bad = Fake("bad", forward=lambda *_: 1 / 0)
    kernels = one_of(Fake("slow"), bad, Fake("fast"), seconds=(2.0, 1.0))
    monkeypatch.setattr(measured, "MEASURED", kernels)
    assert attention_choices() == []
    kernels.forward(*tensors(), True, SCORES)
    assert attention_choices() == [
        {
            "calls": "causal, 1 × up to 256 rows × 256 keys, 4/2 heads of 8/8, float32",
            "kernel": "fast",
            "seconds": {"slow": 2.0, "fast": 1.0},
            "refused": {"bad": "ZeroDivisionError: division by zero"},
        }
    ]


class Torch(Fake):
    """Other bits than those of matrix products."""

    def forward(self, query, key, value, causal, scores):
        if isinstance(causal, Pieces):
            raise NotImplementedError
        return CpuFlash.forward(query, key, value, causal, scores)

    def backward(self, *args):
        return CpuFlash.backward(*args)


@pytest.fixture(params=[0, 1], ids=["one faster", "other faster"])
def by_clock(request, monkeypatch):
    """All attention by one of two kernels with different bits. The clock changes its mind."""
    times = itertools.cycle((1.0, 2.0)[:: 1 - 2 * request.param])
    kernels = measured.Measured((Torch("torch"), Fake("products")), lambda run, device: next(times))
    monkeypatch.setattr(attention, "kernel_for", lambda *_: kernels)
    return kernels


def loss_of(seen: dict):
    def loss(logits, labels, i):
        logs = log_probabilities(logits, labels)
        seen[i] = logs.detach()
        return -logs.mean()

    return loss


@pytest.mark.parametrize("checkpoints", [False, True])
def test_asleep_equals_awake_and_a_ratio_starts_at_one(by_clock, checkpoints, runtime):
    """Bit for bit: what a choice depends on, it depends on once."""
    model, case = wide(num_hidden_layers=4), group(600, (40, 24, 33, 8), seed=3)
    if checkpoints:
        model.train()
        model.gradient_checkpointing_enable()
    seen: dict = {}
    gradients = []
    for sleep in (True, False):
        report = SharedPrefix(model, runtime, sleep=sleep).backward(
            case, loss_of(seen), microbatch_tokens=64
        )
        assert report.notes == []
        assert sleep == (report.prefix["dormant_bytes"] > 4 << 20)
        gradients.append(take_gradients(model))
    assert identical(*gradients)
    scores = SharedPrefix(model, runtime).score(case, microbatch_tokens=64)
    assert all(torch.equal(seen[i], scores.log_probabilities[i]) for i in seen)
    names = {choice.ranked[0].name for choice in by_clock.choices.known().values()}
    assert names == {"torch", "products"}
