"""Losses of trees that read hidden states and routers of their labels' rows."""

from __future__ import annotations

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import conversations as random_conversations
from models import distance, group, tiny, token_losses
from test_outputs import (
    FP64_BOUND,
    HIDDEN,
    ROUTERS,
    ZOO_BOUND,
    altering_hidden_states,
    checkpointed,
    take,
    value_head,
)
from test_sleep import identical, wide
from test_trees import conversation_tree, with_least_memory

from dormouse import Conversation, Tree
from dormouse.hf import Output, SharedPrefix, UnsupportedModelError, step
from dormouse.hf.batch import TreeBatch

ARGUMENTS = {HIDDEN: "output_hidden_states", ROUTERS: "output_router_logits"}


def dense(model, conversations, losses, names) -> float:
    """Every conversation by itself, through the model's own forward."""
    total = 0.0
    for i, each in enumerate(conversations):
        if not each.used_tokens:
            continue
        asked = {ARGUMENTS[name]: True for name in names}
        output = model(input_ids=each.tokens[None], use_cache=False, **asked)
        loss = 0.0
        for begin, end in each.labels:
            rows = slice(begin - 1, end - 1)
            hidden = output.hidden_states[-1][0, rows] if HIDDEN in names else None
            routers = None
            if ROUTERS in names:
                routers = tuple(layer[rows] for layer in output.router_logits)
            given = Output(output.logits[0, rows], hidden, routers)
            own = losses(given, each.tokens[begin:end], i, range(begin, end))
            loss = loss + each.weight * own.sum()
        loss.backward()
        total += float(loss.detach())
    return total


def error(model, conversations, losses, names, runtime, heads=(), **options) -> float:
    wanted_loss = dense(model, conversations, losses, names)
    wanted = take(model, *heads)
    shared = SharedPrefix(model, runtime)
    options = {"microbatch_tokens": 9} | options
    report = shared.backward(conversations, losses, outputs=names, **options)
    assert report.loss == pytest.approx(wanted_loss, rel=1e-6, abs=1e-6)
    got = take(model, *heads)
    # Rows without a loss leave zeros here, and None in the dense run.
    for name in got.keys() - wanted.keys():
        assert not got.pop(name).any()
    return distance(got, wanted)


def with_values(head):
    """Policy and value losses, different for each conversation and position."""

    def losses(output, labels, i, positions):
        values = head(output.last_hidden_state).squeeze(-1)
        returns = torch.arange(positions.start, positions.stop).to(values).sin() + i
        return token_losses(output.logits, labels, i, positions) + (values - returns).square()

    return losses


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_tokens", [0, 5])
def test_a_value_head(seed, block_tokens, runtime):
    model, head = tiny(), value_head(96)
    case, losses = random_conversations(seed), with_values(head)
    options = {"heads": [head], "block_tokens": block_tokens}
    assert error(model, case, losses, [HIDDEN], runtime, **options) <= FP64_BOUND


def test_a_value_head_alone(runtime):
    """No loss reads logits."""
    model, head = tiny(tie_word_embeddings=False), value_head(96)

    def losses(output, labels, i, positions):
        return head(output.last_hidden_state).squeeze(-1).tanh() * (i + 1)

    case = random_conversations(2)
    assert error(model, case, losses, [HIDDEN], runtime, heads=[head]) <= FP64_BOUND


@pytest.mark.parametrize("trainable", ["norm", "layers.3.mlp", "layers.0.self_attn.k", "none"])
def test_frozen_parameters(trainable, runtime):
    """The head alone is trained in one case."""
    model, head = tiny(tie_word_embeddings=False), value_head(96)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable in name)
    case, losses = random_conversations(1), with_values(head)
    assert error(model, case, losses, [HIDDEN], runtime, heads=[head]) <= FP64_BOUND


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "opt", "bamba", "qwen3_next", "gptj"])
def test_hidden_states_of_other_models(kind, runtime):
    with in_fp64():
        model, head = zoo_model(kind), value_head(64)
        case, losses = random_conversations(3, longest=50), with_values(head)
        options = {"heads": [head], "block_tokens": 6}
        assert error(model, case, losses, [HIDDEN], runtime, **options) <= ZOO_BOUND


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "jamba"])
def test_a_z_loss_of_routers(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)

        def losses(output, labels, i, positions):
            z = sum(layer.logsumexp(-1).square() for layer in output.router_logits)
            return token_losses(output.logits, labels, i, positions) + 0.3 * z

        case = random_conversations(0)
        assert error(model, case, losses, [ROUTERS], runtime) <= ZOO_BOUND


def test_all_outputs(runtime):
    with in_fp64():
        model, head = zoo_model("mixtral"), value_head(64)

        def losses(output, labels, i, positions):
            z = sum(layer.softmax(-1)[:, 0] for layer in output.router_logits)
            return with_values(head)(output, labels, i, positions) * z

        case, options = random_conversations(5), {"heads": [head], "block_tokens": 7}
        assert error(model, case, losses, [HIDDEN, ROUTERS], runtime, **options) <= ZOO_BOUND


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant, runtime):
    model, head = checkpointed(use_reentrant, tiny()), value_head(96)
    model.enable_input_require_grads()
    case, losses = random_conversations(4), with_values(head)
    assert error(model, case, losses, [HIDDEN], runtime, heads=[head]) <= FP64_BOUND


