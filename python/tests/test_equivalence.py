"""The shared step's gradients against the dense loop's (docs/method.md §10)."""

from __future__ import annotations

import pytest
import torch
from models import KINDS, dense_backward, distance, group, loss_fn, take_gradients, tiny

from dormouse import Group
from dormouse.hf import SharedPrefix, attention

FP64_BOUND = 1e-10


def both_ways(model, case, runtime, **options):
    """(shared, dense) gradients, and the two losses."""
    dense_loss = dense_backward(model, case)
    dense = take_gradients(model)
    report = SharedPrefix(model, runtime).backward(case, loss_fn, **options)
    return take_gradients(model), dense, report.loss, dense_loss


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_gradients_are_the_dense_ones(kind, runtime):
    shared, dense, loss, dense_loss = both_ways(tiny(kind), group(), runtime, microbatch_tokens=8)
    assert distance(shared, dense) <= FP64_BOUND
    assert loss == pytest.approx(dense_loss, rel=1e-10)


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        (2, (1,)),
        (2, (3, 1)),
        (3, (1, 1, 1)),
        (64, (1,)),
        (5, (40, 2, 17)),
        (130, (7,) * 8),
    ],
)
@pytest.mark.parametrize("microbatch_tokens", [1, 16, 4096])
def test_every_shape_of_group(prompt, lengths, microbatch_tokens, runtime):
    case = group(prompt, lengths)
    shared, dense, *_ = both_ways(tiny(), case, runtime, microbatch_tokens=microbatch_tokens)
    assert distance(shared, dense) <= FP64_BOUND


