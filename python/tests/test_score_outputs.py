"""Hidden states, routers and chosen logits of a differentiable call, beside the padded batch."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import NamedTuple

import peft
import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import distance, take_gradients, tiny
from test_outputs import value_head
from test_packed import packed
from test_token_scores import GRAPHS, a_batch, check_ranks, padded
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dormouse import ArgumentError, Group
from dormouse.hf import SharedPrefix, UnsupportedModelError, mixers
from dormouse.hf.step import Step
from dormouse.hf.support import Way

HIDDEN, ROUTERS, CHOSEN = "last_hidden_state", "router_logits", "chosen_logits"
WIDTH = 96
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"


class Dense(NamedTuple):
    """What the padded batch gives at every column but the first, each at the place of the token
    that its row predicts; of the last columns, and of those before."""

    log_probabilities: torch.Tensor
    entropies: torch.Tensor
    chosen_logits: torch.Tensor
    last_hidden_state: torch.Tensor
    router_logits: tuple[torch.Tensor, ...]
    prompt_hidden_state: torch.Tensor
    prompt_router_logits: tuple[torch.Tensor, ...]


def dense(model, ids, mask, keep, temperature=1.0, routers=False) -> Dense:
    """The whole padded batch in one forward of the model. Zeros of rows without a response."""
    options = {"output_hidden_states": True, "use_cache": False}
    if routers:
        options["output_router_logits"] = True
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, **options)
    columns = ids.shape[1]
    # Of the token itself and of the one before it, in rows with a response.
    has = mask.bool() & mask.bool().roll(1, 1) & mask[:, -keep:].any(1, keepdim=True)
    has[:, 0] = False

    def shifted(rows):
        rows = rows.view(len(ids), columns, -1).roll(1, 1)
        return torch.where(has[..., None], rows, 0.0)

    def parts(rows):
        return rows[:, -keep:], rows[:, :-keep]

    hidden, prompt_hidden = parts(shifted(output.hidden_states[-1]))
    both = [parts(shifted(each)) for each in (output.router_logits if routers else ())]
    logits = output.logits[:, -keep - 1 : -1]
    found = torch.log_softmax(logits / temperature, -1)
    labels, own = ids[:, -keep:, None], mask[:, -keep:]
    return Dense(
        found.gather(2, labels)[..., 0] * own,
        -(found.exp() * found).sum(-1) * own,
        logits.gather(2, labels)[..., 0] * own,
        hidden,
        tuple(each for each, _ in both),
        prompt_hidden,
        tuple(each for _, each in both),
    )


def of_scores(scores) -> Dense:
    prompt = scores.prompt
    return Dense(
        scores.log_probabilities,
        scores.entropies,
        scores.chosen_logits,
        scores.last_hidden_state,
        scores.router_logits or (),
        None if prompt is None else prompt.last_hidden_state,
        () if prompt is None else prompt.router_logits or (),
    )


def with_holes(mask, keep):
    """The loss's mask: a response has tokens of tools between its own."""
    own = mask[:, -keep:].clone()
    own[:, 1::3] = 0
    return own.double()


def loss_of(values: Dense, head, mask):
    """Mixes rows, and is linear in none of what it reads. It reads one of them twice."""
    critic = head(values.last_hidden_state).squeeze(-1)
    scale = torch.linspace(0.5, 2, len(mask), dtype=torch.float64)[:, None]
    policy = (values.log_probabilities - critic.detach()).clamp(-2, 2).exp() * scale
    total = ((policy + critic.square() - 0.1 * values.entropies) * mask).sum() / mask.sum()
    total = total + (values.chosen_logits * mask).tanh().sum() * 0.3
    total = total + (values.last_hidden_state.sin() * mask[..., None]).mean()
    if values.prompt_hidden_state is not None:
        pooled = values.prompt_hidden_state.tanh().mean(1)
        total = total + (pooled * pooled.roll(1, 0)).sum() * 1e-1
    return total


