"""Losses that read more than the logits of responses: hidden states, routers, the prompt's rows."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import distance, group, tiny
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dormouse import ArgumentError, Conversation, Group, Tree
from dormouse.hf import Output, SharedPrefix, UnsupportedModelError, log_probabilities
from dormouse.hf.batch import GroupBatch
from dormouse.hf.outputs import Losses, Request

FP64_BOUND = 1e-12
# Of models that compute some modules in FP32.
ZOO_BOUND = 1e-10
WIDE = {"dtype": torch.float64}
HIDDEN, ROUTERS = "last_hidden_state", "router_logits"
STEPS_MAX = 5
ARGUMENTS = {HIDDEN: "output_hidden_states", ROUTERS: "output_router_logits"}


def dense(model, case, loss_fn, prompt_loss_fn=None, outputs=(), prompt_outputs=()) -> float:
    """Every response with its whole prompt, through the model's own forward; the loss of the prompt
    from a forward of its own."""
    names = {*outputs, *prompt_outputs}

    def forward(tokens):
        arguments = {ARGUMENTS[name]: True for name in names}
        return model(input_ids=tokens[None], use_cache=False, **arguments)

    def rows(output, start, end, fields, prompt=None):
        logits = output.logits[0, start:end]
        if not names:
            return logits
        hidden = output.hidden_states[-1][0, start:end] if HIDDEN in fields else None
        routers = None
        if ROUTERS in fields:
            routers = tuple(each[start:end] for each in output.router_logits)
        return Output(logits, hidden, routers, prompt)

    total, first = 0.0, len(case.prompt) - 1
    for i, response in enumerate(case.responses):
        output = forward(torch.cat([case.prompt, response[:-1]]))
        prompt = None
        if prompt_outputs:
            prompt = rows(output, 0, first, prompt_outputs).without_logits()
        given = rows(output, first, None, outputs, prompt)
        loss = case.weights[i] * loss_fn(given, response, i)
        loss.backward()
        total += float(loss.detach())
    if prompt_loss_fn is not None:
        given = rows(forward(case.prompt[:-1]), 0, first, prompt_outputs)
        loss = prompt_loss_fn(given, case.prompt[1:])
        loss.backward()
        total += float(loss.detach())
    return total


def take(*modules) -> dict[str, torch.Tensor]:
    """Gradients of modules, by name, cleared from them; absent ones are left out."""
    grads = {}
    for place, module in enumerate(modules):
        named = module.named_parameters()
        grads |= {f"{place}.{n}": p.grad.clone() for n, p in named if p.grad is not None}
        module.zero_grad(set_to_none=True)
    return grads


def error(model, runtime, *losses, case=None, heads=(), sleep=True, tokens=8, **options) -> float:
    """Distance of the shared gradients from the dense ones; the losses agree."""
    case = case or group()
    wanted_loss = dense(model, case, *losses, **options)
    wanted = take(model, *heads)
    loss_fn, prompt_loss_fn = (*losses, None)[:2]
    report = SharedPrefix(model, runtime, sleep=sleep).backward(
        case, loss_fn, prompt_loss_fn=prompt_loss_fn, microbatch_tokens=tokens, **options
    )
    assert report.loss == pytest.approx(wanted_loss, rel=1e-11, abs=1e-12)
    got = take(model, *heads)
    # Rows without a loss leave zeros here, and None in the dense run.
    for name in got.keys() - wanted.keys():
        assert not got.pop(name).any()
    return distance(got, wanted)


def loss_fn(logits, labels, i):
    return -log_probabilities(logits, labels).mean() * (1 + 0.3 * i)


def prompt_loss_fn(logits, labels):
    return -0.7 * log_probabilities(logits, labels).mean()


def value_head(width: int, seed: int = 3) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(width, 1, **WIDE)


SHAPES = [(2, (1,)), (3, (1, 4)), (37, (5, 1, 9, 3)), (6, (2,) * 9)]


# The prompt's own loss.


@pytest.mark.parametrize(("prompt", "lengths"), SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_of_the_prompt(prompt, lengths, tied, runtime):
    model = tiny(tie_word_embeddings=tied)
    case = group(prompt, lengths)
    assert error(model, runtime, loss_fn, prompt_loss_fn, case=case) <= FP64_BOUND


@pytest.mark.parametrize(
    "kind", ["gemma2", "gpt_oss", "cohere", "granite", "gpt2", "mixtral", "deepseek_v3", "phi3"]
)
def test_a_loss_of_the_prompt_of_other_models(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        assert error(model, runtime, loss_fn, prompt_loss_fn) <= FP64_BOUND


@pytest.mark.parametrize("trainable", ["lm_head", "layers.3.mlp", "layers.3.self_attn.q", "norm"])
def test_a_loss_of_the_prompt_with_frozen_parameters(trainable, runtime):
    """What comes after the last K and V is trained by the prompt's rows too."""
    model = tiny(tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable in name)
    assert error(model, runtime, loss_fn, prompt_loss_fn) <= FP64_BOUND