@pytest.mark.parametrize("kind", ["llama", "bamba"])
def test_what_runs_forward_again(kind, runtime):
    """Losses of labels on such a node are computed in its second forward."""
    with in_fp64():
        model, width = (tiny(), 96) if kind == "llama" else (zoo_model(kind), 64)
        case, head = random_conversations(2), value_head(width)
        options = with_least_memory(SharedPrefix(model, runtime), case)
        found = error(model, case, with_values(head), [HIDDEN], runtime, heads=[head], **options)
        with SharedPrefix(model, runtime)._plan(TreeBatch(Tree(case), **tree(options)), 9) as plan:
            assert plan.predict()["recomputed_rows"] > 0
    assert found <= ZOO_BOUND


def tree(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "microbatch_tokens"}


def test_rows_that_several_conversations_score_may_be_changed_by_each(runtime):
    """Of a frozen model, so that torch has no objection."""
    model, head = tiny(tie_word_embeddings=False), value_head(96)
    model.requires_grad_(False)
    ids = torch.arange(3, 33)
    case = [
        Conversation(torch.cat([ids, torch.tensor([i, 2 * i])]), [(10, 32)], 1.0 + i)
        for i in (1, 2, 3)
    ]

    def apart(output, labels, i, positions):
        return (output.last_hidden_state * (i + 1)).sum(-1) * head.bias

    def in_place(output, labels, i, positions):
        return output.last_hidden_state.mul_(i + 1).sum(-1) * head.bias

    dense(model, case, apart, [HIDDEN])
    wanted = take(model, head)
    SharedPrefix(model, runtime).backward(case, in_place, outputs=[HIDDEN], microbatch_tokens=9)
    assert distance(take(model, head), wanted) <= FP64_BOUND


def test_nodes_sleep(runtime):
    """Bit for bit as awake."""
    model, results = wide(num_hidden_layers=4), []
    head = torch.nn.Linear(model.config.hidden_size, 1)
    for sleep in (False, True):
        shared = SharedPrefix(model, runtime, sleep=sleep)
        report = shared.backward(
            conversation_tree(), with_values(head), outputs=[HIDDEN], microbatch_tokens=64
        )
        results.append(take(model, head))
    assert identical(*results)
    assert report.notes == [] and all(each["asleep_bytes_peak"] > 0 for each in report.prefixes)


def keeping_the_first(losses):
    """Losses that also read hidden states which an earlier call received."""
    kept = []

    def with_first(output, labels, i, positions):
        own = losses(output, labels, i, positions)
        kept.append(output.last_hidden_state)
        return own + kept[0].sum(-1)[0].tanh() * (i + 1)

    return with_first


def test_hidden_states_of_another_branch_are_refused(runtime):
    """Its node has run its backward: the gradient would be lost."""
    ids, spans = torch.arange(40), [(6, 15), (16, 18)]
    case = [
        Conversation(torch.cat([ids[:6], ids[10 * n : 10 * n + 9], ids[m : m + 3]]), spans, 1.0)
        for n in (1, 2)
        for m in (1, 2)
    ]
    shared = SharedPrefix(tiny(), runtime)
    losses = keeping_the_first(with_values(value_head(96)))
    with pytest.raises(UnsupportedModelError, match="an earlier call received"):
        shared.backward(case, losses, outputs=[HIDDEN])


def test_rows_of_a_prompt_of_an_earlier_step_are_refused(runtime):
    kept = []

    def of_prompt(output, labels, i):
        kept.append(output.prompt.last_hidden_state)
        return output.logits.sum() + kept[0].sum()

    shared = SharedPrefix(tiny(), runtime)
    shared.backward(group(), of_prompt, prompt_outputs=[HIDDEN])
    with pytest.raises(UnsupportedModelError, match="an earlier call received"):
        shared.backward(group(), of_prompt, prompt_outputs=[HIDDEN])


def test_each_request_of_trees_is_checked(runtime):
    model, case = tiny(), random_conversations(0)
    shared, losses = SharedPrefix(model, runtime), with_values(value_head(96))
    plain = shared.backward(case, token_losses).checked
    first = shared.backward(case, losses, outputs=[HIDDEN]).checked
    assert first is not plain
    assert shared.backward(case, losses, outputs=[HIDDEN]).checked is first
    assert shared.backward(case, token_losses).checked is plain


def test_hidden_states_that_are_altered_after_the_head_are_refused(runtime):
    """No logit depends on them."""
    model = altering_hidden_states()
    shared, case = SharedPrefix(model, runtime), random_conversations(0)
    shared.backward(case, token_losses)
    model.zero_grad(set_to_none=True)
    with pytest.raises(UnsupportedModelError, match="is not exact for this model"):
        shared.backward(case, with_values(value_head(96)), outputs=[HIDDEN])
    assert all(p.grad is None for p in model.parameters())


def test_a_row_taken_for_another_is_seen(runtime, monkeypatch):
    """By the check, and by the comparison without it."""

    def first_rows(self, output):
        rest = output.without_logits().rows(0, len(output.logits))
        return step.replace(rest, logits=output.logits)

    monkeypatch.setattr(step.KeptRows, "of", first_rows)
    model, head = tiny(), value_head(96)
    case, losses = random_conversations(1), with_values(head)
    with pytest.raises(UnsupportedModelError, match="not exact"):
        error(model, case, losses, [HIDDEN], runtime, heads=[head])
    take(model, head)
    monkeypatch.setattr(SharedPrefix, "_check_if_needed", lambda *_: None)
    with pytest.raises(AssertionError, match="comparison failed"):
        error(model, case, losses, [HIDDEN], runtime, heads=[head])


def test_labels_without_a_loss_per_label(runtime):
    shared = SharedPrefix(tiny(), runtime)
    with pytest.raises(TypeError, match="the loss of each label"):
        shared.backward(
            random_conversations(0),
            lambda output, labels, i, positions: output.last_hidden_state.sum(),
            outputs=[HIDDEN],
        )