def check(model, runtime, graphs, batch, temperature=0.7, prompts=True, tokens=7, **options):
    """Compares values, and gradients of model and value head, with those of the dense batch."""
    ids, mask, keep = batch
    head, own = value_head(model.get_input_embeddings().weight.shape[1]), with_holes(mask, keep)
    wanted = dense(model, ids, mask, keep, temperature)
    if not prompts:
        wanted = wanted._replace(prompt_hidden_state=None)
    loss_of(wanted, head, own).backward()
    of_model, of_head = take_gradients(model), take_gradients(head)
    scores = SharedPrefix(model, runtime, **options).score(
        ids,
        mask,
        keep=keep,
        temperature=temperature,
        entropy=True,
        outputs=[HIDDEN, CHOSEN],
        prompt_outputs=[HIDDEN] if prompts else [],
        graphs=graphs,
        microbatch_tokens=tokens,
    )
    found = of_scores(scores)
    for name, each in found._asdict().items():
        if isinstance(each, torch.Tensor):
            torch.testing.assert_close(each, getattr(wanted, name), rtol=0, atol=1e-10, msg=name)
    loss_of(found, head, own).backward()
    assert distance(take_gradients(model), of_model) < 1e-10
    assert distance(take_gradients(head), of_head) < 1e-10
    return scores


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("prompts", [True, False])
def test_gradients_are_those_of_the_dense_batch(prompts, graphs, runtime):
    """Loss and value head read the values of all rows together."""
    model = tiny()
    scores = check(model, runtime, graphs, a_batch(), prompts=prompts)
    assert scores.graphs == graphs and scores.router_logits is None
    assert (scores.prompt is not None) == prompts


@pytest.mark.parametrize("graphs", GRAPHS)
def test_prompts_that_sleep(graphs, runtime):
    model = tiny()
    scores = check(model, runtime, graphs, padded([200, 150, 200, 200, 150], [4, 6, 1, 8, 3]))
    assert scores.counts["groups"] == 2
    assert runtime.stats()["asleep"]["peak_bytes"] > 0


@pytest.mark.parametrize("graphs", GRAPHS)
def test_with_adapters(graphs, runtime):
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"])
    model = peft.get_peft_model(tiny(), settings).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    check(model, runtime, graphs, a_batch())


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_head_that_does_not_run_apart(graphs, runtime):
    model = tiny(tie_word_embeddings=True)
    model.register_forward_hook(lambda module, args, output: None)
    check(model, runtime, graphs, a_batch())


@pytest.mark.parametrize("graphs", GRAPHS)
def test_responses_that_run_one_at_a_time(graphs, runtime, monkeypatch):
    monkeypatch.setattr(mixers, "ways_of", lambda view: [Way.ALONE])
    model = tiny()
    assert check(model, runtime, graphs, a_batch()).checked.way is Way.ALONE


def balance(routers, has):
    """As transformers computes it, of a padded batch."""
    of_tokens = tuple(each[has] for each in routers)
    return load_balancing_loss_func(of_tokens, num_experts=4, top_k=2)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_losses_of_routers(graphs, runtime):
    """Over the tokens of prompts and responses, all but the last of each row."""
    with in_fp64():
        model, (ids, mask, keep) = zoo_model("mixtral"), a_batch()
        own = with_holes(mask, keep)

        def loss(values: Dense, has):
            pairs = zip(values.prompt_router_logits, values.router_logits, strict=True)
            joined = [torch.cat(pair, 1) for pair in pairs]
            z_loss = sum(each.logsumexp(-1).square().mean() for each in values.router_logits)
            return (values.log_probabilities * own).sum() + balance(joined, has) + 0.1 * z_loss

        wanted = dense(model, ids, mask, keep, routers=True)
        # Places of a row's tokens but its first, of rows with a response.
        has = mask.bool() & mask.bool().roll(1, 1) & mask[:, -keep:].any(1, keepdim=True)
        loss(wanted, has).backward()
        gradients = take_gradients(model)
        options = {"outputs": [ROUTERS], "prompt_outputs": [ROUTERS], "graphs": graphs}
        shared = SharedPrefix(model, runtime)
        found = of_scores(shared.score(ids, mask, keep=keep, microbatch_tokens=7, **options))
        assert len(found.router_logits) == 4 and found.last_hidden_state is None
        for kind in ("router_logits", "prompt_router_logits"):
            for got, own_logits in zip(getattr(found, kind), getattr(wanted, kind), strict=True):
                torch.testing.assert_close(got, own_logits, rtol=0, atol=1e-10)
        loss(found, has).backward()
        assert distance(take_gradients(model), gradients) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_packed_sequences(graphs, runtime):
    """The same bits as of the padded batch, and the same gradients."""
    model, (ids, mask, keep) = tiny(), a_batch()
    tokens, bounds, prompts, of_packed, of_padded = packed(ids, mask, keep)
    options = {"outputs": [HIDDEN, CHOSEN], "prompt_outputs": [HIDDEN], "graphs": graphs}
    shared = SharedPrefix(model, runtime)
    found = shared.score_packed(tokens, bounds, prompt_lengths=prompts, **options)
    own = shared.score(ids, mask, keep=keep, **options)
    assert torch.equal(found.chosen_logits[of_packed], own.chosen_logits[of_padded])
    assert torch.equal(found.last_hidden_state[of_packed], own.last_hidden_state[of_padded])
    assert not found.last_hidden_state[~of_packed].any()
    # The prompt's rows, at the places of the tokens that they predict.
    whole = torch.cat([own.prompt.last_hidden_state, own.last_hidden_state], 1)[mask.bool()]
    both = found.prompt.last_hidden_state + found.last_hidden_state
    assert torch.equal(both, whole) and not found.prompt.last_hidden_state[of_packed].any()
    gradients = []
    for scores in (found, own):
        hidden = scores.prompt.last_hidden_state, scores.last_hidden_state
        (sum(each.sin().sum() for each in hidden) + scores.chosen_logits.sum()).backward()
        gradients.append(take_gradients(model))
    assert distance(*gradients) < 1e-12


