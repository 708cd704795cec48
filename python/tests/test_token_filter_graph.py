"""Token filtering of dense runs: graphs, losses and hooks that differ from a plain decoder's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from masked_model import masked, masked_backward, zeroing
from model_zoo import in_fp64, zoo_model
from models import VOCAB, distance, take_gradients, tiny
from rank_workers import left_by_ranks
from test_token_filter import FP64_BOUND, Cube, a_batch, both, filtered_backward, loss_of
from torch.nn import functional

from dormouse import StateError
from dormouse.hf import UnsupportedModelError, token_filter
from dormouse.hf.filter import attention
from dormouse.hf.filter.rows import Layout, Rows
from dormouse.hf.kernels import CpuFlash, Scores

PARALLEL = ("gpt_neox", "phi", "cohere")
"""Attention and MLP read the same rows: ``x + attention(x) + mlp(x)``."""


@pytest.mark.parametrize("kind", PARALLEL)
def test_layers_whose_parts_are_parallel(kind):
    """A sum of three hands one gradient to three operations."""
    with in_fp64():
        _, got, wanted = both(zoo_model(kind), *a_batch(2, 19))
    assert distance(got, wanted) <= FP64_BOUND


def test_a_loss_that_reads_values_twice():
    """Each sum hands on one value, expanded to all elements."""
    model, (ids, keep) = tiny(), a_batch(2, 19)
    advantages = torch.randn(2, 18, dtype=torch.float64)

    def loss(logits):
        own = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        return (own * advantages).sum() + 0.1 * (own - own.detach().flip(1)).sum()

    masked_backward(model, ids, keep, loss)
    wanted = take_gradients(model)
    filtered_backward(model, ids, keep, loss)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_hooks_of_the_nodes_that_add_to_parameters_run():
    """Those by which DistributedDataParallel and others reduce."""
    model, (ids, keep) = tiny(), a_batch(2, 13)
    before, after = [], []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.register_prehook(lambda grads: before.append(grads))
        node.register_hook(lambda *grads: after.append(grads))
    for _ in range(2):
        # The second adds to gradients that are there.
        filtered_backward(model, ids, keep, loss_of(ids))
    assert len(before) == len(after) == 2 * len(nodes)


def test_ranks_reduce(tmp_path):
    worker = Path(__file__).with_name("token_filter_worker.py")
    found = left_by_ranks(worker, tmp_path, seconds_max=120)
    for refusal in found.pop("fully_shard"):
        assert "split over ranks, or in DeepSpeed's engine; accepted: a model that" in refusal
    for name, of_ranks in found.items():
        mean = {n: sum(own["alone"][n] for own in of_ranks) / 2 for n in of_ranks[0]["alone"]}
        for own in of_ranks:
            assert distance(own["reduced"], mean) <= FP64_BOUND, name


@pytest.mark.parametrize("mark", ["ds_id", "_is_flat_param"])
def test_parameters_that_are_parts_are_refused(mark):
    """As ZeRO's third stage and FullyShardedDataParallel mark them, which do not run here."""
    model, (ids, keep) = tiny(), a_batch(2, 13)
    setattr(model.lm_head.weight, mark, True)
    with pytest.raises(UnsupportedModelError, match="or in DeepSpeed's engine"):
        filtered_backward(model, ids, keep, loss_of(ids))


def test_gradients_become_those_of_parameters_without_a_copy():
    model, (ids, keep) = tiny(), a_batch(2, 13)
    weight, seen = model.model.layers[1].mlp.up_proj.weight, []
    weight.register_hook(lambda grad: seen.append(grad.data_ptr()))
    filtered_backward(model, ids, keep, loss_of(ids))
    assert seen == [weight.grad.data_ptr()]


def test_gradients_of_two_parameters_do_not_share_memory():
    """A sum of two parameters hands both one gradient."""
    model, (ids, keep) = tiny(), a_batch(2, 13)
    shift = [torch.nn.Parameter(torch.zeros(2, 13, 96, dtype=torch.float64)) for _ in range(2)]
    model.model.layers[1].register_forward_hook(lambda m, a, out: out + (shift[0] + shift[1]))
    filtered_backward(model, ids, keep, loss_of(ids))
    once = [each.grad.clone() for each in shift]
    assert torch.equal(once[0], once[1])
    shift[0].grad.add_(1)
    assert torch.equal(shift[1].grad, once[1])