def test_a_loss_of_the_prompt_in_place(runtime):
    def in_place(logits, labels):
        return prompt_loss_fn(logits.mul_(0.5), labels)

    def apart(logits, labels):
        return prompt_loss_fn(logits * 0.5, labels)

    model, case = tiny(), group()
    dense(model, case, loss_fn, apart)
    wanted = take(model)
    SharedPrefix(model, runtime).backward(case, loss_fn, prompt_loss_fn=in_place)
    assert distance(take(model), wanted) <= FP64_BOUND


def test_a_constant_loss_of_the_prompt(runtime):
    model, case = tiny(), group()
    dense(model, case, loss_fn)
    wanted = take(model)
    report = SharedPrefix(model, runtime).backward(
        case, loss_fn, prompt_loss_fn=lambda logits, labels: torch.tensor(3.0)
    )
    got = take(model)
    assert distance(got, wanted) <= FP64_BOUND
    plain = SharedPrefix(model, runtime).backward(case, loss_fn)
    assert report.loss == pytest.approx(plain.loss + 3)


def test_a_loss_of_the_prompt_that_is_no_scalar(runtime):
    shared = SharedPrefix(tiny(), runtime)
    with pytest.raises(TypeError, match="prompt_loss_fn returned a tensor of shape .*accepted"):
        shared.backward(group(), loss_fn, prompt_loss_fn=lambda logits, labels: logits)


def test_labels_of_the_prompt_may_be_masked_in_place(runtime):
    def masked(logits, labels):
        labels[::2] = -100
        return torch.nn.functional.cross_entropy(logits, labels)

    model, case = tiny(), group(8, (3, 1))
    dense(model, Group(case.prompt, case.responses, case.weights), loss_fn)
    wanted = take(model)
    tokens = case.prompt.clone()
    masked(model(input_ids=tokens[None, :-1]).logits[0], tokens[1:].clone()).backward()
    for name, grad in take(model).items():
        wanted[name] = wanted[name] + grad
    SharedPrefix(model, runtime).backward(case, loss_fn, prompt_loss_fn=masked)
    assert distance(take(model), wanted) <= FP64_BOUND
    assert torch.equal(case.prompt, tokens)


def test_the_plan_knows_that_the_prompt_runs_to_its_end(runtime):
    shared, flops = SharedPrefix(tiny(), runtime), []
    for request in (Request(), Request(has_prompt_loss=True)):
        with shared._plan(GroupBatch(group(), Losses(request=request)), 8) as plan:
            flops.append(plan.predict()["flops_shared"])
    assert flops[1] > flops[0]


def test_labels_of_the_prompt(runtime):
    case, seen = group(9, (3,)), []

    def prompt_loss(logits, labels):
        seen.append((len(logits), labels.tolist()))
        return logits.sum()

    SharedPrefix(tiny(), runtime).backward(case, loss_fn, prompt_loss_fn=prompt_loss)
    assert seen == [(8, case.prompt[1:].tolist())]


