"""Trees of conversations: gradients equal those of every conversation by itself."""

from __future__ import annotations

import functools
import sys
import time

import pytest
import torch
from model_zoo import in_fp64, zoo_model
from models import (
    VOCAB,
    conversations as random_conversations,
    dense_tree_backward,
    distance,
    take_gradients,
    tiny,
    token_losses,
)
from test_sleep import identical, wide
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import dormouse
from dormouse import Conversation, Tree
from dormouse.hf import SharedPrefix, UnsupportedModelError, support
from dormouse.hf import step as step_module

FP64_BOUND = 1e-10
# Bytes asleep are settled if this many looks in a row see as many.
SETTLE_LOOKS, SETTLE_LOOKS_MAX, SETTLE_SECONDS = 20, 1000, 0.02


def turns(seed: int, *lengths: int, scored=(), weight=1.0) -> Conversation:
    """Turns of these lengths; equal seeds give equal turns."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    edges = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = [(max(1, edges[t]), edges[t + 1]) for t in scored]
    return Conversation(tokens, spans or None, weight)


def both(model, conversations, runtime, **options):
    """Gradients shared and dense, and the report."""
    wanted = dense_tree_backward(model, conversations)
    dense = take_gradients(model)
    report = SharedPrefix(model, runtime).backward(conversations, token_losses, **options)
    assert report.loss == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    return take_gradients(model), dense, report


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block_tokens", [0, 5])
def test_random_trees(seed, block_tokens, runtime):
    shared, dense, report = both(
        tiny(),
        random_conversations(seed),
        runtime,
        microbatch_tokens=9,
        block_tokens=block_tokens,
    )
    assert distance(shared, dense) <= FP64_BOUND
    assert report.counts["prefix_tokens"] > 0


def test_labels_may_be_masked_in_place(runtime):
    """Later blocks read them as tokens."""
    model, case = tiny(), random_conversations(1)
    model.model.embed_tokens.requires_grad_(False)
    dense_tree_backward(model, case)
    wanted = take_gradients(model)

    def losses(logits, labels, i, positions):
        own = token_losses(logits, labels.clone(), i, positions)
        labels[:] = 3
        return own

    SharedPrefix(model, runtime).backward(case, losses, microbatch_tokens=9, block_tokens=5)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


WINDOWS = ["gemma2", "gpt_oss", "mistral", "deepseek_v3", "gpt_neox", "phimoe"]
OWN_ATTENTION = ["falcon", "gptj"]
RECURRENT = ["qwen3_next", "mamba2", "bamba", "jamba"]


@pytest.mark.parametrize("kind", [*WINDOWS, *OWN_ATTENTION, *RECURRENT])
def test_architectures(kind, runtime):
    """Windows, soft caps, sinks, latent attention, caches and states, over several prefixes."""
    with in_fp64():
        shared, dense, _ = both(
            zoo_model(kind),
            random_conversations(3, longest=50),
            runtime,
            microbatch_tokens=9,
            block_tokens=6,
        )
    assert distance(shared, dense) <= FP64_BOUND


def test_each_token_runs_once(runtime):
    conversations = random_conversations(1)
    shared = SharedPrefix(tiny(), runtime)
    report = shared.backward(conversations, token_losses, microbatch_tokens=9)
    prefixes = {
        tuple(each.tokens[: at + 1].tolist())
        for each in conversations
        for at in range(each.used_tokens)
    }
    # A root's first token has no row that predicts it, and a last token predicts nothing.
    roots = {prefix[0] for prefix in prefixes}
    counts = report.counts
    assert counts["prefix_tokens"] + counts["microbatch_tokens"] == len(prefixes) - len(roots)
    assert counts["recomputed_tokens"] == 0


def test_tokens_that_no_loss_reads_are_not_run(runtime):
    prompt = [3, 1, 4, 1, 5]
    read = [Conversation([*prompt, 9, 2], [(5, 7)]), Conversation([*prompt, 6, 5], [(5, 6)])]
    unread = [
        Conversation([*prompt, 8, 9, 7, 9], [(5, 9)], weight=0.0),
        Conversation([*prompt, 2, 7, 1, 8], []),
    ]
    shared, dense, report = both(tiny(), [unread[0], *read, unread[1]], runtime)
    assert distance(shared, dense) <= FP64_BOUND
    # Rows 0 to 3 of the prompt; 4 and 5 of the first conversation, 4 of the second.
    assert report.counts["prefix_tokens"] + report.counts["microbatch_tokens"] == 4 + 2 + 1


def test_a_tree_without_labels_runs_nothing(runtime):
    read = [Conversation([3, 1, 4, 1, 5], [(2, 4)])]
    unread = [Conversation([3, 1, 4], weight=0.0), Conversation([3, 1, 5], [])]
    model, phases = tiny(), []
    shared = SharedPrefix(model, runtime)
    nothing = shared.backward(unread, token_losses, on_phase=phases.append)
    something = shared.backward(read, token_losses)
    assert nothing.loss == 0.0 and phases == ["end"] and nothing.prefix == {}
    assert nothing.counts == dict.fromkeys(something.counts, 0)
    predicted, of_read = shared.predict(unread), shared.predict(read)
    assert predicted.keys() == of_read.keys()
    assert predicted["flops_shared"] == 0 and predicted["speedup"] == 1 and not predicted["pays"]
    assert predicted["reason"] == "no token carries loss"


def test_logits_of_labels_alone(runtime):
    model, conversations, rows = tiny(), random_conversations(4), []
    model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    shared = SharedPrefix(model, runtime)
    # The first step runs a check as well.
    shared.backward(conversations, token_losses)
    rows.clear()
    report = shared.backward(conversations, token_losses)
    labels = {
        tuple(each.tokens[: at + 1].tolist())
        for each in conversations
        for begin, end in each.labels
        for at in range(begin, end)
    }
    tokens = report.counts["prefix_tokens"] + report.counts["microbatch_tokens"]
    assert sum(rows) == len(labels) < tokens


@pytest.mark.parametrize("kind", ["llama", "bamba"])
def test_what_runs_forward_again(kind, runtime):
    """A device too small to keep what prefixes save, and no memory to sleep in."""
    conversations = random_conversations(2)
    with in_fp64():
        model = tiny() if kind == "llama" else zoo_model(kind)
        got, dense, report = forward_again(model, conversations, runtime)
    assert report.counts["recomputed_tokens"] > 0
    assert distance(got, dense) <= FP64_BOUND


def forward_again(model, conversations, runtime):
    options = with_least_memory(SharedPrefix(model, runtime), conversations)
    return both(model, conversations, runtime, **options)


def with_least_memory(shared, conversations) -> dict:
    """Options of a step on a device too small to keep what prefixes save, and without memory to
    sleep in."""
    options = {"microbatch_tokens": 9, "machine": dormouse.schedule.Machine(host_bytes=1)}
    low, high = 1, 1 << 40
    while low < high:
        middle = (low + high) // 2
        try:
            shared.predict(conversations, device_bytes=middle, **options)
            high = middle
        except dormouse.ArgumentError:
            low = middle + 1
    return options | {"device_bytes": low}


def conversation_tree() -> list[Conversation]:
    """A long prompt, a turn that is scored and shared, and answers."""
    first, second = turns(1, 500, 300, 40, scored=(1, 2)), turns(2, 60)
    shared = first.tokens[:800]
    return [
        first,
        Conversation(torch.cat([shared, second.tokens]), [(500, 860)], -0.5),
        Conversation(torch.cat([first.tokens[:500], turns(3, 50).tokens]), [(500, 550)], 0.7),
    ]


def settled_bytes_asleep(runtime) -> int:
    """Returns the bytes asleep once they no longer change: layers leave while the host goes on."""
    seen, equal = -1, 0
    for _ in range(SETTLE_LOOKS_MAX):
        now = runtime.stats()["asleep"]["current_bytes"]
        seen, equal = now, equal + 1 if now == seen else 0
        if equal == SETTLE_LOOKS:
            break
        time.sleep(SETTLE_SECONDS)
    return seen


def test_nodes_sleep_each_by_itself(runtime):
    """Bit for bit as awake, with the root and the inner node asleep at once."""
    model, conversations = wide(num_hidden_layers=6), conversation_tree()
    results, asleep = [], []

    def losses(*arguments):
        asleep.append(settled_bytes_asleep(runtime))
        return token_losses(*arguments)

    for sleep in (False, True):
        asleep.clear()
        shared = SharedPrefix(model, runtime, sleep=sleep)
        report = shared.backward(conversations, losses, microbatch_tokens=64)
        results.append(take_gradients(model))
    assert identical(*results)
    inner, root = report.prefixes
    assert inner["dormant_bytes"] > 8 << 20 and root["dormant_bytes"] > 8 << 20
    assert max(asleep) >= 0.9 * (inner["dormant_bytes"] + root["dormant_bytes"])
    assert report.notes == []
    dense_tree_backward(model, conversations)
    assert distance(results[0], take_gradients(model)) < 2e-5


def test_a_group_and_its_tree_are_equal(runtime):
    prompt, responses = [5, 4, 3, 2, 1, 0], [[7, 8], [9], [1, 2, 3]]
    weights = [0.5, -1.0, 2.0]
    model = tiny()
    shared = SharedPrefix(model, runtime)

    def mean(logits, labels, i):
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def each(logits, labels, i, positions):
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    shared.backward(dormouse.Group(prompt, responses, weights), mean)
    group = take_gradients(model)
    tree = Tree(
        [
            Conversation(prompt + response, [(6, 6 + len(response))], weight)
            for response, weight in zip(responses, weights, strict=True)
        ]
    )
    shared.backward(tree, each)
    assert distance(take_gradients(model), group) <= FP64_BOUND


def test_which_rows_have_labels_goes_to_the_device_once_per_microbatch(runtime, monkeypatch):
    """Without a wait for the device: a tensor is made on the CPU, and copied."""
    own, made = torch.tensor, []

    def tensor(*arguments, **options):
        if sys._getframe(1).f_globals["__name__"] == step_module.__name__:
            made.append(options.get("device"))
        return own(*arguments, **options)

    shared = SharedPrefix(tiny(), runtime)
    conversations = [turns(seed, 9, 4, 3, 2, scored=(1, 3)) for seed in (1, 2)]
    shared.backward(conversations, token_losses, microbatch_tokens=8)
    monkeypatch.setattr(torch, "tensor", tensor)
    report = shared.backward(conversations, token_losses, microbatch_tokens=8)
    assert report.counts["microbatches"] > 1
    assert made == ["cpu"] * report.counts["microbatches"]


def test_labels_as_a_mask():
    mask = torch.tensor([False, True, True, False, True])
    assert Conversation([1, 2, 3, 4, 5], mask).labels == [(1, 3), (4, 5)]
    assert Conversation([1, 2, 3]).labels == [(1, 3)]
    assert Conversation([1, 2, 3, 4], [(1, 2), (2, 3)]).labels == [(1, 3)]
    refused = [[(0, 2)], [(2, 2)], [(1, 4)], [(2, 3), (1, 2)], mask, mask[:3].int()]
    for labels in (*refused, [0, 1, 1], [False, True, True], [(1.0, 3.0)]):
        with pytest.raises(dormouse.ArgumentError, match="accepted"):
            Conversation([1, 2, 3], labels)
    with pytest.raises(dormouse.ArgumentError, match="finite"):
        Conversation([1, 2], weight=float("nan"))
    with pytest.raises(dormouse.ArgumentError, match="at least 1"):
        Tree([])


@pytest.mark.parametrize(
    "returned",
    [lambda losses: losses.sum(), lambda losses: losses[:-1], lambda losses: float(losses.sum())],
)
def test_a_loss_per_label_is_required(returned, runtime):
    def losses(*arguments):
        return returned(token_losses(*arguments))

    with pytest.raises(TypeError, match="the loss of each label"):
        SharedPrefix(tiny(), runtime).backward(random_conversations(0), losses)


def test_a_failed_step_leaves_nothing_behind(runtime):
    """The loss fails while the root and an inner node are live."""
    model, conversations = wide(num_hidden_layers=3), conversation_tree()
    shared = SharedPrefix(model, runtime)
    shared.backward(conversations, token_losses)
    model.zero_grad(set_to_none=True)
    before = runtime.stats()["allocated"]["current_bytes"]

    def failing(*arguments):
        raise RuntimeError("a loss")

    with pytest.raises(RuntimeError, match="a loss"):
        shared.backward(conversations[:1] + conversations[2:], failing)
    model.zero_grad(set_to_none=True)
    after = runtime.stats()
    assert after["asleep"]["current_bytes"] == 0
    assert after["allocated"]["current_bytes"] <= before + (1 << 20)
    shared.backward(conversations, token_losses)


def mutants():
    real = step_module.PlannedForward.accumulate

    def without_root(self, layer, slot, grad):
        if self.path:
            real(self, layer, slot, grad)

    def without_inner(self, layer, slot, grad):
        if not self.path:
            real(self, layer, slot, grad)

    return {"root": without_root, "inner": without_inner}


@pytest.mark.parametrize("mutant", ["root", "inner"])
def test_a_dropped_gradient_is_seen(mutant, runtime, monkeypatch):
    """By the check, and by the comparison without it."""
    monkeypatch.setattr(step_module.PlannedForward, "accumulate", mutants()[mutant])
    conversations, options = random_conversations(1), {"microbatch_tokens": 9, "block_tokens": 5}
    with pytest.raises(UnsupportedModelError, match="not exact"):
        both(tiny(), conversations, runtime, **options)
    monkeypatch.setattr(SharedPrefix, "_check_if_needed", lambda *_: None)
    shared, dense, _ = both(tiny(), conversations, runtime, **options)
    assert distance(shared, dense) > 1e-3


def test_a_group_and_a_tree_are_checked_each(runtime):
    model = tiny()
    shared = SharedPrefix(model, runtime)
    group = dormouse.Group([1, 2, 3], [[4, 5]])
    first = shared.backward(group, lambda logits, labels, i: logits.sum()).checked
    tree = shared.backward(random_conversations(0), token_losses).checked
    assert first.reason == "the first step" and tree.reason == "the first step with a tree"
    assert shared.backward(random_conversations(1), token_losses).checked is tree
    assert shared.backward(group, lambda logits, labels, i: logits.sum()).checked is first


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "bamba", "falcon"])
def test_checkpointed_layers(kind, use_reentrant, runtime):
    with in_fp64():
        model = (tiny() if kind == "llama" else zoo_model(kind)).train()
        # Reentrant checkpoints need an input with a gradient.
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        shared, dense, _ = both(
            model, random_conversations(5), runtime, microbatch_tokens=9, block_tokens=6
        )
    assert distance(shared, dense) <= FP64_BOUND


def test_dropout_of_leaves_alone(runtime):
    """Its check compares a tree with dense runs by fixed masks, ones on shared rows."""
    model = tiny().train()
    for layer in model.model.layers:
        layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.3))
    with pytest.raises(UnsupportedModelError, match="prompt_dropout=False"):
        SharedPrefix(model, runtime).backward(random_conversations(5), token_losses)
    shared = SharedPrefix(model, runtime, prompt_dropout=False)
    report = shared.backward(random_conversations(5), token_losses, microbatch_tokens=9)
    assert report.checked.error <= FP64_BOUND
    first = take_gradients(model)
    shared.backward(random_conversations(5), token_losses, microbatch_tokens=9)
    assert distance(take_gradients(model), first) > 1e-2, "masks are drawn anew"

def test_a_forward_that_ignores_which_rows_are_asked_for(runtime):
    """It has the name of the argument, and returns all rows."""
    model = tiny()
    forward = model.forward

    @functools.wraps(forward)
    def wrapped(input_ids=None, position_ids=None, **ignored):
        return forward(input_ids=input_ids, position_ids=position_ids, use_cache=False)

    model.forward = wrapped
    shared, dense, _ = both(model, [Conversation([5, 6, 7, 8, 9, 10], [(2, 3), (4, 5)])], runtime)
    assert distance(shared, dense) <= FP64_BOUND


def test_a_class_that_reads_the_argument_as_a_number(runtime):
    class Last(LlamaForCausalLM):
        def forward(self, input_ids=None, logits_to_keep: int = 0, **named):
            hidden = self.model(input_ids=input_ids, **named).last_hidden_state
            return CausalLMOutput(logits=self.lm_head(hidden[:, -logits_to_keep:, :]))

    model = tiny()
    model.__class__ = Last
    shared, dense, _ = both(model, [Conversation([5, 6, 7, 8, 9, 10], [(5, 6)])], runtime)
    assert distance(shared, dense) <= FP64_BOUND


def test_a_hook_that_adds_to_all_logits(runtime):
    model = tiny()
    bias = torch.nn.Embedding(VOCAB, VOCAB, dtype=torch.float64)
    model.bias = bias

    def add(module, args, named, output):
        output.logits = output.logits + bias(named["input_ids"])
        return output

    model.register_forward_hook(add, with_kwargs=True)
    shared, dense, _ = both(model, [Conversation([5, 6, 7, 8, 9, 10], [(4, 5)])], runtime)
    assert distance(shared, dense) <= FP64_BOUND


def test_logits_of_other_rows_than_asked_for_are_refused(runtime, monkeypatch):
    monkeypatch.setattr(support.ModelView, "selects_logits", True)
    model = tiny()
    forward = model.forward
    model.forward = lambda logits_to_keep=0, **named: forward(**named)
    with pytest.raises(UnsupportedModelError, match="were selected by logits_to_keep"):
        SharedPrefix(model, runtime).backward(random_conversations(0), token_losses)


def shared_turn():
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.randint(1, VOCAB, (n,), generator=generator)

    turn = draw(30)
    return [
        Conversation(torch.cat([turn, draw(6)]), [(10, 36)], 1.0),
        Conversation(torch.cat([turn, draw(9)]), [(30, 39)], -0.5),
    ]


def test_a_loss_may_change_its_labels_in_place(runtime):
    model = tiny()
    # Labels are tokens of later passes, whose embedding would notice the change if it were trained.
    model.model.embed_tokens.requires_grad_(False)

    def masked(logits, labels, i, positions):
        kept = torch.arange(positions.start, positions.stop) % 7 != 1
        labels.masked_fill_(~kept, 0)
        return token_losses(logits, labels, i, positions) * kept

    def apart(logits, labels, *others):
        return masked(logits, labels.clone(), *others)

    dense_tree_backward(model, shared_turn(), apart)
    dense = take_gradients(model)
    SharedPrefix(model, runtime).backward(shared_turn(), masked, microbatch_tokens=8)
    assert distance(take_gradients(model), dense) <= FP64_BOUND


@pytest.mark.parametrize("microbatch_tokens", [9, 4096])
def test_a_loss_may_change_logits_that_the_head_has_saved(microbatch_tokens, runtime):
    model = tiny()
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Tanh())

    def halved(logits, *others):
        return token_losses(logits * 0.5, *others)

    def in_place(logits, *others):
        return token_losses(logits.mul_(0.5), *others)

    dense_tree_backward(model, random_conversations(3), halved)
    dense = take_gradients(model)
    shared = SharedPrefix(model, runtime)
    shared.backward(random_conversations(3), in_place, microbatch_tokens=microbatch_tokens)
    assert distance(take_gradients(model), dense) <= FP64_BOUND


def test_a_loss_of_logits_of_an_earlier_node_is_refused(runtime):
    """A pair of turns compared: the first has run backward already."""
    kept = []

    def pairs(logits, labels, i, positions):
        own = token_losses(logits, labels, i, positions)
        if kept:
            return own + kept[0]
        kept.append(own.sum())
        return own * 0

    shared = SharedPrefix(tiny(), runtime)
    shared.backward(conversation_tree(), token_losses)
    with pytest.raises((UnsupportedModelError, RuntimeError), match="earlier call|second time"):
        shared.backward(conversation_tree(), pairs)


def test_what_the_rest_of_the_model_changes_in_place(runtime):
    model = tiny()
    model.model.norm.register_forward_pre_hook(lambda module, args: (args[0].mul_(1.1),))
    shared, dense, _ = both(model, random_conversations(2), runtime, microbatch_tokens=9)
    assert distance(shared, dense) <= FP64_BOUND


def test_blocks_with_dropout_are_refused(runtime):
    model = tiny().train()
    shared = SharedPrefix(model, runtime, prompt_dropout=False)
    with pytest.raises(UnsupportedModelError, match="block_tokens"):
        shared.backward(random_conversations(0), token_losses, block_tokens=5)
