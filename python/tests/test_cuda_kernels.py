"""cuDNN's and FlashAttention's kernels as far as a CPU can tell: their numbers in FP64 on stand-ins
for the operators, against autograd, and what torch's own operators accept."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_operators import CudnnOperators, Flash3Package, Flash4Package, FlashOperators
from test_attention import both, check, check_over_itself, dense, draw

from dormouse.hf import attention, cuda_kernels, measured, merging
from dormouse.hf.kernels import Pieces, PlainPieces, Scores

CUDNN, FLASH2, FLASH3, FLASH4 = "cudnn", "flash 2", "flash 3", "flash 4"
NAMES = CUDNN, FLASH2, FLASH3, FLASH4
EQUAL, UNEQUAL = (5, 5, 5), (5, 5, 1, 9)


@pytest.fixture(autouse=True)
def cudnn_9(monkeypatch):
    """The oldest cuDNN accepted, on Hopper."""
    monkeypatch.setattr(cuda_kernels, "_cudnn_version", lambda: 91_501)
    monkeypatch.setattr(cuda_kernels, "_capability", lambda device: (9, 0))


@pytest.fixture
def operators(monkeypatch):
    """Puts the stand-ins in place; returns torch's."""

    class Operators(CudnnOperators, FlashOperators):
        def __init__(self):
            CudnnOperators.__init__(self)
            FlashOperators.__init__(self)

    operators = Operators()
    packages = {"flash_attn_interface": Flash3Package, "flash_attn.cute.interface": Flash4Package}
    monkeypatch.setattr(cuda_kernels, "_aten", operators)
    monkeypatch.setattr(cuda_kernels, "_interface", packages.__getitem__)
    return operators


def kernel(name: str):
    """Returns a fresh kernel."""
    (one,) = (each for each in cuda_kernels.CANDIDATES if each.name == name)
    return type(one)()


def serve_all(monkeypatch, *names: str) -> measured.Measured:
    """Makes kernels serve all attention, after their measurements, the first named as the fastest;
    returns their choices."""
    kernels = measured.Measured([kernel(name) for name in names], lambda run, device: 1.0)
    for each in kernels._candidates:
        monkeypatch.setattr(type(each), "is_enabled", staticmethod(lambda: True))
    monkeypatch.setattr(attention, "kernel_for", lambda *_: kernels)
    return kernels


def accepted(kernels: measured.Measured) -> set[str]:
    """Forms of calls that no kernel refused."""
    return {kind.form for kind, choice in kernels.choices.known().items() if not choice.refused}


def servers(kernels: measured.Measured) -> list[str]:
    """Names of the kernels that serve each kind, in order of choice."""
    return [choice.ranked[0].name for choice in kernels.choices.known().values()]