def test_the_logits_of_the_prompt_are_freed_before_the_responses_run(runtime):
    model, kept, alive = tiny(), [], []

    def prompt_loss(logits, labels):
        kept.append(weakref.ref(logits))
        return prompt_loss_fn(logits, labels)

    def response_loss(logits, labels, i):
        gc.collect()
        alive.append(kept[0]() is not None)
        return loss_fn(logits, labels, i)

    SharedPrefix(model, runtime).backward(group(), response_loss, prompt_loss_fn=prompt_loss)
    assert alive and not any(alive)


def test_the_prompts_graph_sleeps_with_a_loss_of_the_prompt(runtime):
    """Long enough that what a layer saves are blocks that can sleep. A copy that a busy machine
    starts too late is left out, so that more than one step may be needed to see one."""
    wide = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    model = tiny(**wide)
    case, losses = group(160, (9, 4)), {"prompt_loss_fn": prompt_loss_fn}
    shared = SharedPrefix(model, runtime)
    plain = shared.backward(case, loss_fn)
    take(model)
    for _ in range(STEPS_MAX):
        report = shared.backward(case, loss_fn, **losses)
        asleep = take(model)
        assert not report.notes
        if report.prefix["asleep_bytes_peak"] > 0:
            break
    assert report.prefix["asleep_bytes_peak"] > 0
    # One of four layers more: without the loss the last ends at K and V.
    assert report.prefix["dormant_bytes"] > 1.2 * plain.prefix["dormant_bytes"]
    SharedPrefix(model, runtime, sleep=False).backward(case, loss_fn, **losses)
    assert distance(asleep, take(model)) == 0


def test_a_model_evaluated_by_another_thread_meanwhile(runtime):
    """Its output embedding reads its own rows."""
    model, case = tiny(), group()
    tokens = torch.arange(20)[None]
    alone, seen = model(input_ids=tokens).logits, []
    stepping = threading.get_ident()

    def evaluate():
        with torch.no_grad():
            seen.append(torch.equal(model(input_ids=tokens).logits, alone))

    def hook(module, args, output):
        if threading.get_ident() == stepping:
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    model.model.norm.register_forward_hook(hook)
    assert error(model, runtime, loss_fn, prompt_loss_fn, case=case) <= FP64_BOUND
    assert seen and all(seen)


# Hidden states.


def test_a_value_head(runtime):
    model, head = tiny(), value_head(96)

    def loss(output, labels, i):
        values = head(output.last_hidden_state).squeeze(-1)
        return loss_fn(output.logits, labels, i) + (values - labels * 0.1).square().mean()

    assert error(model, runtime, loss, heads=[head], outputs=[HIDDEN]) <= FP64_BOUND


def test_a_reward_head_alone(runtime):
    """The loss reads no logits, and one row of each response."""
    model, head = tiny(tie_word_embeddings=False), value_head(96)

    def loss(output, labels, i):
        return head(output.last_hidden_state[-1]).sum() * (i + 1)

    assert error(model, runtime, loss, heads=[head], outputs=[HIDDEN]) <= FP64_BOUND


def test_a_value_head_of_a_frozen_model(runtime):
    """Nothing of the model is trained, so no logits have a graph."""
    model, head = tiny(tie_word_embeddings=False), value_head(96)
    model.requires_grad_(False)

    def loss(output, labels, i):
        values = head(output.last_hidden_state).squeeze(-1)
        return (values - head(output.prompt.last_hidden_state).mean()).square().mean() * (i + 1)

    options = {"heads": [head], "outputs": [HIDDEN], "prompt_outputs": [HIDDEN]}
    assert error(model, runtime, loss, **options) <= FP64_BOUND