def test_rows_that_are_not_finite_are_dropped():
    """Of a dropped row nothing reaches the others."""
    model, (ids, keep) = tiny(), a_batch(2, 19)
    keep[:, 7] = False
    factors = torch.ones(2, 19, 1, dtype=torch.float64)
    factors[:, 7] = torch.inf

    def loss(logits):
        return (logits * factors).sum()

    masked_backward(model, ids, keep, loss)
    wanted = take_gradients(model)
    filtered_backward(model, ids, keep, loss)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


@pytest.mark.parametrize("is_trainable", [True, False])
def test_saved_tensor_hooks(is_trainable):
    model, (ids, keep) = tiny(), a_batch(2, 19)
    model.model.embed_tokens.weight.requires_grad_(is_trainable)
    masked_backward(model, ids, keep, loss_of(ids))
    wanted = take_gradients(model)
    with token_filter(model) as tokens:
        with torch.autograd.graph.save_on_cpu():
            logits = model(input_ids=ids).logits
        report = tokens.backward(loss_of(ids)(logits), keep)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    assert "ScaledDotProductFlashAttentionForCpuBackward0" in report.kept_whole
    assert ("EmbeddingBackward0" in report.kept_whole) is is_trainable


def test_checkpointed_layers_are_computed_again_once():
    model, (ids, keep) = tiny().train(), a_batch(2, 19)
    masked_backward(model, ids, keep, loss_of(ids))
    wanted = take_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    runs = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    filtered_backward(model, ids, keep, loss_of(ids))
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    assert len(runs) == 2 * 4


def test_layers_that_are_computed_again_without_a_graph_are_refused():
    model, (ids, keep) = tiny().train(), a_batch(2, 19)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedModelError, match="use_reentrant=True; accepted: .*False"):
        filtered_backward(model, ids, keep, loss_of(ids))
    assert not take_gradients(model)


MASKS = {
    "[columns, columns]": lambda causal: causal,
    "[1, columns]": lambda causal: causal[-1:],
    "[1, 1, columns, columns]": lambda causal: causal[None, None],
    "[sequences, 1, 1, columns]": lambda causal: causal[[-1, -3], None, None],
    "[sequences, heads, columns, columns]": lambda causal: causal.expand(2, 6, -1, -1),
}


@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_attention_that_are_broadcast(name, is_bool, monkeypatch):
    model, (ids, keep) = tiny(), a_batch(2, 19)
    mask = MASKS[name](torch.ones(19, 19, dtype=torch.bool).tril())
    if not is_bool:
        mask = torch.randn(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    inner = functional.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, is_causal=False, **options):
        return inner(query, key, value, attn_mask=mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    report, got, wanted = both(model, ids, keep)
    assert distance(got, wanted) <= FP64_BOUND
    assert report.kept_whole == {}


def test_eager_attention_is_cut_at_the_input_of_its_layer():
    """Its keys and values get a gradient in dropped rows."""
    model, (ids, keep) = tiny(), a_batch(2, 19)
    model.config._attn_implementation = "eager"
    masked_backward(model, ids, keep, loss_of(ids), attention="eager")
    wanted = take_gradients(model)
    report = filtered_backward(model, ids, keep, loss_of(ids))
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    # Where its output, of sequences times heads, becomes one of four dimensions.
    assert report.kept_whole == {"UnsafeViewBackward0": 4}


def test_dropout():
    """Its masks are those of the forward."""
    model, (ids, keep) = tiny(), a_batch(2, 19)
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.3))
    model.train()
    torch.manual_seed(3)
    masked_backward(model, ids, keep, loss_of(ids))
    wanted = take_gradients(model)
    torch.manual_seed(3)
    report = filtered_backward(model, ids, keep, loss_of(ids))
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    assert report.kept_whole == {}