@pytest.mark.parametrize("apart", [True, False])
def test_values_are_the_same_bits_in_all_modes(apart, runtime):
    with in_fp64():
        model = zoo_model("mixtral", torch.float32)
    if not apart:
        model.register_forward_hook(lambda module, args, output: None)
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    names = {"outputs": [HIDDEN, ROUTERS, CHOSEN], "prompt_outputs": [HIDDEN, ROUTERS]}
    with torch.no_grad():
        alone = shared.score(ids, mask, keep=keep, **names).tensors()
        plain = shared.score(ids, mask, keep=keep).log_probabilities
    assert len(alone) == 1 + 1 + 1 + 4 + 1 + 4 and not any(each.requires_grad for each in alone)
    assert torch.equal(plain, alone[0]), "what else is asked for changes no value"
    for graphs in GRAPHS:
        found = shared.score(ids, mask, keep=keep, graphs=graphs, **names).tensors()
        assert all(each.requires_grad for each in found)
        assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", [HIDDEN, CHOSEN, "log_probabilities", "prompt"])
def test_values_that_no_loss_reads_have_no_gradient(name, graphs, runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    options = {"outputs": [HIDDEN, CHOSEN], "prompt_outputs": [HIDDEN], "entropy": True}

    def loss(values):
        if name == "prompt":
            prompt = getattr(values, "prompt", None)
            hidden = values.prompt_hidden_state if prompt is None else prompt.last_hidden_state
            return hidden.sin().sum()
        return getattr(values, name).sin().sum()

    loss(dense(model, ids, mask, keep)).backward()
    wanted = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    loss(shared.score(ids, mask, keep=keep, graphs=graphs, **options)).backward()
    got = take_gradients(model)
    assert ("lm_head.weight" in got) == (name in (CHOSEN, "log_probabilities"))
    assert distance(got, wanted) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_hooks_of_parameters_see_one_whole_gradient(graphs, runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    seen = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(1))
    options = {"outputs": [HIDDEN], "prompt_outputs": [HIDDEN], "graphs": graphs}
    scores = SharedPrefix(model, runtime).score(ids, mask, keep=keep, **options)
    assert not seen
    values = scores.log_probabilities, scores.last_hidden_state, scores.prompt.last_hidden_state
    sum(each.square().sum() for each in values).backward()
    assert len(seen) == len(list(model.parameters()))


@pytest.mark.parametrize("graphs", GRAPHS)
def test_frozen_layers(graphs, runtime):
    """Hidden states of a frozen decoder have no gradient, and the output embedding has its own."""
    model, (ids, mask, keep) = tiny(), a_batch()
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    head = value_head(WIDTH)

    def loss(values):
        return values.log_probabilities.sum() + head(values.last_hidden_state).sin().sum()

    loss(dense(model, ids, mask, keep)).backward()
    gradients = take_gradients(model), take_gradients(head)
    options = {"outputs": [HIDDEN], "graphs": graphs}
    loss(SharedPrefix(model, runtime).score(ids, mask, keep=keep, **options)).backward()
    assert distance(take_gradients(model), gradients[0]) < 1e-10
    assert distance(take_gradients(head), gradients[1]) < 1e-10


PARTS = (slice(0, 2), slice(2, 5), slice(5, 7))


@pytest.mark.parametrize("graphs", GRAPHS)
def test_parts_of_a_window(graphs, runtime):
    model, head, (ids, mask, keep) = tiny(), value_head(WIDTH), a_batch()
    own = with_holes(mask, keep)

    def parts(values, rows):
        return Dense(*(each[rows] if isinstance(each, torch.Tensor) else each for each in values))

    for rows in PARTS:
        # Each microbatch's dense forward by itself.
        loss_of(parts(dense(model, ids, mask, keep, 0.7), rows), head, own[rows]).backward()
    wanted = take_gradients(model), take_gradients(head)
    options = {"outputs": [HIDDEN, CHOSEN], "prompt_outputs": [HIDDEN], "entropy": True}
    shared = SharedPrefix(model, runtime)
    window = shared.window(ids, mask, keep=keep, temperature=0.7, graphs=graphs, **options)
    for rows in PARTS:
        part = of_scores(window.part(rows, is_last=rows is PARTS[-1]))
        assert part.last_hidden_state.shape == (rows.stop - rows.start, keep, WIDTH)
        loss_of(part, head, own[rows]).backward()
    assert distance(take_gradients(model), wanted[0]) < 1e-10
    assert distance(take_gradients(head), wanted[1]) < 1e-10


@pytest.mark.parametrize("graphs", GRAPHS)
def test_a_batch_without_responses(graphs, runtime):
    """A rank's empty share has the shapes of others, so that its value head runs."""
    with in_fp64():
        model = zoo_model("mixtral")
        shared, (ids, mask, keep) = SharedPrefix(model, runtime), a_batch()
        options = {"outputs": [HIDDEN, ROUTERS], "prompt_outputs": [ROUTERS], "keep": keep}
        whole = shared.score(ids, mask, graphs=graphs, **options).tensors()
        empty = shared.score(ids[:0], mask[:0], graphs=graphs, **options)
        for own, other in zip(empty.tensors(), whole, strict=True):
            assert own.shape == (0, *other.shape[1:]) and own.dtype is other.dtype
        none = shared.score(ids, torch.zeros_like(mask), graphs=graphs, **options)
        assert [each.shape for each in none.tensors()] == [each.shape for each in whole]
        sum(each.sum() for each in empty.tensors()).backward()
    found = take_gradients(model)
    assert found and not any(bool(each.any()) for each in found.values())


class LossError(Exception):
    """Of a trainer's loss."""


@pytest.mark.parametrize("graphs", GRAPHS)
def test_errors_leave_nothing_behind(graphs, runtime, monkeypatch):
    """One in the loss, and one in the backward; the next step is right."""
    model, (ids, mask, keep) = tiny(), padded([200, 150, 200], [4, 6, 8])
    shared = SharedPrefix(model, runtime)
    options = {"outputs": [HIDDEN], "prompt_outputs": [HIDDEN], "keep": keep, "graphs": graphs}

    def loss():
        scores = shared.score(ids, mask, **options)
        values = scores.log_probabilities, scores.last_hidden_state, scores.prompt.last_hidden_state
        return sum(each.square().sum() for each in values)

    loss().backward()
    wanted = take_gradients(model)

    def fails(self, node, is_last):
        raise LossError

    def in_loss():
        raise LossError(loss())

    def in_backward():
        with monkeypatch.context() as patched:
            patched.setattr(Step, "_prefix_backward", fails)
            loss().backward()

    for work in (in_loss, in_backward):
        with pytest.raises(LossError):
            work()
        gc.collect()
        assert runtime.stats()["asleep"]["current_bytes"] == 0
        assert all(p.grad is None for p in model.parameters())
    loss().backward()
    got = take_gradients(model)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_scores_are_freed_without_the_collector(runtime):
    """No value refers to the call that refers to it."""
    model, (ids, mask, keep) = tiny(dtype=torch.float32), padded([200, 150, 200], [4, 6, 8])
    options = {"outputs": [HIDDEN], "prompt_outputs": [HIDDEN], "graphs": "kept"}
    shared = SharedPrefix(model, runtime)
    shared.score(ids, mask, keep=keep, **options)
    gc.collect()
    gc.disable()
    try:
        scores = shared.score(ids, mask, keep=keep, **options)
        assert runtime.stats()["asleep"]["current_bytes"] > 0
        del scores
        assert runtime.stats()["asleep"]["current_bytes"] == 0
    finally:
        gc.enable()


def test_logits_are_not_held(runtime):
    """Of chosen logits no more than of log-probabilities."""
    model = tiny(vocab_size=20_000, dtype=torch.float32, num_hidden_layers=1).requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    ids, mask, keep = a_batch()
    shared = SharedPrefix(model, runtime)
    options = {"keep": keep, "graphs": "kept", "microbatch_tokens": 7, "outputs": [HIDDEN, CHOSEN]}
    shared.score(ids, mask, **options)
    gc.collect()
    before = runtime.stats()["allocated"]["current_bytes"]
    scores = shared.score(ids, mask, **options)
    logits_bytes = int(mask[:, -keep:].sum()) * 20_000 * 4
    assert scores.chosen_logits.requires_grad
    assert runtime.stats()["allocated"]["current_bytes"] - before < logits_bytes / 4


@pytest.mark.slow
@pytest.mark.parametrize("graphs", GRAPHS)
def test_distributed_data_parallel_reduces_the_gradients(graphs, tmp_path):
    def values(*batch):
        found = dense(*batch)
        return found.log_probabilities.sum() + found.last_hidden_state.sum()

    check_ranks(graphs, tmp_path, "outputs", values=values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ["attentions"]}, "outputs has 'attentions'; accepted: a list of 'last_hidden"),
        ({"outputs": HIDDEN}, "outputs has 'last_hidden_state'; accepted: a list of"),
        ({"prompt_outputs": [CHOSEN]}, "prompt_outputs has 'chosen_logits'; accepted: a list of"),
    ],
)
def test_arguments(change, message, runtime):
    ids, mask, keep = a_batch()
    with pytest.raises(ArgumentError, match=message):
        SharedPrefix(tiny(), runtime).score(ids, mask, keep=keep, **change)