def test_a_value_head_on_every_row(runtime):
    """The prompt's rows by a loss of their own, and by the loss of each response."""
    model, head = tiny(), value_head(96)

    def loss(output, labels, i):
        values = torch.cat([output.prompt.last_hidden_state, output.last_hidden_state])
        return head(values).squeeze(-1).cumsum(0).tanh().mean() * (i + 1)

    def prompt_loss(output, labels):
        assert output.prompt is None
        values = head(output.last_hidden_state).squeeze(-1)
        return prompt_loss_fn(output.logits, labels) + values.square().mean()

    options = {"heads": [head], "outputs": [HIDDEN], "prompt_outputs": [HIDDEN]}
    for case in (group(), group(2, (1, 3))):
        for tokens in (1, 256):
            assert error(
                model, runtime, loss, prompt_loss, case=case, tokens=tokens, **options
            ) <= FP64_BOUND


def test_hidden_states_of_the_prompt_alone(runtime):
    """No loss reads the prompt's logits: the output embedding does not run over them."""
    model, seen = tiny(), []

    def loss(output, labels, i):
        assert output.last_hidden_state is None and output.prompt.logits is None
        pooled = output.prompt.last_hidden_state.mean(0)
        return loss_fn(output.logits, labels, i) + pooled.tanh().sum() * (i + 1)

    assert error(model, runtime, loss, prompt_outputs=[HIDDEN]) <= FP64_BOUND
    shared = SharedPrefix(model, runtime)
    shared.backward(group(), loss, prompt_outputs=[HIDDEN])
    handle = model.lm_head.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    shared.backward(group(2, (3,)), loss, prompt_outputs=[HIDDEN], microbatch_tokens=8)
    handle.remove()
    assert seen[-2:] == [0, 3]


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "olmo2", "opt", "gpt_neox"])
def test_hidden_states_of_other_models(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        head = value_head(64)

        def loss(output, labels, i):
            values = head(output.last_hidden_state).squeeze(-1)
            pooled = head(output.prompt.last_hidden_state.mean(0))
            return loss_fn(output.logits, labels, i) + (values * pooled).tanh().mean()

        options = {"heads": [head], "outputs": [HIDDEN], "prompt_outputs": [HIDDEN]}
        assert error(model, runtime, loss, **options) <= FP64_BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trainable", [True, False])
def test_rows_of_the_prompt_are_not_changed_in_place(dtype, trainable, runtime):
    """All responses read them."""
    model = tiny(dtype=dtype, tie_word_embeddings=False)
    model.model.requires_grad_(trainable)

    def loss(output, labels, i):
        hidden = output.prompt.last_hidden_state[2:4].mul_(0.5)
        return output.logits.sum() + hidden.sum()

    with pytest.raises(RuntimeError, match="in.?place"):
        SharedPrefix(model, runtime).backward(group(), loss, prompt_outputs=[HIDDEN])


def test_rows_of_the_prompt_are_not_changed_by_its_own_loss(runtime):
    """Frozen, so that torch has no objection."""
    model = tiny(tie_word_embeddings=False)
    model.model.requires_grad_(False)

    def loss(output, labels, i):
        return output.logits.sum() * output.prompt.last_hidden_state.sum()

    def prompt_loss(output, labels):
        output.last_hidden_state.mul_(0.5)
        return output.logits.sum()

    with pytest.raises(RuntimeError, match="prompt_loss_fn changed its output in place"):
        SharedPrefix(model, runtime).backward(
            group(), loss, prompt_loss_fn=prompt_loss, prompt_outputs=[HIDDEN]
        )


def test_gradients_of_the_prompts_rows_are_accumulated_in_fp32(runtime):
    """Many equal small contributions: kept in BF16 they would stop adding up."""
    model = tiny(dtype=torch.bfloat16, num_hidden_layers=2)
    one = group(12, (1,), weights=[1.0])
    many = Group(one.prompt, one.responses * 400, [1 / 400] * 400)
    direction = torch.randn(11, 96)

    def loss(output, labels, i):
        return (output.prompt.last_hidden_state.float() * direction).sum()

    shared, name = SharedPrefix(model, runtime, sleep=False), "0.model.layers.0.mlp.up_proj.weight"
    shared.backward(one, loss, prompt_outputs=[HIDDEN])
    wanted = take(model)
    shared.backward(many, loss, prompt_outputs=[HIDDEN], microbatch_tokens=1)
    got = take(model)
    assert distance({name: got[name]}, {name: wanted[name]}) < 0.02


# Routers.


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_a_load_balancing_loss_over_whole_trajectories(kind, runtime):
    """transformers' own, of each response with its prompt: not linear in the prompt's rows."""
    with in_fp64():
        model = zoo_model(kind)
        experts = {"num_experts": 4, "top_k": 2}

        def loss(output, labels, i):
            routers = zip(output.prompt.router_logits, output.router_logits, strict=True)
            balance = load_balancing_loss_func(tuple(map(torch.cat, routers)), **experts)
            return loss_fn(output.logits, labels, i) + 0.5 * balance

        options = {"outputs": [ROUTERS], "prompt_outputs": [ROUTERS]}
        assert error(model, runtime, loss, **options) <= FP64_BOUND


def test_a_z_loss_of_prompt_and_responses(runtime):
    with in_fp64():
        model = zoo_model("mixtral")

        def z_loss(routers):
            return sum(each.logsumexp(-1).square().mean() for each in routers)

        def loss(output, labels, i):
            return loss_fn(output.logits, labels, i) + z_loss(output.router_logits)

        def prompt_loss(output, labels):
            return prompt_loss_fn(output.logits, labels) + z_loss(output.router_logits)

        options = {"outputs": [ROUTERS], "prompt_outputs": [ROUTERS]}
        assert error(model, runtime, loss, prompt_loss, **options) <= FP64_BOUND


def test_routers_of_a_prompt_that_sleeps(runtime):
    """transformers reads every layer's router after the last layer, when most are asleep."""
    with in_fp64():
        model = zoo_model("mixtral")
        case = group(300, (9, 4))

        def loss(output, labels, i):
            routers = zip(output.prompt.router_logits, output.router_logits, strict=True)
            return sum(torch.cat(pair).logsumexp(-1).square().mean() for pair in routers)

        options = {"outputs": [ROUTERS], "prompt_outputs": [ROUTERS]}
        assert error(model, runtime, loss, case=case, tokens=256, **options) <= FP64_BOUND
        report = SharedPrefix(model, runtime).backward(case, loss, **options)
        assert report.prefix["asleep_bytes_peak"] > 0


# Recurrent layers, checkpointing, dropout.


def whole(model, runtime, case, **options) -> float:
    """Losses of prompt and responses that read hidden states of both."""

    def loss(output, labels, i):
        pooled = output.prompt.last_hidden_state.tanh().mean(0)
        values = (output.last_hidden_state * pooled).tanh()
        return loss_fn(output.logits, labels, i) + values.mean() * (i + 1)

    def prompt_loss(output, labels):
        squares = output.last_hidden_state.square().mean()
        return prompt_loss_fn(output.logits, labels) + squares

    reads = {"outputs": [HIDDEN], "prompt_outputs": [HIDDEN]}
    return error(model, runtime, loss, prompt_loss, case=case, **reads, **options)


RECURRENT_ENDS = {
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"] * 2},
    "bamba": {"attn_layer_indices": [0, 2]},
}


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "bamba", "jamba", "lfm2", "falcon_mamba"])
def test_recurrent_layers(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)
        assert whole(model, runtime, group(19, (5, 1, 9)), tokens=12) <= ZOO_BOUND