def test_neighbours_of_one_length_are_attended_in_one_call(runtime):
    assert attention.runs_of([(0, 4), (4, 8), (8, 10), (10, 14)]) == [
        attention.Run(0, 2, 4),
        attention.Run(8, 1, 2),
        attention.Run(10, 1, 4),
    ]
    case = group(9, (4, 4, 2, 5, 5, 5, 1, 1))
    shared, dense, *_ = both_ways(tiny(), case, runtime, microbatch_tokens=4096)
    assert distance(shared, dense) <= FP64_BOUND


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(4, 4), (3, 4), (1,)])
def test_any_number_of_threads_and_rows(threads, lengths, runtime):
    """The prefix backward is split by both."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shared, dense, *_ = both_ways(tiny(), group(9, lengths), runtime, microbatch_tokens=4096)
    finally:
        torch.set_num_threads(before)
    assert distance(shared, dense) <= FP64_BOUND


def test_parts_of_a_prefix_backward():
    assert attention._parts(heads=3, rows=1152, threads=2) == 2
    assert attention._parts(heads=8, rows=1152, threads=2) == 1
    assert attention._parts(heads=6, rows=1152, threads=4) == 2
    assert attention._parts(heads=3, rows=1151, threads=2) == 1, "not in equal parts"
    assert attention._parts(heads=3, rows=1152, threads=16) == 1, "too many"


def test_a_loss_may_change_its_logits_in_place(runtime):
    model, case = tiny(), group(9, (4, 3, 6))
    dense_backward(model, case, lambda logits, labels, i: loss_fn(logits / 0.7, labels, i))
    dense = take_gradients(model)
    SharedPrefix(model, runtime).backward(
        case, lambda logits, labels, i: loss_fn(logits.div_(0.7), labels, i), microbatch_tokens=4096
    )
    assert distance(take_gradients(model), dense) <= FP64_BOUND


def test_gradients_are_added_to_those_already_there(runtime):
    model, case = tiny(), group()
    dense_backward(model, case)
    once = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    shared.backward(case, loss_fn)
    shared.backward(case, loss_fn)
    twice = take_gradients(model)
    assert distance(twice, {n: 2 * g for n, g in once.items()}) <= FP64_BOUND


def test_equal_prompts_and_responses_are_kept_apart_by_weight(runtime):
    same = group(20, (6,))
    case = Group(same.prompt, same.responses * 3, [1.0, -1.0, 0.25])
    shared, dense, *_ = both_ways(tiny(), case, runtime, microbatch_tokens=7)
    assert distance(shared, dense) <= FP64_BOUND


def test_attention_biases_and_untied_heads(runtime):
    model = tiny("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    shared, dense, *_ = both_ways(model, group(), runtime)
    assert distance(shared, dense) <= FP64_BOUND


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_rotary_scalings_that_depend_on_positions_alone(scaling, runtime):
    rope = {"rope_type": scaling, "rope_theta": 10000.0, "factor": 4.0}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if scaling != "linear":
        rope["original_max_position_embeddings"] = 16
    model = tiny("llama", rope_parameters=rope)
    shared, dense, *_ = both_ways(model, group(), runtime)
    assert distance(shared, dense) <= FP64_BOUND


@pytest.mark.parametrize(
    "trainable", ["model.layers.3", "self_attn.v_proj", "lm_head", "layers.1.mlp"]
)
def test_frozen_parameters_get_no_gradient_and_change_nobody_elses(trainable, runtime):
    model = tiny(tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable in name)
    shared, dense, *_ = both_ways(model, group(), runtime, microbatch_tokens=8)
    assert distance(shared, dense) <= FP64_BOUND
    assert all(trainable in name for name in shared)


class LowRank(torch.nn.Linear):
    """A frozen linear layer with a trainable low-rank addition, as adapters build it."""

    def __init__(self, base: torch.nn.Linear, rank: int = 2):
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.load_state_dict(base.state_dict())
        self.to(base.weight.dtype).requires_grad_(False)
        options = {"dtype": base.weight.dtype}
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features, **options) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, rank, **options) * 0.1)

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def test_low_rank_adapters_on_a_frozen_model(runtime):
    model = tiny().requires_grad_(False)
    for layer in model.model.layers[2:]:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    shared, dense, *_ = both_ways(model, group(), runtime, microbatch_tokens=8)
    assert distance(shared, dense) <= FP64_BOUND
    assert len(shared) == 2 * 2 * 2


def test_accumulators_keep_more_bits_than_a_low_precision_model(runtime):
    """Many equal small contributions: kept in BF16 they would stop adding up."""
    model = tiny(dtype=torch.bfloat16)
    one = group(24, (4,), weights=[1.0])
    many = Group(one.prompt, one.responses * 64, [1 / 64] * 64)
    shared = SharedPrefix(model, runtime)
    shared.backward(one, loss_fn=lambda logits, labels, i: loss_fn(logits.float(), labels, 0))
    wanted = take_gradients(model)
    shared.backward(
        many, loss_fn=lambda logits, labels, i: loss_fn(logits.float(), labels, 0), microbatch_tokens=4
    )
    name = "model.layers.0.self_attn.k_proj.weight"
    got = take_gradients(model)
    assert distance({name: got[name]}, {name: wanted[name]}) < 0.03


def test_a_hundred_updates_end_at_the_same_parameters(runtime):
    """Replay: the same groups in the same order, updated both ways."""
    ends = []
    for shared_way in (False, True):
        model = tiny(num_hidden_layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        shared = SharedPrefix(model, runtime)
        for step in range(100):
            case = group(12 + step % 7, (3, 1 + step % 5), weights=[0.5, 0.5], seed=step)
            if shared_way:
                shared.backward(case, loss_fn)
            else:
                dense_backward(model, case)
            optimizer.step()
            optimizer.zero_grad()
        ends.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert distance(ends[1], ends[0]) <= 1e-8


def refused(*arguments):
    raise AssertionError("a loss of weight 0 was asked for")


def test_a_group_without_weights_runs_nothing(runtime):
    model, case = tiny(), group(weights=[0.0] * 4)
    shared, phases = SharedPrefix(model, runtime), []
    report = shared.backward(case, refused, on_phase=phases.append)
    assert report.loss == 0.0 and not any(report.counts.values()) and phases == ["end"]
    assert take_gradients(model) == {}
    assert shared.predict(case)["reason"] == "no token carries loss"


def test_a_group_without_weights_has_the_loss_of_its_prompt(runtime):
    model, case = tiny(), group(weights=[0.0] * 4)
    logits = model(input_ids=case.prompt[None], use_cache=False).logits[0, :-1]
    loss_fn(logits, case.prompt[1:], 0).backward()
    dense = take_gradients(model)
    report = SharedPrefix(model, runtime).backward(
        case, refused, prompt_loss_fn=lambda logits, labels: loss_fn(logits, labels, 0)
    )
    assert distance(take_gradients(model), dense) <= FP64_BOUND
    assert report.counts["microbatch_tokens"] == 0


def test_ranks_run_a_group_without_weights_with_zeros_for_its_losses(runtime):
    model = tiny()
    report = SharedPrefix(model, runtime).step([group(weights=[0.0] * 4)], refused)
    gradients = take_gradients(model)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert not any(gradient.any() for gradient in gradients.values())
    assert report.loss == 0.0 and report.dummy_microbatches == 1
