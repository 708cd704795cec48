"""Attention of packed responses over a prefix, against one dense softmax per response."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dormouse.hf import attention, kernels

HEADS, KV_HEADS, WIDTH = 4, 2, 8
WINDOWS = (None, 1, 2, 5, 11, 40)


def draw(*shape, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, dtype=torch.float64, generator=generator)


def dense(query, key, value, rules: attention.Rules, sinks) -> torch.Tensor:
    """Causal attention of ``rows`` last queries over all keys, all scores at once."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    rows, keys = scores.shape[-2:]
    behind = torch.arange(keys - rows, keys).unsqueeze(1) - torch.arange(keys)
    seen = behind >= 0
    if rules.window is not None:
        seen &= behind < rules.window
    if rules.chunk is not None:
        chunks = torch.arange(keys) // rules.chunk
        seen &= chunks[keys - rows :].unsqueeze(1) == chunks
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., :keys] @ value


def both(prefix: int, lengths, rules, *, has_sinks=False, value_width=WIDTH, cuts=()):
    """Returns outputs and gradients, packed and dense: of q, k, v, prefix k and v, and sinks.
    ``cuts``: the prefix is a path of several, cut at these positions."""
    rows = sum(lengths)
    tensors = [
        draw(1, HEADS, rows, WIDTH, seed=1),
        draw(1, KV_HEADS, rows, WIDTH, seed=2),
        draw(1, KV_HEADS, rows, value_width, seed=3),
        draw(1, KV_HEADS, prefix, WIDTH, seed=4),
        draw(1, KV_HEADS, prefix, value_width, seed=5),
        draw(HEADS, seed=6) if has_sinks else None,
    ]
    direction = draw(1, HEADS, rows, value_width, seed=7)
    ends = list(itertools.accumulate(lengths))
    segments = list(zip([0, *ends], ends, strict=False))

    def leaves():
        return [None if t is None else t.clone().requires_grad_() for t in tensors]

    query, key, value, prefix_key, prefix_value, sinks = own = leaves()
    edges = [0, *cuts, prefix]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    added = {}
    packed = attention.PackedAttention.apply(
        query,
        key,
        value,
        sinks,
        attention.Packed.of(segments),
        rules,
        tuple((prefix_key.detach()[:, :, at], prefix_value.detach()[:, :, at]) for at in parts),
        lambda index, *grads: added.update({index: grads}),
    )
    packed.backward(direction)
    got = [packed, query.grad, key.grad, value.grad]
    got += [torch.cat([added[i][slot] for i in range(len(parts))], 2) for slot in (0, 1)]
    got += [sinks.grad] if has_sinks else []

    query, key, value, prefix_key, prefix_value, sinks = wanted = leaves()
    outs = [
        dense(
            query[:, :, start:end],
            torch.cat([prefix_key, key[:, :, start:end]], 2),
            torch.cat([prefix_value, value[:, :, start:end]], 2),
            rules,
            sinks,
        )
        for start, end in segments
    ]
    out = torch.cat(outs, 2)
    out.backward(direction)
    del own
    return got, [out, *(leaf.grad for leaf in wanted if leaf is not None)]


def check(got, wanted):
    assert len(got) == len(wanted)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape
        assert float((a - b).norm()) <= 1e-12 * (1 + float(b.norm())), index


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_soft_caps_and_sinks(window, softcap, has_sinks):
    rules = attention.Rules(0.7, window, softcap)
    check(*both(13, (5, 5, 1, 9), rules, has_sinks=has_sinks))