@pytest.mark.parametrize("lengths", [EQUAL, UNEQUAL, (7,), (1, 1), (1, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_microbatch_are_those_of_autograd(name, lengths, operators, monkeypatch):
    kernels = serve_all(monkeypatch, name)
    check(*both(13, lengths, attention.Rules(0.7)))
    unequal = {"pieces"} if len(set(lengths)) > 1 else {"causal"}
    assert accepted(kernels) == {"all keys"} | (unequal if name != CUDNN else unequal - {"pieces"})


@pytest.mark.parametrize("name", NAMES)
def test_over_a_path_with_sinks_and_chunks(name, operators, monkeypatch):
    serve_all(monkeypatch, name)
    check(*both(13, UNEQUAL, attention.Rules(0.7), has_sinks=True, cuts=(4, 5, 8)))
    # Windows of chunks take masks over the prefix alone: responses are cut into shorter pieces.
    kernels = serve_all(monkeypatch, name)
    query, rules = torch.empty(1, 4, 20, 8), attention.Rules(0.7, chunk=4)
    parts = list(attention.Packed.of([(0, 9), (9, 20)]).parts(query, rules, 13))
    assert [part.causal.lengths for part in parts] == [(3, 4, 2, 3, 4, 4)]
    assert kernels.choices.known() == {}


@pytest.mark.parametrize("value_width", [3, 8, 12])
@pytest.mark.parametrize("name", NAMES)
def test_values_of_another_width(name, value_width, operators, monkeypatch):
    kernels = serve_all(monkeypatch, name)
    check(*both(7, (3, 6), attention.Rules(0.7), value_width=value_width))
    check(*both(7, (6, 6), attention.Rules(0.7), value_width=value_width))
    assert accepted(kernels) >= {"all keys", "causal"}


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_over_itself(name, operators, monkeypatch):
    kernels = serve_all(monkeypatch, name)
    check_over_itself(attention.Rules(0.7), has_sinks=False)
    assert accepted(kernels) == {"causal"}


@pytest.mark.parametrize("has_column", [True, False])
def test_cudnn_gets_log_sum_exps_in_the_shape_it_returned(has_column, operators, monkeypatch):
    operators._has_column = has_column
    kernels = serve_all(monkeypatch, CUDNN)
    check(*both(13, EQUAL, attention.Rules(0.7)))
    assert accepted(kernels) == {"all keys", "causal"}


def test_cudnn_reads_each_layout_of_output_and_gradient(operators):
    """torch finds the plan of a backward by query, key and value alone."""
    cudnn, scores = kernel(CUDNN), Scores(0.3)
    query, key, value = (torch.randn(2, 3, 6, 8, dtype=torch.float64) for _ in range(3))
    out, lse = cudnn.forward(query, key, value, True, scores)
    grad = torch.randn_like(out)
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (grad, out)]
    inside = torch.zeros(2, 3, 9, 10, dtype=torch.float64)[:, :, 2:8, :8]
    wanted = PlainPieces.backward(grad, query, key, value, out, lse, True, scores)
    for each_grad, each_out in (
        (grad, out),
        tokens_first,
        (grad.expand(2, 3, 6, 8), inside.copy_(out)),
        (inside.clone().copy_(grad), out),
    ):
        got = cudnn.backward(each_grad, query, key, value, each_out, lse, True, scores)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert operators.backwards == 4


def test_the_layout_of_cudnn_is_that_of_the_query():
    query = torch.empty(2, 6, 3, 8).transpose(1, 2)
    for x in (torch.randn(2, 3, 6, 5), torch.randn(2, 6, 3, 5).transpose(1, 2)):
        laid_out = cuda_kernels.in_layout_of(query, x)
        assert torch.equal(laid_out, x)
        assert laid_out.stride() == (90, 5, 15, 1)
    assert cuda_kernels.in_layout_of(query, laid_out).data_ptr() == laid_out.data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_unequal_responses_are_one_call(name, operators, monkeypatch):
    serve_all(monkeypatch, name)
    check(*both(13, UNEQUAL, attention.Rules(0.7)))
    if name == FLASH2:
        # The measurement of each form, then the call.
        assert operators.forwards == [(0, 5, 10, 11, 20)] * 2 + [None] * 2


def test_responses_around_a_masked_one_are_a_call_each_side(operators, monkeypatch):
    kernels = serve_all(monkeypatch, FLASH2)
    packed = attention.Packed.of([(0, 3), (3, 7), (7, 16), (16, 18), (18, 20), (20, 24)])
    query, rules = torch.empty(1, 4, 24, 8), attention.Rules(0.7, window=5)
    parts = list(packed.parts(query, rules, 13))
    assert [part.mask is None for part in parts] == [True, False, True]
    assert [part.causal.lengths for part in parts[::2]] == [(3, 4), (2, 2, 4)]
    assert [part.rows(query).shape[2] for part in parts] == [7, 9, 8]
    again = list(packed.parts(query, rules, 13))
    assert again[0].causal is parts[0].causal
    assert kernels.choices.known() == {}


def test_first_rows_of_pieces_are_made_once():
    pieces, device = Pieces((3, 1, 4)), torch.device("cpu")
    starts = pieces.starts(device)
    assert starts.tolist() == [0, 3, 4, 8]
    assert starts.dtype == torch.int32
    assert pieces.starts(device) is starts
    assert (pieces.longest, pieces.ends) == (4, [3, 4, 8])
    assert pieces == Pieces((3, 1, 4))


def test_the_log_sum_exp_given_is_the_one_used(operators):
    scores = Scores(0.3)
    for name in NAMES:
        one = kernel(name)
        query, key, value = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
        out, lse = one.forward(query, key, value, True, scores)
        merged = torch.randn_like(lse) + lse
        args = torch.randn_like(out), query, key, value, torch.randn_like(out), merged, True, scores
        for a, b in zip(one.backward(*args), PlainPieces.backward(*args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def relative(got: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth, strict=True)]


@pytest.mark.parametrize("merges", [False, True], ids=["by torch", "by the library"])
@pytest.mark.parametrize("lengths", [(37, 37, 37), (37, 5, 90, 61)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_below_fp32_every_part_gets_the_merged_log_sum_exp(
    name, dtype, lengths, merges, operators, monkeypatch
):
    """And gradients are as near to FP64 as the method asks (docs/method.md §10)."""
    monkeypatch.setattr(merging, "KINDS", {"cpu"} if merges else set())
    kernels, given = serve_all(monkeypatch, name), []
    backward = kernels.backward
    kernels.backward = lambda *args: given.append(args[5]) or backward(*args)
    prefix, heads, kv_heads, width, rules = 200, 4, 2, 32, attention.Rules(32**-0.5)
    rows = sum(lengths)
    shapes = [(heads, rows), (kv_heads, rows), (kv_heads, rows), *2 * [(kv_heads, prefix)]]
    drawn = [draw(1, *shape, width, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    direction = draw(1, heads, rows, width, seed=9).to(dtype)
    ends = list(itertools.accumulate(lengths))
    segments = list(zip([0, *ends], ends, strict=False))

    def dense_run(cast: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
        leaves = [x.to(cast).requires_grad_() for x in drawn]
        query, key, value, prefix_key, prefix_value = leaves
        lses, outs = [], []
        for start, end in segments:
            keys = torch.cat([prefix_key, key[:, :, start:end]], 2)
            values = torch.cat([prefix_value, value[:, :, start:end]], 2)
            outs.append(dense(query[:, :, start:end], keys, values, rules, None))
            with torch.no_grad():
                keys = keys.repeat_interleave(heads // kv_heads, 1)
                scores = query[:, :, start:end] @ keys.transpose(-2, -1) * rules.scale
                later = torch.ones(scores.shape[-2:]).triu(1 + prefix).bool()
                lses.append(scores.masked_fill(later, -torch.inf).logsumexp(-1))
        torch.cat(outs, 2).backward(direction.to(cast))
        return [leaf.grad for leaf in leaves], torch.cat(lses, 2)

    truth, wanted = dense_run(torch.float64)
    leaves, added = [x.clone().requires_grad_() for x in drawn[:3]], []
    attention.PackedAttention.apply(
        *leaves,
        None,
        attention.Packed.of(segments),
        rules,
        (tuple(drawn[3:]),),
        lambda index, *grads: added.extend(grads),
    ).backward(direction)
    # First that of the prefix, then the responses'.
    assert len(given) == 2
    torch.testing.assert_close(given[0].double(), wanted, rtol=1e-6, atol=1e-6)
    own = given[1].transpose(0, 1).reshape(1, heads, rows) if len(set(lengths)) == 1 else given[1]
    torch.testing.assert_close(own.double(), wanted, rtol=1e-6, atol=1e-6)
    ours = relative([*(leaf.grad for leaf in leaves), *added], truth)
    densely = relative(dense_run(dtype)[0], truth)
    for mine, its in zip(ours, densely, strict=True):
        assert its < 0.1
        assert mine <= 1.25 * its + 1e-6


@pytest.mark.parametrize("name", [CUDNN, FLASH2])
@pytest.mark.parametrize("causal", [False, True, Pieces((3, 1, 4))])
def test_torchs_operators_accept_the_calls(name, causal):
    """Without numbers: of this version of torch, by its own declarations and shapes."""
    one, scores = kernel(name), Scores(0.3)
    if name == CUDNN and isinstance(causal, Pieces):
        with pytest.raises(NotImplementedError, match="no variable-length form"):
            one.forward(None, None, None, causal, scores)
        return
    keys = 11 if causal is False else 8
    shapes = (1, 8, 8, 32), (1, 2, keys, 32), (1, 2, keys, 32)
    query, key, value = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    out, lse = one.forward(query, key, value, causal, scores)
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 8, 8), torch.float32)
    grads = one.backward(torch.empty_like(out), query, key, value, out, lse, causal, scores)
    assert [(x.shape, x.dtype) for x in grads] == [(s, torch.bfloat16) for s in shapes]


@pytest.mark.parametrize("version", [0, 1, 8_907, 90_000, 91_500])
def test_an_old_cudnn_is_refused_before_it_runs(version, operators, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "_cudnn_version", lambda: version)
    kernels = serve_all(monkeypatch, CUDNN, FLASH2)
    check(*both(13, EQUAL, attention.Rules(0.7)))
    assert operators.backwards == 0
    assert servers(kernels) == 2 * [FLASH2]
    assert [choice.refused for choice in kernels.choices.known().values()] == 2 * [
        {CUDNN: f"NotImplementedError: cuDNN {version}; accepted: at least 91501"}
    ]


def of_low_scores(rows: int, keys: int) -> list[torch.Tensor]:
    """Gradient, query, key and value of scores about -120 under a scale of 1."""
    shapes = [(1, 4, rows, 8), (1, 4, rows, 8), (1, 2, keys, 8), (1, 2, keys, 8)]
    grad, query, key, value = (0.1 * draw(*s, seed=i) for i, s in enumerate(shapes))
    query[..., 0], key[..., 0] = 1.0, -120.0
    return [grad, query, key, value]


def test_a_prefix_whose_keys_end_in_half_a_tile_is_not_cudnns_on_hopper(operators, monkeypatch):
    """Of two prefixes that round to one kind, the other stays cuDNN's."""
    kernels, scores = serve_all(monkeypatch, CUDNN, FLASH2), Scores(1.0)
    for keys, by_cudnn in ((128, True), (64, False), (192, False), (128, True), (96, True)):
        grad, *tensors = of_low_scores(20, keys)
        wanted, wanted_lse = PlainPieces.forward(*tensors, False, scores)
        assert wanted_lse.max() < -88.7
        ran = operators.backwards
        out, lse = kernels.forward(*tensors, False, scores)
        got = kernels.backward(grad, *tensors, out, lse, False, scores)
        for a, b in zip(
            (out, *got),
            (wanted, *PlainPieces.backward(grad, *tensors, wanted, wanted_lse, False, scores)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert (operators.backwards > ran) is by_cudnn, keys
    assert servers(kernels) == [CUDNN, FLASH2]


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({}, False),
        ({"version": 92_599}, False),
        ({"version": 92_600}, True),
        ({"capability": (8, 9)}, True),
        ({"capability": (10, 0)}, True),
        ({"causal": True}, True),
        ({"keys": 704}, False),
        ({"keys": 640}, True),
        ({"keys": 65}, True),
        ({"rows": 1, "keys": 128, "version": 92_600}, False),
        ({"keys": 1, "capability": (10, 0), "version": 92_600}, False),
    ],
)
def test_which_calls_cudnn_serves(changes, serves, monkeypatch):
    call = {"rows": 20, "keys": 64, "causal": False, "version": 91_501, "capability": (9, 0)}
    call |= changes
    monkeypatch.setattr(cuda_kernels, "_cudnn_version", lambda: call["version"])
    monkeypatch.setattr(cuda_kernels, "_capability", lambda device: call["capability"])
    query, key = (torch.empty(1, 2, call[name], 8) for name in ("rows", "keys"))
    assert kernel(CUDNN).serves(query, key, call["causal"]) is serves
    assert all(kernel(name).serves(query, key, call["causal"]) for name in NAMES if name != CUDNN)


def test_a_cudnn_of_another_build_is_refused_with_its_reason(operators, monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(cuda_kernels, "_cudnn_version", version)
    kernels, scores = serve_all(monkeypatch, CUDNN, FLASH2), Scores(1.0)
    kernels.forward(*of_low_scores(20, 64)[1:], False, scores)
    (choice,) = kernels.choices.known().values()
    assert choice.refused == {CUDNN: "RuntimeError: cuDNN version incompatibility"}


def test_flash_3_is_deterministic_where_torch_is(operators):
    one, scores = kernel(FLASH3), Scores(0.3)
    query, key, value = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    out, lse = one.forward(query, key, value, True, scores)
    torch.use_deterministic_algorithms(True)
    try:
        one.backward(out, query, key, value, out, lse, True, scores)
    finally:
        torch.use_deterministic_algorithms(False)


def test_packages_that_are_not_installed_are_no_candidates(monkeypatch):
    names = {each.name: each.is_enabled() for each in cuda_kernels.CANDIDATES}
    assert names == {FLASH2: True, CUDNN: True, FLASH3: False, FLASH4: False}
    asked = []
    monkeypatch.setattr(cuda_kernels, "_is_installed", lambda module: asked.append(module) or True)
    assert all(each.is_enabled() for each in cuda_kernels.CANDIDATES)
    assert asked == ["flash_attn_interface", "flash_attn.cute.interface"]