def test_what_cannot_be_served_is_refused(runtime):
    model, (ids, mask, keep) = tiny(), a_batch()
    shared = SharedPrefix(model, runtime)
    with pytest.raises(UnsupportedModelError, match="router_logits of .* is NoneType"):
        shared.score(ids, mask, keep=keep, outputs=[ROUTERS])
    group = Group([1, 2, 3], [[4, 5]], [1.0])
    with pytest.raises(ArgumentError, match="of a Group with outputs, prompt_outputs or token_filter"):
        shared.score(group, outputs=[HIDDEN])


def test_the_example_of_the_documentation(runtime):
    """docs/trainers.md: PPO with a value head."""
    (code,) = re.findall(r"```python\n([^`]*value_head[^`]*)```", DOCUMENT.read_text())
    assert len(code.splitlines()) <= 15
    model, head, (ids, mask, keep) = tiny(), value_head(WIDTH), a_batch()
    own = mask[:, -keep:]
    generator = torch.Generator().manual_seed(5)
    old, advantages, returns = torch.randn(3, len(ids), keep, generator=generator).double()
    values = dense(model, ids, mask, keep)
    ratio = (values.log_probabilities - old).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    critic = (head(values.last_hidden_state).squeeze(-1) - returns).square()
    (((policy + 0.5 * critic) * own).sum() / own.sum()).backward()
    wanted = take_gradients(model), take_gradients(head)
    found = []

    class Optimizer:
        def step(self):
            found.extend((take_gradients(model), take_gradients(head)))

    names = {"ids": ids, "mask": mask, "columns": keep, "value_head": head, "torch": torch}
    names |= {"old": old, "advantages": advantages, "returns": returns, "optimizer": Optimizer()}
    exec(code, names | {"shared": SharedPrefix(model, runtime)})
    assert distance(found[0], wanted[0]) < 1e-10 and distance(found[1], wanted[1]) < 1e-10
