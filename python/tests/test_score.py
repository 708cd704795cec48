"""Log-probabilities of a group without a graph, and the functions that turn logits into them."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from conftest import a_runtime
from hooked import alone
from model_zoo import zoo_model
from models import VOCAB, dense_backward, distance, group, take_gradients, tiny
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dormouse import ArgumentError, Group
from dormouse.hf import SharedPrefix, UnsupportedModelError, entropies, likelihood
from dormouse.hf.likelihood import log_probabilities

TEMPERATURES = (1.0, 0.7, 3.0)


def dense_logits(model, case) -> list[torch.Tensor]:
    """Each response's logits, with its whole prompt before it."""
    logits = []
    for response in case.responses:
        tokens = torch.cat([case.prompt, response[:-1]]).unsqueeze(0)
        with torch.no_grad():
            logits.append(model(input_ids=tokens).logits[0, len(case.prompt) - 1 :])
    return logits


def plain_log_probabilities(logits, labels, temperature=1.0):
    return torch.log_softmax(logits / temperature, -1).gather(1, labels[:, None])[:, 0]


def plain_entropies(logits, temperature=1.0):
    return torch.distributions.Categorical(logits=logits / temperature).entropy()


def draw(rows=7, vocab=33, dtype=torch.float64, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)
    return logits.to(dtype), torch.randint(vocab, (rows,), generator=generator)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("block_bytes", [1, 600, 1 << 20])
def test_values_and_gradients_are_those_of_log_softmax(temperature, block_bytes, monkeypatch):
    monkeypatch.setitem(likelihood.BLOCK_BYTES_MAX, "cpu", block_bytes)
    logits, labels = draw()
    direction = torch.randn(len(labels), dtype=torch.float64)
    pairs = [
        (log_probabilities, plain_log_probabilities, (labels, temperature)),
        (entropies, plain_entropies, (temperature,)),
    ]
    for ours, plain, arguments in pairs:
        results = []
        for function in (ours, plain):
            leaf = logits.clone().requires_grad_()
            out = function(leaf, *arguments)
            results.append([out.detach(), *torch.autograd.grad(out, leaf, direction)])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)
    assert torch.equal(logits, draw()[0]), "the logits are left alone"


def test_low_precision_logits_are_computed_in_fp32():
    logits, labels = draw(rows=64, vocab=1000, dtype=torch.bfloat16, scale=8.0)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    direction = torch.randn(64)
    for ours, plain, arguments in (
        (log_probabilities, plain_log_probabilities, (labels,)),
        (entropies, plain_entropies, ()),
    ):
        out, wanted = ours(leaf, *arguments), plain(exact, *arguments)
        assert out.dtype is torch.float32
        torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
        (grad,) = torch.autograd.grad(out, leaf, direction)
        (wanted,) = torch.autograd.grad(wanted, exact, direction.double())
        assert grad.dtype is torch.bfloat16
        assert float((grad.double() - wanted).norm()) <= 3e-3 * float(wanted.norm())


def test_likely_tokens_keep_their_bits():
    """A sum of largest logit and logarithm would round away the probability of all others."""
    logits = torch.full((1, 50), -12.0)
    logits[0, 3] = 4000.0
    logits[0, 4] = 3990.0
    got = log_probabilities(logits, torch.tensor([3]))
    assert got.item() == pytest.approx(-4.5399e-5, rel=1e-3)


def test_masked_logits_have_no_weight():
    logits, labels = draw(rows=2)
    logits[:, 5:9] = -torch.inf
    labels = torch.tensor([1, 2])
    leaf = logits.clone().requires_grad_()
    (entropies(leaf).sum() + log_probabilities(leaf, labels).sum()).backward()
    kept = torch.cat([logits[:, :5], logits[:, 9:]], 1)
    torch.testing.assert_close(entropies(leaf.detach()), plain_entropies(kept))
    assert torch.isfinite(leaf.grad).all() and not leaf.grad[:, 5:9].any()


