"""Routers that select recorded experts."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import VOCAB, distance, group, loss_fn, take_gradients
from test_altered_models import dense_backward

from dormouse import ArgumentError, Conversation, Group, Tree
from dormouse.hf import SharedPrefix, UnsupportedModelError, log_probabilities
from dormouse.hf.routing import Recorder

FP64_BOUND = 1e-10
EXPERTS, PER_TOKEN, LAYERS = 4, 2, 4
KINDS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe"),
    *("granitemoe", "ernie4_5_moe", "dots1"),
)


def drawn(tokens: int, layers: int, seed: int) -> torch.Tensor:
    """Experts by chance, distinct in each row."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, layers, EXPERTS, generator=generator)
    return scores.argsort(-1)[..., :PER_TOKEN]


def recorded(case: Group, layers: int = LAYERS) -> list[torch.Tensor]:
    """Experts of each response; the prompt's are the same."""
    shared = len(case.prompt) - 1
    own = [
        drawn(len(case.prompt) + len(each), layers, seed=10 + i)
        for i, each in enumerate(case.responses)
    ]
    for each in own:
        each[:shared] = own[0][:shared]
    return own


def with_experts(case: Group, experts: list[torch.Tensor]) -> Group:
    return Group(case.prompt, case.responses, case.weights, routed_experts=experts)


@contextlib.contextmanager
def forced(experts: torch.Tensor, layers: list[int]):
    """The n-th selection among experts in a forward returns a layer's record: a reference that
    knows nothing of layers."""
    own, calls = torch.topk, 0

    def topk(scores, k, dim=-1, *args, **named):
        nonlocal calls
        if scores.shape[-1] != EXPERTS or scores.dim() != 2 or k != PER_TOKEN:
            return own(scores, k, dim, *args, **named)
        chosen = experts[: len(scores), layers[calls % len(layers)]]
        calls += 1
        return torch.return_types.topk((scores.gather(1, chosen), chosen))

    with mock.patch("torch.topk", topk), mock.patch("torch.Tensor.topk", topk):
        yield
    assert calls == len(layers)


def dense_replay(model, case: Group, experts: list[torch.Tensor], layers: list[int]) -> None:
    for i, response in enumerate(case.responses):
        tokens = torch.cat([case.prompt, response[:-1]]).unsqueeze(0)
        with forced(experts[i], layers):
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(case.prompt) - 1 :]
        (case.weights[i] * loss_fn(logits, response, i)).backward()


def routing_layers(model) -> list[int]:
    """Layers with a router."""
    return [i for i, layer in enumerate(model.model.layers) if _is_sparse(layer)]