@pytest.mark.parametrize("kind", RECURRENT_ENDS)
def test_a_recurrent_last_layer(kind, runtime):
    with in_fp64():
        model = zoo_model(kind, **RECURRENT_ENDS[kind])
        assert whole(model, runtime, group(19, (5, 1, 9)), tokens=12) <= ZOO_BOUND


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_routers_of_recurrent_models(kind, runtime):
    with in_fp64():
        model = zoo_model(kind)

        def loss(output, labels, i):
            routers = zip(output.prompt.router_logits, output.router_logits, strict=True)
            balance = sum(torch.cat(pair).softmax(-1).mean(0).square().sum() for pair in routers)
            return loss_fn(output.logits, labels, i) + balance

        options = {"outputs": [ROUTERS], "prompt_outputs": [ROUTERS]}
        assert error(model, runtime, loss, **options) <= ZOO_BOUND


def checkpointed(use_reentrant: bool, model):
    model.train().activation_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant, runtime):
    model = checkpointed(use_reentrant, tiny())
    assert whole(model, runtime, group()) <= FP64_BOUND
    with in_fp64():
        model = checkpointed(use_reentrant, zoo_model("bamba"))
        assert whole(model, runtime, group(19, (5, 1, 9))) <= ZOO_BOUND


def test_routers_of_checkpointed_layers(runtime):
    """A reentrant checkpoint returns routers without a graph in the dense run."""

    def loss(output, labels, i):
        routers = zip(output.prompt.router_logits, output.router_logits, strict=True)
        balance = sum(torch.cat(pair).logsumexp(-1).square().mean() for pair in routers)
        return loss_fn(output.logits, labels, i) + balance

    options = {"outputs": [ROUTERS], "prompt_outputs": [ROUTERS]}
    with in_fp64():
        model = checkpointed(False, zoo_model("mixtral"))
        assert error(model, runtime, loss, **options) <= ZOO_BOUND
        model = checkpointed(True, zoo_model("mixtral"))
        with pytest.raises(UnsupportedModelError, match="is not exact for this model"):
            SharedPrefix(model, runtime).backward(group(), loss, **options)