class Largest(TorchDispatchMode):
    """Records the largest floating-point tensor that an operator returns, in bytes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
                self.largest = max(self.largest, value.numel() * 4)
        return out


def test_no_copy_of_all_logits_in_fp32(monkeypatch):
    monkeypatch.setitem(likelihood.BLOCK_BYTES_MAX, "cpu", 40_000)
    logits, labels = draw(rows=100, vocab=1000, dtype=torch.bfloat16)
    leaf = logits.requires_grad_()
    with Largest() as seen:
        log_probabilities(leaf, labels).sum().backward()
        entropies(leaf).sum().backward()
    assert 0 < seen.largest <= 40_000


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_that_are_no_temperature(temperature, runtime):
    logits, labels = draw()
    with pytest.raises(ArgumentError, match="accepted: finite numbers above 0"):
        log_probabilities(logits, labels, temperature)
    with pytest.raises(ArgumentError, match="accepted: finite numbers above 0"):
        SharedPrefix(tiny(), runtime).score(group(), temperature=temperature)


def test_labels_of_other_rows_are_refused():
    logits, labels = draw()
    for wrong in (labels[1:], labels[:, None], labels.float()):
        with pytest.raises(ArgumentError, match="accepted: one token id per row"):
            log_probabilities(logits, wrong)
    with pytest.raises(ArgumentError, match=r"accepted: floating-point \[rows, vocab\]"):
        log_probabilities(logits[None], labels)


# Scores of a group.


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("microbatch_tokens", [1, 8, 256])
def test_scores_are_the_dense_ones(temperature, microbatch_tokens, runtime):
    model, case = tiny(), group()
    scores = SharedPrefix(model, runtime).score(
        case, temperature=temperature, microbatch_tokens=microbatch_tokens, entropy=True
    )
    assert len(scores.log_probabilities) == len(scores.entropies) == len(case.responses)
    for i, logits in enumerate(dense_logits(model, case)):
        wanted = plain_log_probabilities(logits, case.responses[i], temperature)
        torch.testing.assert_close(scores.log_probabilities[i], wanted, rtol=1e-11, atol=1e-12)
        wanted = plain_entropies(logits, temperature)
        torch.testing.assert_close(scores.entropies[i], wanted, rtol=1e-11, atol=1e-12)
    assert not any(x.requires_grad for x in scores.log_probabilities + scores.entropies)
    assert scores.counts["prefix_tokens"] == len(case.prompt) - 1
    assert scores.counts["microbatch_tokens"] == sum(map(len, case.responses))
    assert all(p.grad is None for p in model.parameters())
    assert scores.checked.reason == "the first step"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_scores_in_every_mode_of_autograd(mode, runtime):
    model = tiny(num_hidden_layers=2)
    wanted = SharedPrefix(model, runtime).score(group()).log_probabilities
    with mode():
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        scores = SharedPrefix(model, runtime).score(group()).log_probabilities
        assert torch.is_grad_enabled() is grad
        assert torch.is_inference_mode_enabled() is inference
    assert all(map(torch.equal, scores, wanted))
    assert not any(each.requires_grad or each.is_inference() for each in scores)


def test_entropies_on_demand(runtime):
    assert SharedPrefix(tiny(), runtime).score(group()).entropies is None


KINDS = ("llama", "gpt_oss", "gemma3_text", "mixtral", "deepseek_v3", "gpt2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_ratio_starts_at_exactly_one(kind, dtype, runtime):
    """The bits of the scores are those of the step, whatever the packing of its microbatches."""
    model, seen = zoo_model(kind, dtype).eval(), {}
    shared = SharedPrefix(model, runtime)

    def loss_fn(logits, labels, i):
        chosen = log_probabilities(logits, labels, 0.7)
        seen[i] = chosen.detach()
        return -(chosen - old.log_probabilities[i]).exp().mean()

    for case, microbatch_tokens in ((group(37, (5, 1, 9, 3, 1)), 8), (group(3, (20, 33)), 256)):
        old = shared.score(case, temperature=0.7, microbatch_tokens=microbatch_tokens)
        shared.backward(case, loss_fn, microbatch_tokens=microbatch_tokens)
        for i, scored in enumerate(old.log_probabilities):
            assert torch.equal(scored, seen[i])


def test_a_ratio_starts_at_one_with_several_threads(runtime):
    """The vocabulary of a single row is summed by several threads."""
    model = tiny("llama", torch.float32, vocab_size=40_000, num_hidden_layers=1)
    shared, case, seen = SharedPrefix(model, runtime, sleep=False), group(9, (1, 4)), {}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        old = shared.score(case, entropy=True)

        def loss_fn(logits, labels, i):
            seen[i] = log_probabilities(logits, labels).detach(), entropies(logits).detach()
            return logits.sum()

        shared.backward(case, loss_fn)
    finally:
        torch.set_num_threads(before)
    for i in range(2):
        assert torch.equal(seen[i][0], old.log_probabilities[i])
        assert torch.equal(seen[i][1], old.entropies[i])


def test_a_loss_through_log_probabilities_has_the_dense_gradient(runtime):
    model, case = tiny(), group()

    def ours(logits, labels, i):
        chosen = log_probabilities(logits, labels, 0.7)
        return entropies(logits, 0.7).mean() - chosen.sum() * (i + 1)

    def plain(logits, labels, i):
        chosen = plain_log_probabilities(logits, labels, 0.7)
        return plain_entropies(logits, 0.7).mean() - chosen.sum() * (i + 1)

    SharedPrefix(model, runtime).backward(case, ours, microbatch_tokens=8)
    got = take_gradients(model)
    dense_backward(model, case, plain)
    assert distance(got, take_gradients(model)) <= 1e-12


def test_responses_of_weight_zero_are_scored(runtime):
    """A step leaves them out of its microbatches, and packs the others without them."""
    model, seen = tiny(dtype=torch.float32), {}
    case = group(9, (3, 4, 2, 5), weights=[1.0, 0.0, 1.0, 0.0])
    shared = SharedPrefix(model, runtime)
    scores = shared.score(case, microbatch_tokens=8)
    for i, logits in enumerate(dense_logits(model, case)):
        wanted = plain_log_probabilities(logits, case.responses[i])
        torch.testing.assert_close(scores.log_probabilities[i], wanted, rtol=1e-4, atol=1e-5)

    def loss_fn(logits, labels, i):
        seen[i] = log_probabilities(logits, labels).detach()
        return logits.sum()

    shared.backward(case, loss_fn, microbatch_tokens=8)
    assert seen.keys() == {0, 2}
    assert all(torch.equal(seen[i], scores.log_probabilities[i]) for i in seen)
    assert scores.counts["prefix_tokens"] == 8 and scores.counts["microbatch_tokens"] == 14


def test_training_and_evaluation_mode_are_checked_once_each(runtime):
    model, case = tiny(), group()
    shared = SharedPrefix(model, runtime)
    scored, stepped = [], []
    for _ in range(3):
        model.eval()
        scored.append(shared.score(case).checked)
        model.train()
        stepped.append(shared.backward(case, lambda logits, labels, i: logits.mean()).checked)
    assert len({id(each) for each in scored}) == len({id(each) for each in stepped}) == 1
    assert scored[0] is not stepped[0]


def test_a_model_that_went_back_after_a_refusal_is_seen_as_it_is(runtime):
    """The view of the refused model does not stay."""
    model, case = tiny(num_hidden_layers=2), group()
    shared = SharedPrefix(model, runtime)
    first = shared.score(case)
    head = model.lm_head
    model.lm_head = torch.nn.Sequential(head, torch.nn.Dropout(0.5))
    with pytest.raises(UnsupportedModelError):
        shared.score(case)
    model.lm_head = head
    again = shared.score(case)
    assert again.checked is first.checked
    assert all(map(torch.equal, first.log_probabilities, again.log_probabilities))


def test_states_with_other_parameters_are_forgotten(runtime):
    """They would hold the memory of weights that the model has no more."""
    model, case = tiny(num_hidden_layers=2), group()
    shared = SharedPrefix(model, runtime)
    shared.score(case)
    model.lm_head = torch.nn.Linear(96, VOCAB, bias=False, dtype=torch.float64)
    shared.score(case)
    assert len(shared._known._states) == 1


def test_dropout_of_responses_is_off_in_scores(runtime):
    model, case = tiny(num_hidden_layers=2), group()
    wanted = SharedPrefix(model.eval(), runtime).score(case).log_probabilities
    norm = model.model.norm
    model.model.norm = torch.nn.Sequential(norm, torch.nn.Dropout(0.3))
    shared = SharedPrefix(model.train(), runtime, prompt_dropout=False)
    with pytest.raises(UnsupportedModelError, match=r"accepted: model.eval\(\)"):
        shared.score(case)
    model.eval()
    scores = shared.score(case).log_probabilities
    assert all(map(torch.equal, scores, wanted))


def test_a_model_that_cannot_share_is_not_scored(runtime):
    model = tiny()
    model.model.norm.forward = lambda x: x + x.mean(1, keepdim=True)
    with pytest.raises(UnsupportedModelError, match="a shared step is not exact for this model"):
        SharedPrefix(model, runtime).score(group())


def test_no_graph_and_no_hidden_states_are_held(runtime):
    seen, alive = [], []

    def hook(module, args, out):
        assert out.grad_fn is None
        seen.append(weakref.ref(out))
        alive.append(sum(each() is not None for each in seen))

    model, case = tiny(num_hidden_layers=6), group()
    shared = SharedPrefix(model, runtime)
    shared.check()
    for layer in model.model.layers:
        layer.register_forward_hook(hook)
    # A check of the altered model would keep graphs of its own.
    with mock.patch.object(SharedPrefix, "_check_if_needed"):
        shared.score(case, microbatch_tokens=8)
    assert len(seen) > 6 and max(alive) <= 2


def test_a_reference_pass_with_other_adapters(runtime):
    """A model whose adapter is switched off is another state."""

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.is_on = base, True
            self.delta = torch.nn.Linear(96, 96, bias=False, dtype=torch.float64)

        def forward(self, x):
            return self.base(x) + self.delta(x) if self.is_on else self.base(x)

    model, case = tiny(num_hidden_layers=2), group()
    reference = dense_logits(model, case)
    attention = model.model.layers[0].self_attn
    adapter = attention.o_proj = Adapter(attention.o_proj)
    shared, checks = SharedPrefix(model, runtime), set()
    for _ in range(2):
        adapter.is_on = False
        scores = shared.score(case)
        adapter.is_on = True
        checks |= {id(scores.checked), id(shared.score(case).checked)}
        for i, response in enumerate(case.responses):
            wanted = plain_log_probabilities(reference[i], response)
            torch.testing.assert_close(scores.log_probabilities[i], wanted)
    assert len(checks) == 2


def test_a_long_group_is_scored_within_its_kv(runtime):
    case = Group(torch.arange(400) % VOCAB, [torch.arange(7)] * 3)
    scores = SharedPrefix(tiny(num_hidden_layers=2), runtime).score(case, microbatch_tokens=7)
    assert all(torch.equal(each, scores.log_probabilities[0]) for each in scores.log_probabilities)


@pytest.mark.slow
@alone
def test_one_rank_of_several_scores_alone():
    """DistributedDataParallel is not entered, and no collective runs. Under ``fully_shard`` the
    weights are gathered."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with a_runtime() as runtime:
            plain = SharedPrefix(tiny(), runtime).score(group())
            model = torch.nn.parallel.DistributedDataParallel(tiny())
            sharded = torch.distributed.fsdp.fully_shard(tiny())
            with mock.patch.object(model, "forward", side_effect=AssertionError):
                scores = SharedPrefix(model, runtime).score(group())
            assert all(map(torch.equal, scores.log_probabilities, plain.log_probabilities))
            scores = SharedPrefix(sharded, runtime).score(group())
            assert all(map(torch.equal, scores.log_probabilities, plain.log_probabilities))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("asked, microbatches", [({}, 2), ({"microbatch_tokens": 1024}, 1)])
def test_a_microbatch_has_512_rows_on_a_cpu(asked, microbatches, runtime):
    case = group(8, (400, 400), seed=1)
    scores = SharedPrefix(tiny(), runtime, sleep=False).score(case, **asked)
    assert scores.counts["microbatches"] == microbatches