def _is_sparse(layer) -> bool:
    return any(parameter.dim() == 3 for parameter in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_a_dense_run_with_the_same_experts(kind, runtime):
    with in_fp64():
        model, case = zoo_model(kind), group(21, (5, 1, 9))
        layers = routing_layers(model)
        # By all layers of the model; those without a router are not read.
        experts = recorded(case)
        SharedPrefix(model, runtime).backward(
            with_experts(case, experts), loss_fn, microbatch_tokens=8
        )
        got = take_gradients(model)
        dense_replay(model, case, experts, layers)
        wanted = take_gradients(model)
        assert distance(got, wanted) <= FP64_BOUND
        dense_backward(model, case)
        assert distance(got, take_gradients(model)) > 1e-3


def test_layers_without_a_router_may_be_left_out(runtime):
    with in_fp64():
        model, case = zoo_model("deepseek_v3"), group(21, (5, 1, 9))
        layers = routing_layers(model)
        assert len(layers) == LAYERS - 1
        shared, experts = SharedPrefix(model, runtime), recorded(case)
        shared.backward(with_experts(case, experts), loss_fn)
        wanted = take_gradients(model)
        shared.backward(with_experts(case, [each[:, layers] for each in experts]), loss_fn)
        assert distance(take_gradients(model), wanted) == 0


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_select_the_same_experts_again(kind, reentrant, runtime):
    with in_fp64():
        model, case = zoo_model(kind).train(), group(21, (5, 1, 9))
        experts = recorded(case)
        shared = SharedPrefix(model, runtime)
        shared.backward(with_experts(case, experts), loss_fn, microbatch_tokens=8)
        wanted = take_gradients(model)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        shared.backward(with_experts(case, experts), loss_fn, microbatch_tokens=8)
        assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_asleep_equals_awake(runtime):
    model, case = zoo_model("qwen3_moe", torch.float32), group(70, (5, 1, 9))
    case = with_experts(case, recorded(case))
    SharedPrefix(model, runtime, sleep=False).backward(case, loss_fn, microbatch_tokens=8)
    awake = take_gradients(model)
    SharedPrefix(model, runtime).backward(case, loss_fn, microbatch_tokens=8)
    assert distance(take_gradients(model), awake) == 0


def test_rows_of_the_prompt_follow_the_first_response_that_runs(runtime):
    with in_fp64():
        model = zoo_model("mixtral")
        case = group(21, (5, 1, 9), weights=[0.0, 1.0, -0.5])
        experts = [
            drawn(21 + len(each), LAYERS, seed=i) for i, each in enumerate(case.responses)
        ]
        SharedPrefix(model, runtime).backward(with_experts(case, experts), loss_fn)
        got = take_gradients(model)
        for each in experts:
            each[:20] = experts[1][:20]
        dense_replay(model, case, experts, list(range(LAYERS)))
        assert distance(got, take_gradients(model)) <= FP64_BOUND


def conversations(model) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tokens and experts of a tree of three levels; shared rows have the same experts."""
    generator = torch.Generator().manual_seed(4)
    root, turn, *tails = (
        torch.randint(0, VOCAB, (n,), generator=generator) for n in (11, 7, 5, 1, 8)
    )
    tokens = [
        torch.cat([root, turn, tails[0]]),
        torch.cat([root, turn, tails[1]]),
        torch.cat([root, tails[2]]),
    ]
    experts = [drawn(len(each), LAYERS, seed=20 + i) for i, each in enumerate(tokens)]
    experts[1][:18] = experts[0][:18]
    experts[2][:11] = experts[0][:11]
    return tokens, experts


def test_trees(runtime):
    with in_fp64():
        model = zoo_model("qwen3_moe")
        tokens, experts = conversations(model)
        tree = Tree(
            [
                Conversation(each, weight=0.5 - i, routed_experts=own)
                for i, (each, own) in enumerate(zip(tokens, experts, strict=True))
            ]
        )

        def losses(logits, labels, i, positions):
            return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

        SharedPrefix(model, runtime).backward(tree, losses, microbatch_tokens=8)
        got = take_gradients(model)
        for i, (each, own) in enumerate(zip(tokens, experts, strict=True)):
            with forced(own, list(range(LAYERS))):
                logits = model(input_ids=each[None, :-1], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, each[1:], reduction="sum")
            ((0.5 - i) * loss).backward()
        assert distance(got, take_gradients(model)) <= FP64_BOUND


def test_a_ratio_to_scores_with_the_same_experts_is_one(runtime):
    model, case = zoo_model("olmoe", torch.float32), group(21, (5, 1, 9))
    replayed, shared = with_experts(case, recorded(case)), SharedPrefix(model, runtime)
    scores = shared.score(replayed).log_probabilities
    ratios = []

    def loss(logits, labels, i):
        own = log_probabilities(logits, labels)
        ratios.append((own - scores[i]).exp())
        return own.sum()

    shared.backward(replayed, loss)
    assert all(torch.equal(each, torch.ones_like(each)) for each in ratios)
    plain = shared.score(case).log_probabilities
    assert not any(map(torch.equal, plain, scores))


def test_recorded_and_replayed_is_the_models_own(runtime):
    """What a recorder of a dense forward finds leaves gradients as they are."""
    with in_fp64():
        model, case = zoo_model("mixtral"), group(21, (5, 1, 9))
        shared = SharedPrefix(model, runtime)
        view, experts = shared._view, []
        for response in case.responses:
            tokens = torch.cat([case.prompt, response[:-1]])
            with torch.no_grad(), Recorder(view, len(tokens)) as recorder:
                model(input_ids=tokens[None], use_cache=False)
            experts.append(recorder.experts())
        shared.backward(with_experts(case, experts), loss_fn)
        got = take_gradients(model)
        dense_backward(model, case)
        assert distance(got, take_gradients(model)) <= FP64_BOUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: each[:-2], r"shape \[24, 4, 2\]; accepted: \[26, layers"),
        (lambda each: each[:, 0], r"shape \[26, 2\]"),
        (lambda each: each.float(), "dtype torch.float32; accepted: integers"),
        (lambda each: each - EXPERTS, "have id -4; accepted: 0 and above"),
        (lambda each: each + 3, "has id 6; accepted: below 4"),
        (lambda each: each[:, :3], "routed_experts has 3 layers, and more of the model"),
        (lambda each: each[:, [0, 1, 2, 3, 0]], "routed_experts has 5 layers; accepted: 4, those"),
        (lambda each: each[..., :1], "has 1 experts per token; accepted: 2"),
    ],
)
def test_records_that_do_not_fit(change, message, runtime):
    model, case = zoo_model("mixtral", torch.float32), group(21, (5, 5, 5))
    shared = SharedPrefix(model, runtime)
    with pytest.raises(ArgumentError, match=message):
        shared.backward(with_experts(case, list(map(change, recorded(case)))), loss_fn)


def test_some_sequences_without_a_record_are_refused():
    case = group(21, (5, 1, 9))
    experts = recorded(case)
    with pytest.raises(ArgumentError, match="2 responses; accepted: 3"):
        with_experts(case, experts[:2])
    with pytest.raises(ArgumentError, match="the same for all"):
        with_experts(case, [*experts[:2], experts[2][:, :3]])
    with pytest.raises(ArgumentError, match="none; accepted|none for any"):
        Tree([Conversation([1, 2, 3]), Conversation([1, 2], routed_experts=experts[0][:2])])


@pytest.mark.parametrize("kind", ["llama", "phimoe"])
def test_models_without_such_a_router_are_refused(kind, runtime):
    """PhiMoE selects one expert after the other."""
    model, case = zoo_model(kind, torch.float32), group(21, (5, 1, 9))
    with pytest.raises(UnsupportedModelError, match="no layer selects experts"):
        SharedPrefix(model, runtime).backward(with_experts(case, recorded(case)), loss_fn)


def test_layers_that_select_twice_are_refused(runtime):
    """JetMoE's attention has experts as well."""
    model, case = zoo_model("jetmoe", torch.float32), group(21, (5, 1, 9))
    with pytest.raises(UnsupportedModelError, match="selects experts twice"):
        SharedPrefix(model, runtime).backward(with_experts(case, recorded(case)), loss_fn)