def test_dropout_in_the_rows_of_responses(runtime):
    """The prompt's rows drop nothing; at a rate of almost 0 nor do others."""
    model = tiny(num_hidden_layers=3)
    case, kept = group(), {"outputs": [HIDDEN], "prompt_outputs": [HIDDEN]}

    def loss(output, labels, i):
        pooled = output.prompt.last_hidden_state.tanh().mean(0)
        return loss_fn(output.logits, labels, i) + (output.last_hidden_state * pooled).mean()

    def prompt_loss(output, labels):
        return prompt_loss_fn(output.logits, labels) + output.last_hidden_state.square().mean()

    dense(model, case, loss, prompt_loss, **kept)
    wanted = take(model)
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(1e-9))
    shared = SharedPrefix(model.train(), runtime, prompt_dropout=False)
    report = shared.backward(case, loss, prompt_loss_fn=prompt_loss, **kept)
    got = {name.replace("down_proj.0", "down_proj"): grad for name, grad in take(model).items()}
    assert distance(got, wanted) <= 1e-8
    # With much dropout the check replays masks, of the prompt's rows none.
    for layer in model.model.layers:
        layer.mlp.down_proj[1].p = 0.4
    again = shared.backward(case, loss, prompt_loss_fn=prompt_loss, **kept)
    assert again.checked is not report.checked and again.checked.error <= FP64_BOUND


# What is refused, and what is checked.


@pytest.mark.parametrize("name", ["model.norm", "model.layers.3.mlp.down_proj"])
@pytest.mark.parametrize("through", ["logits", "hidden states"])
def test_a_gradient_by_parameters_of_the_prompts_rows_is_refused(name, through, runtime):
    """Inside the loss it would lack the prompt's part."""
    model = tiny(tie_word_embeddings=False)
    weight = model.get_submodule(name).weight

    def loss(output, labels, i):
        rows = output.logits if through == "logits" else output.last_hidden_state
        value = rows.square().mean() + output.prompt.last_hidden_state.square().mean()
        torch.autograd.grad(value, weight, retain_graph=True)
        return value

    shared = SharedPrefix(model, runtime)
    with pytest.raises(UnsupportedModelError, match="whose gradients lack the prompt's part"):
        shared.backward(group(), loss, outputs=[HIDDEN], prompt_outputs=[HIDDEN])