def test_dropout_of_attention():
    """torch computes it by operations that join rows."""
    model, (ids, keep) = tiny(attention_dropout=0.2).train(), a_batch(2, 19)
    torch.manual_seed(3)
    masked_backward(model, ids, keep, loss_of(ids), attention="sdpa")
    wanted = take_gradients(model)
    torch.manual_seed(3)
    report = filtered_backward(model, ids, keep, loss_of(ids))
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    assert report.kept_whole == {"UnsafeViewBackward0": 4}


def test_padding_that_is_kept():
    """Rows that see no key."""
    model, (ids, keep) = tiny(), a_batch(3, 17)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :1] = 0
    _, got, wanted = both(model, ids, keep, attention_mask=mask)
    assert distance(got, wanted) <= FP64_BOUND


def test_an_unknown_operation_at_the_end_of_the_model():
    """What a loss says of dropped rows ends at the output."""
    model, (ids, keep) = tiny(), a_batch(2, 19)
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: Cube.apply(inner(x) / 8)
    report, got, wanted = both(model, ids, keep)
    assert report.kept_whole == {"CubeBackward": 1}
    assert distance(got, wanted) <= FP64_BOUND


class Pair(torch.autograd.Function):
    """Two outputs, of which a model may read one."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return 2 * first + 3 * second


def test_an_output_of_a_function_that_nothing_reads():
    model, (ids, keep) = tiny(), a_batch(2, 19)
    inner = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: Pair.apply(inner(x))[1]
    _, got, wanted = both(model, ids, keep)
    assert distance(got, wanted) <= FP64_BOUND


def test_weights_of_attention_with_as_many_heads_as_columns():
    """Their second dimension counts heads."""
    model, (ids, keep) = tiny(), a_batch(2, 6)
    model.config._attn_implementation = "eager"
    layers = model.model.layers

    def loss(output):
        return loss_of(ids)(output.logits) + output.attentions[2].square().sum()

    with masked(model, keep, layers, "eager"):
        output = model(input_ids=ids, output_attentions=True)
    output.logits.register_hook(zeroing(keep, columns=1))
    loss(output).backward()
    wanted = take_gradients(model)
    with token_filter(model) as tokens:
        tokens.backward(loss(model(input_ids=ids, output_attentions=True)), keep)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_autocast_does_not_round_products_with_dropped_keys():
    draw = torch.Generator().manual_seed(1)
    rows = Rows(torch.rand(1, 33, generator=draw) < 0.5)
    query, key, value, grad = torch.randn(4, 1, 2, 33, 8, generator=draw)
    out, lse = CpuFlash.forward(query, key, value, True, Scores(0.3))
    compact = [rows.gather(x, Layout(2)) for x in (grad, query)]
    own = list(attention.segments(rows, [(0, 33)]))
    tensors = (*compact, key, value, *(rows.gather(x, Layout(2)) for x in (out, lse)))
    wanted = attention.of_segments(*tensors, own, True, Scores(0.3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attention.of_segments(*tensors, own, True, Scores(0.3))
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_forwards_before_their_backwards(is_checkpointed):
    model, batches = tiny().train(), [a_batch(2, 19), a_batch(3, 11, seed=2)]
    for ids, keep in batches:
        masked_backward(model, ids, keep, loss_of(ids))
    wanted = take_gradients(model)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with token_filter(model) as tokens:
        losses = [loss_of(ids)(model(input_ids=ids).logits) for ids, _ in batches]
        for loss, (_, keep) in zip(losses, batches, strict=True):
            tokens.backward(loss, keep)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND


def test_a_second_backward_of_a_forward_is_refused():
    model, (ids, keep) = tiny(), a_batch(2, 9)
    with token_filter(model) as tokens:
        logits = model(input_ids=ids).logits
        tokens.backward(logits.square().sum(), keep)
        gradients = take_gradients(model)
        with pytest.raises(StateError, match="had its backward.*; accepted: one backward of each"):
            tokens.backward(logits.sum(), keep)
        other = model(input_ids=ids).logits.square().sum()
    assert gradients and not take_gradients(model)
    with token_filter(model) as tokens, pytest.raises(StateError, match="in another context"):
        tokens.backward(other, keep)


@pytest.mark.parametrize("change", [lambda x: x.flatten(0, 1), lambda x: x[:, ::2]])
def test_layers_that_return_other_tensors_are_refused(change):
    model, (ids, _) = tiny(), a_batch(2, 10)
    own, other = Changing(lambda x: x * 2), Changing(change)
    inner = model.model.norm.forward
    model.model.norm = Changing(lambda x: inner(own(x)) + other(x).sum())
    model.model.norm.own, model.model.norm.other = own, other
    with (
        token_filter(model, layers=[own, other]),
        pytest.raises(UnsupportedModelError, match="a Changing returns .*; accepted: layers"),
    ):
        model(input_ids=ids)


def bart():
    sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=64, encoder_layers=3, decoder_layers=3, **sizes
    )
    return transformers.BartForConditionalGeneration(config).double()


def gpt2_with_cross_attention():
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4}
    config = transformers.GPT2Config(**sizes, add_cross_attention=True)
    return transformers.GPT2LMHeadModel(config).double()


@pytest.mark.parametrize("model_of", [bart, gpt2_with_cross_attention])
def test_models_that_read_another_sequence_are_refused(model_of):
    """Its rows would count as those of the mask where both are as long."""
    model = model_of()
    message = f"{type(model).__name__} reads another sequence .*; accepted: "
    with (
        pytest.raises(UnsupportedModelError, match=message),
        token_filter(model),
    ):
        pass


class Changing(torch.nn.Module):
    """A layer that is a function."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return self.change(x)