@pytest.mark.parametrize("chunk", [1, 4, 13, 14, 17, 18, 22, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("cuts", [(), (4, 5, 8)])
def test_chunks(chunk, softcap, cuts):
    rules = attention.Rules(0.7, softcap=softcap, chunk=chunk)
    check(*both(13, (5, 5, 1, 9), rules, has_sinks=True, cuts=cuts))


@pytest.mark.parametrize("value_width", [3, 8, 12])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_of_another_width(value_width, softcap):
    rules = attention.Rules(0.7, 4, softcap)
    check(*both(7, (3, 6), rules, value_width=value_width, has_sinks=True))


def test_random_shapes(monkeypatch):
    """Windows about as long as prefix, responses and blocks of rows."""
    drawn = random.Random(0)
    for _ in range(60):
        monkeypatch.setattr(attention, "BLOCK_ROWS_MIN", drawn.choice([1, 3, 256]))
        monkeypatch.setitem(kernels.SCORES_BYTES_MAX, "cpu", drawn.choice([1, 400, 1 << 20]))
        prefix = drawn.randint(1, 14)
        lengths = [drawn.randint(1, 12) for _ in range(drawn.randint(1, 5))]
        tokens = drawn.randint(1, 26)
        window, chunk = drawn.choice([(None, None), (tokens, None), (None, tokens)])
        rules = attention.Rules(0.5, window, drawn.choice([None, 2.0]), chunk)
        cuts = sorted(drawn.sample(range(1, prefix), k=drawn.randint(0, min(5, prefix - 1))))
        monkeypatch.setattr(attention, "JOINED_TOKENS_MAX", drawn.choice([1, 2, 3, 512]))
        check(*both(prefix, lengths, rules, has_sinks=drawn.random() < 0.5, cuts=cuts))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_path_of_prefixes(window, softcap):
    rules = attention.Rules(0.7, window, softcap)
    check(*both(13, (5, 1, 9), rules, has_sinks=True, cuts=(4, 5, 11)))


def test_short_prefixes_run_together(monkeypatch):
    """One call for a chain of them, and one for each that is long."""
    calls, kernel = [], kernels.CpuFlash
    own = kernel.forward
    monkeypatch.setattr(attention, "JOINED_TOKENS_MAX", 3)
    monkeypatch.setattr(
        kernel, "forward", staticmethod(lambda *x: calls.append(x[1].shape[2]) or own(*x))
    )
    # Lengths 2, 1, 2, 3, 4, 1: the first three together.
    check(*both(13, (5,), attention.Rules(0.7), cuts=(2, 3, 5, 8, 12)))
    assert calls[1:] == [5, 3, 4, 1]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_prompt_over_itself(window, has_sinks, softcap, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_ROWS_MIN", 4)
    check_over_itself(attention.Rules(0.7, window, softcap), has_sinks)


@pytest.mark.parametrize("chunk", [1, 5, 22, 23, 40])
def test_the_prompt_over_itself_in_chunks(chunk):
    check_over_itself(attention.Rules(0.7, chunk=chunk), has_sinks=False)


def check_over_itself(rules, has_sinks):
    shapes = [(1, HEADS, 23, WIDTH), (1, KV_HEADS, 23, WIDTH), (1, KV_HEADS, 23, WIDTH)]
    tensors = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    tensors += [draw(HEADS, seed=9).requires_grad_()] if has_sinks else []
    direction = draw(*shapes[0], seed=8)
    sinks = tensors[3] if has_sinks else None
    results = []
    for function in (attention.causal, dense):
        out = function(*tensors[:3], rules, sinks)
        results.append([out, *torch.autograd.grad(out, tensors, direction)])
    check(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [0.0, 30.0, 3000.0, -3000.0])
def test_parts_whose_scores_lie_far_apart(dtype, apart):
    """The weights of the parts add up to one, however large the log-sum-exps are: the error stays
    that of one softmax, computed densely in the same dtype."""
    width, prefix, rows = 16, 40, 12
    shift = torch.zeros(width, dtype=torch.float64)
    shift[0] = apart
    tensors = [draw(1, 1, n, width, seed=n + i) for i, n in enumerate((rows, rows, rows))]
    tensors += [draw(1, 1, prefix, width, seed=30), draw(1, 1, prefix, width, seed=31)]
    tensors[0][..., 0] = 1.0
    tensors[1], tensors[3] = tensors[1] + shift * 0.9, tensors[3] + shift
    tensors = [t.to(dtype) for t in tensors]
    direction = draw(1, 1, rows, width, seed=40).to(dtype)
    rules = attention.Rules(1.0)

    def gradients(cast, function):
        leaves = [t.to(cast).requires_grad_() for t in tensors]
        out = function(leaves)
        out.backward(direction.to(cast))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    def packed(leaves):
        return attention.PackedAttention.apply(
            *leaves[:3],
            None,
            attention.Packed.of([(0, rows)]),
            rules,
            ((leaves[3].detach(), leaves[4].detach()),),
            None,
        )

    def at_once(leaves):
        query, key, value, prefix_key, prefix_value = leaves
        return dense(
            query,
            torch.cat([prefix_key.detach(), key], 2),
            torch.cat([prefix_value.detach(), value], 2),
            rules,
            None,
        )

    truth = gradients(torch.float64, at_once)
    for true, ours, densely in zip(
        truth, gradients(dtype, packed), gradients(dtype, at_once), strict=True
    ):
        allowed = 2.5 * float((densely.double() - true).norm()) + 1e-6 * float(true.norm())
        assert float((ours.double() - true).norm()) <= allowed


class _OfShapes:
    """Computes nothing."""

    @staticmethod
    def forward(query, key, value, causal, scores, mask=None):
        assert mask is None or (mask.device, mask.dtype) == (query.device, query.dtype)
        return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3])

    @staticmethod
    def backward(grad, query, key, value, out, lse, causal, scores, mask=None):
        assert mask is None or (mask.device, mask.dtype) == (query.device, query.dtype)
        return tuple(map(torch.empty_like, (query, key, value)))


class _HostCopies(TorchDispatchMode):
    """Counts the bytes of each tensor that leaves host memory."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        sources = (x for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu")
        if isinstance(out, torch.Tensor) and out.device.type != "cpu":
            self.sizes += (x.nbytes for x in sources)
        return out


@pytest.mark.parametrize("rules", [attention.Rules(1.0, 30), attention.Rules(1.0, chunk=30)])
def test_layers_of_a_microbatch_copy_no_mask_from_the_host(rules, monkeypatch):
    """A copy waits for the GPU: the positions from which rows read go there, once."""
    monkeypatch.setattr(attention, "kernel_for", lambda *_: _OfShapes)
    monkeypatch.setattr(attention, "BLOCK_ROWS_MIN", 4)
    packed = attention.Packed.of([(0, 40), (40, 80), (80, 95)])
    shapes = [(HEADS, 95), (KV_HEADS, 95), (KV_HEADS, 95)]
    past = tuple(
        tuple(torch.empty(1, KV_HEADS, 20, WIDTH, device="meta") for _ in range(2))
        for _ in range(2)
    )
    monkeypatch.setattr(attention, "JOINED_TOKENS_MAX", 1)
    layers = 3
    with _HostCopies() as copies:
        for _ in range(layers):
            leaves = [
                torch.empty(1, *shape, WIDTH, device="meta", requires_grad=True)
                for shape in shapes
            ]
            out = attention.PackedAttention.apply(*leaves, None, packed, rules, past, None)
            out.sum().backward()
    # One for each prefix of the path.
    assert copies.sizes == 2 * [packed.offsets.nbytes]


class _Stored:
    """The CPU's kernel, its output stored tokens-first or heads-first."""

    def __init__(self, tokens_first: bool):
        self._tokens_first = tokens_first
        self.out: torch.Tensor

    def forward(self, query, *others):
        out, lse = kernels.CpuFlash.forward(query, *others)
        self.out = out.transpose(1, 2).contiguous().transpose(1, 2)
        if not self._tokens_first:
            self.out = out.contiguous()
        return self.out, lse


@pytest.mark.parametrize("segments", [[(0, 6)], [(0, 3), (3, 6)], [(0, 2), (2, 6)]])
@pytest.mark.parametrize("tokens_first", [True, False])
def test_outputs_are_stored_tokens_first_and_copied_only_for_that(
    segments, tokens_first, monkeypatch
):
    kernel = _Stored(tokens_first)
    monkeypatch.setattr(attention, "kernel_for", lambda *_: kernel)
    query, key, value = (draw(1, HEADS, 6, 8, seed=seed) for seed in range(3))
    rules = attention.Rules(scale=1.0)
    parts = attention.Packed.of(segments).parts(query, rules, 0)
    out, lse = attention._own_forward(query, key, value, parts, rules)
    assert out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous()
    # One call served all rows: its output is used as it is.
    is_one = len({end - start for start, end in segments}) == 1
    assert (out.data_ptr() == kernel.out.data_ptr()) == (is_one and tokens_first)
    wanted = [
        kernels.CpuFlash.forward(*(x[:, :, a:b] for x in (query, key, value)), True, rules.scores)
        for a, b in segments
    ]
    assert torch.equal(out, torch.cat([each for each, _ in wanted], 2))
    assert torch.equal(lse, torch.cat([each for _, each in wanted], 2))