def test_a_gradient_by_the_output_embedding_is_exact(runtime):
    """No row of the prompt that the loss reads has logits."""
    model = tiny(tie_word_embeddings=False)

    def loss(output, labels, i):
        value = loss_fn(output.logits, labels, i)
        (grad,) = torch.autograd.grad(value, model.lm_head.weight, retain_graph=True)
        return value * grad.norm() + output.prompt.last_hidden_state.square().mean()

    assert error(model, runtime, loss, prompt_outputs=[HIDDEN]) <= FP64_BOUND


def test_a_gradient_of_routers_by_parameters_of_a_recurrent_model_is_refused(runtime):
    with in_fp64():
        model = zoo_model("jamba")
        weight = model.model.layers[0].input_layernorm.weight

        def loss(output, labels, i):
            value = output.router_logits[0].square().mean()
            torch.autograd.grad(value, weight, retain_graph=True)
            return value

        with pytest.raises(UnsupportedModelError, match="whose gradients lack the prompt's part"):
            SharedPrefix(model, runtime).backward(group(), loss, outputs=[ROUTERS])


def test_a_tree_has_no_prompt(runtime):
    shared = SharedPrefix(tiny(), runtime)
    case = [Conversation(torch.arange(9), [(3, 9)], 1.0)]
    for options in ({"prompt_outputs": [HIDDEN]}, {"prompt_loss_fn": prompt_loss_fn}):
        with pytest.raises(TypeError, match="losses of a tree read .*prompts.*; accepted: outputs"):
            shared.backward(case, loss_fn, **options)
        with pytest.raises(TypeError, match="losses of a tree read .*prompts.*; accepted: outputs"):
            shared.step([group(), Tree(case)], loss_fn, **options)


def test_a_model_without_an_output_embedding(runtime):
    model = tiny()
    model.get_output_embeddings = lambda: None
    shared = SharedPrefix(model, runtime)
    shared.backward(group(), loss_fn)
    model.zero_grad(set_to_none=True)
    with pytest.raises(UnsupportedModelError, match="no output embedding .*; accepted: one"):
        shared.backward(group(), loss_fn, prompt_loss_fn=prompt_loss_fn)
    assert all(p.grad is None for p in model.parameters())


def test_names_that_are_no_outputs(runtime):
    shared = SharedPrefix(tiny(), runtime)
    for argument in ("outputs", "prompt_outputs"):
        for wrong in (["attentions"], HIDDEN):
            with pytest.raises(ArgumentError, match=f"{argument} has .*accepted: a list of"):
                shared.backward(group(), loss_fn, **{argument: wrong})


def test_routers_of_a_model_without(runtime):
    model = tiny()
    with pytest.raises(UnsupportedModelError, match="router_logits"):
        SharedPrefix(model, runtime).backward(group(), loss_fn, outputs=[ROUTERS])
    assert all(p.grad is None for p in model.parameters())


def test_each_request_is_checked_once(runtime):
    model, case = tiny(), group()
    shared, head = SharedPrefix(model, runtime), value_head(96)

    def loss(output, labels, i):
        return head(output.last_hidden_state).sum()

    first = [shared.backward(case, loss_fn), shared.backward(case, loss, outputs=[HIDDEN])]
    again = [shared.backward(case, loss_fn), shared.backward(case, loss, outputs=[HIDDEN])]
    assert "last_hidden_state of responses" in first[1].checked.reason
    assert [r.checked for r in again] == [r.checked for r in first]
    assert first[0].checked is not first[1].checked