class Reader(torch.nn.Module):
    """A layer with attention over its own rows and over others."""

    def __init__(self, width: int = 32):
        super().__init__()
        linears = [torch.nn.Linear(width, width) for _ in range(8)]
        self.own, self.other = torch.nn.ModuleList(linears[:4]), torch.nn.ModuleList(linears[4:])

    def forward(self, hidden, others=None):
        hidden = hidden + _attention(self.own, hidden, hidden, is_causal=True)
        return hidden if others is None else hidden + _attention(self.other, hidden, others)


def _attention(projections, hidden, others, **options):
    of_query, of_key, of_value, out = projections
    query, key, value = (
        project(x).unflatten(-1, (4, -1)).transpose(1, 2)
        for project, x in ((of_query, hidden), (of_key, others), (of_value, others))
    )
    found = functional.scaled_dot_product_attention(query, key, value, **options)
    return out(found.transpose(1, 2).flatten(2))


class TwoSequences(torch.nn.Module):
    """Nothing in its names says that its layers read a second sequence."""

    def __init__(self, encodes: bool):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 32)
        self.readers = torch.nn.ModuleList(Reader() for _ in range(3 * encodes))
        self.layers = torch.nn.ModuleList(Reader() for _ in range(4))

    def forward(self, ids, others):
        hidden, others = self.embed(ids), self.embed(others).detach()
        for reader in self.readers:
            others = reader(others)
        for layer in self.layers:
            hidden = layer(hidden, others)
        return hidden


@pytest.mark.parametrize(
    ("encodes", "is_trainable"), [(True, True), (True, False), (False, True)]
)
def test_attention_over_another_sequence_that_is_as_long(encodes, is_trainable):
    """All its rows get their gradients: the mask counts those of the layers. Where neither has a
    graph before the layers, nothing tells the sequences apart."""
    torch.manual_seed(4)
    model = TwoSequences(encodes).double()
    model.embed.weight.requires_grad_(is_trainable)
    (ids, keep), (others, _) = a_batch(2, 19), a_batch(2, 19, seed=8)

    def zeroed(tensor):
        if tensor.requires_grad:
            tensor.register_hook(zeroing(keep, columns=1))

    handles = []
    for layer in model.layers:
        handles.append(layer.register_forward_pre_hook(lambda m, args: zeroed(args[0])))
        for module in (layer, *layer.own[:3]):
            handles.append(module.register_forward_hook(lambda m, args, out: zeroed(out)))
    model(ids, others).square().sum().backward()
    wanted = take_gradients(model)
    for handle in handles:
        handle.remove()
    with token_filter(model) as tokens:
        report = tokens.backward(model(ids, others).square().sum(), keep)
    assert distance(take_gradients(model), wanted) <= FP64_BOUND
    assert report.kept_whole == {"ScaledDotProductFlashAttentionForCpuBackward0": 4}