def altering_hidden_states():
    """A model that returns hidden states on which no logit depends."""
    model = tiny()

    def hook(module, args, output):
        if output.hidden_states is not None:
            mixed = output.hidden_states[-1].cumsum(1)
            output.hidden_states = (*output.hidden_states[:-1], mixed)
        return output

    model.register_forward_hook(hook)
    return model


def test_hidden_states_that_are_altered_after_the_head_are_exact_or_refused(runtime):
    """No logit depends on them: only a check that reads them can see it."""
    model = altering_hidden_states()
    shared = SharedPrefix(model, runtime)
    shared.backward(group(), loss_fn)
    model.zero_grad(set_to_none=True)
    with pytest.raises(UnsupportedModelError, match="is not exact for this model"):
        shared.backward(
            group(), lambda output, labels, i: output.last_hidden_state.sum(), outputs=[HIDDEN]
        )
    assert all(p.grad is None for p in model.parameters())


def test_logits_that_read_more_than_the_last_hidden_state(runtime):
    """A connection from the embedding to the logits passes the output embedding by."""
    model = tiny(tie_word_embeddings=True)
    read = []
    model.model.embed_tokens.register_forward_hook(lambda m, args, out: read.append(out))

    def hook(module, args, output):
        first = read.pop()
        bypass = first[:, :, :1] * 0.3
        output.logits = output.logits + bypass
        return output

    model.register_forward_hook(hook)
    shared = SharedPrefix(model, runtime)
    assert error(model, runtime, loss_fn) <= FP64_BOUND
    with pytest.raises(UnsupportedModelError, match="read more than the last hidden states: Emb"):
        shared.backward(group(), loss_fn, prompt_loss_fn=prompt_loss_fn)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("place", ["model.norm", "lm_head"])
def test_a_connection_from_the_embedding_round_all_layers(place, runtime):
    """It joins the hidden states before the output embedding reads them."""
    model, embedded = tiny(), []
    model.model.embed_tokens.register_forward_hook(lambda m, args, out: embedded.append(out))

    def join(module, args):
        return (args[0] + 0.5 * embedded[-1].tanh(),)

    model.get_submodule(place).register_forward_pre_hook(join)
    assert error(model, runtime, loss_fn, prompt_loss_fn, case=group(200)) <= FP64_BOUND


def test_capturing_leaves_the_model_as_it_found_it(runtime):
    """transformers registers its hooks once, not again after each check."""
    model = zoo_model("mixtral", torch.float32)
    shared = SharedPrefix(model, runtime)

    def loss(output, labels, i):
        return output.logits.sum() + output.router_logits[0].sum()

    counts = []
    for _ in range(2):
        model.train(not model.training)
        shared.backward(group(), loss, outputs=[ROUTERS])
        counts.append(sum(len(m._forward_hooks) for m in model.modules()))
    assert counts[0] == counts[1]
    output = model(input_ids=torch.arange(5)[None], output_router_logits=True)
    assert len(output.router_logits) == 4


def test_hooks_that_a_trainer_registers_later_are_seen(runtime):
    """Beside those that transformers registered."""
    model = tiny(dtype=torch.float32)
    shared, options = SharedPrefix(model, runtime), {"outputs": [HIDDEN]}

    def loss(output, labels, i):
        return output.last_hidden_state.sum()

    first = shared.backward(group(), loss, **options)
    model.model.layers[1].register_forward_hook(lambda module, args, out: None)
    second = shared.backward(group(), loss, **options)
    assert second.checked is not first.checked and "hooks" in second.checked.reason


def test_a_model_that_returns_routers_by_its_configuration(runtime):
    model = zoo_model("mixtral", torch.float32)
    model.config.output_router_logits = True
    shared = SharedPrefix(model, runtime)
    first = shared.backward(group(), loss_fn)
    assert shared.backward(group(), loss_fn).checked is first.checked
    assert len(model(input_ids=torch.arange(5)[None]).router_logits) == 4
