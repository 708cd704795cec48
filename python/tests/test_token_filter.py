"""Token filtering of dense runs, against gradients multiplied by the mask at every layer."""

from __future__ import annotations

import peft
import pytest
import torch
from masked_model import masked, masked_backward, zeroing
from models import KINDS, VOCAB, distance, take_gradients, tiny
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from dormouse import ArgumentError
from dormouse.demo import gradcheck
from dormouse.hf import accumulation, token_filter, top_share

FP64_BOUND = 1e-10
PROMPT = 5
SHAPES = ((1, 23), (3, 17))


def a_batch(sequences: int, columns: int, share: float = 0.5, seed: int = 1):
    """Token ids and kept rows: those of prompts, and some of responses."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (sequences, columns), generator=generator)
    keep = torch.rand(sequences, columns, generator=generator) >= share
    keep[:, :PROMPT] = True
    return ids, keep


def loss_of(ids: torch.Tensor):
    """The mean over all tokens: the mask is not in the loss."""

    def loss(logits):
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return loss


def filtered_backward(model, ids, keep, loss_fn, **arguments):
    with token_filter(model) as tokens:
        return tokens.backward(loss_fn(model(input_ids=ids, **arguments).logits), keep)


def both(model, ids, keep, **arguments):
    """(report, filtered, reference) gradients."""
    masked_backward(model, ids, keep, loss_of(ids), **arguments)
    wanted = take_gradients(model)
    report = filtered_backward(model, ids, keep, loss_of(ids), **arguments)
    return report, take_gradients(model), wanted


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_multiplied_by_the_mask_at_every_layer(kind, shape):
    ids, keep = a_batch(*shape)
    report, got, wanted = both(tiny(kind), ids, keep)
    assert distance(got, wanted) <= FP64_BOUND
    assert (report.rows, report.kept_rows) == (keep.numel(), int(keep.sum()))
    assert report.kept_whole == {}


def test_it_is_not_the_gradient_of_the_loss_over_kept_tokens():
    """Else the test above would not tell filtering from no filtering."""
    ids, keep = a_batch(2, 19)
    model = tiny()
    _, got, _ = both(model, ids, keep)

    def loss_of_kept(logits):
        rows = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        return (rows * keep[:, :-1].flatten()).mean()

    loss_of_kept(model(input_ids=ids).logits).backward()
    assert distance(got, take_gradients(model)) > 1e-2


@pytest.mark.parametrize("share", [0.0, 0.97])
def test_nothing_and_nearly_everything_dropped(share):
    ids, keep = a_batch(3, 21, share)
    _, got, wanted = both(tiny(), ids, keep)
    assert distance(got, wanted) <= FP64_BOUND


@pytest.mark.parametrize("kept", [(0,), (19,), (7, 8, 9), (1, 3, 5, 19)])
def test_single_rows(kept):
    ids, keep = a_batch(1, 21)
    keep[:] = False
    keep[0, list(kept)] = True
    _, got, wanted = both(tiny(), ids, keep)
    assert distance(got, wanted) <= FP64_BOUND


def test_many_rows_run_in_blocks(monkeypatch):
    monkeypatch.setattr("dormouse.hf.filter.attention.BLOCK_ROWS", 4)
    ids, keep = a_batch(2, 40)
    _, got, wanted = both(tiny(), ids, keep)
    assert distance(got, wanted) <= FP64_BOUND


def test_rows_padded_on_the_left():
    ids, keep = a_batch(3, 17)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    keep &= mask.bool()
    _, got, wanted = both(tiny(), ids, keep, attention_mask=mask)
    assert distance(got, wanted) <= FP64_BOUND


def test_a_sequence_with_no_kept_row_contributes_zero():
    ids, keep = a_batch(3, 17)
    keep[1] = False
    model = tiny()
    # The loss is a sum, so that a batch without the sequence has the same.
    def loss(ids):
        return lambda logits: logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).sum()

    filtered_backward(model, ids, keep, loss(ids))
    got = take_gradients(model)
    others = [0, 2]
    filtered_backward(model, ids[others], keep[others], loss(ids[others]))
    assert distance(got, take_gradients(model)) <= FP64_BOUND


def test_no_kept_row_at_all():
    ids, keep = a_batch(2, 9)
    model = tiny()
    report = filtered_backward(model, ids, torch.zeros_like(keep), loss_of(ids))
    assert report.kept_rows == 0
    assert all(not grad.any() for grad in take_gradients(model).values())


def test_what_dropped_rows_saved_is_freed():
    ids, keep = a_batch(1, 200, share=0.75)
    report = filtered_backward(tiny(), ids, keep, loss_of(ids))
    assert report.saved_bytes > 0
    # All but K and V.
    assert report.kept_bytes < 0.5 * report.saved_bytes


@pytest.mark.parametrize("is_filtered", [True, False])
def test_it_is_freed_before_the_backward_begins(is_filtered):
    ids, keep = a_batch(1, 50)
    model, alive = tiny(), []
    first, last = model.model.layers[0].mlp, model.model.layers[3].mlp

    def forward(module, args, output):
        alive.append(StorageWeakRef(output.untyped_storage()))

    first.act_fn.register_forward_hook(forward)
    freed = []
    last.down_proj.weight.register_hook(lambda grad: freed.append(alive[0].expired()))
    filtered_backward(model, ids, keep if is_filtered else keep | True, loss_of(ids))
    assert freed == [is_filtered]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_near_to_fp64_as_the_reference(dtype):
    ids, keep = a_batch(2, 40)
    exact, model = tiny(), tiny(dtype=dtype)
    with torch.no_grad():
        for own, other in zip(exact.parameters(), model.parameters(), strict=True):
            own.copy_(other)
    masked_backward(exact, ids, keep, loss_of(ids))
    truth = take_gradients(exact)
    _, got, wanted = both(model, ids, keep)
    error = gradcheck.compare(truth.items(), wanted, got)
    assert error.within_bounds, error


def test_autocast():
    ids, keep = a_batch(2, 40)
    model = tiny(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report, got, wanted = both(model, ids, keep)
    assert report.kept_whole == {}
    assert distance(got, wanted) < 0.03


def test_adapters_of_frozen_weights():
    config = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(), config).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids, keep = a_batch(2, 19)
    report, got, wanted = both(model, ids, keep)
    assert report.kept_whole == {}
    assert len(got) == 2 * 7 * 4 and distance(got, wanted) <= FP64_BOUND


def test_gradients_are_added_and_hooks_of_parameters_run():
    ids, keep = a_batch(2, 13)
    model = tiny()
    filtered_backward(model, ids, keep, loss_of(ids))
    once = take_gradients(model)
    seen = []
    weight = model.model.layers[1].mlp.up_proj.weight
    handle = weight.register_hook(lambda grad: seen.append(grad.clone()))
    filtered_backward(model, ids, keep, loss_of(ids))
    handle.remove()
    filtered_backward(model, ids, keep, loss_of(ids))
    twice = {name: 2 * grad for name, grad in once.items()}
    assert distance(take_gradients(model), twice) <= FP64_BOUND
    assert len(seen) == 1
    assert torch.allclose(seen[0], once["model.layers.1.mlp.up_proj.weight"])


class Cube(torch.autograd.Function):
    """Row by row, but nothing here knows that."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def with_unknown_operation(place: str):
    """A tiny model with a cube behind a module of its second layer."""
    model = tiny()
    module = model.model.layers[1].get_submodule(place)
    inner = module.forward
    module.forward = lambda x: Cube.apply(inner(x) / 8)
    return model


@pytest.mark.parametrize("place", ["mlp", "self_attn.o_proj", "self_attn.v_proj"])
def test_an_unknown_operation_keeps_its_rows_and_is_named(place):
    ids, keep = a_batch(2, 19)
    report, got, wanted = both(with_unknown_operation(place), ids, keep)
    assert report.kept_whole == {"CubeBackward": 1}
    assert distance(got, wanted) <= FP64_BOUND


class ScaledByItsLargest(torch.autograd.Function):
    """A product with a weight whose backward reads all rows at once."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad * x.abs().amax()
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


@pytest.mark.parametrize("name", ["Other", accumulation.AccumulatingLinear.__name__, "Embedded"])
def test_a_function_named_as_one_of_ours_is_another(name):
    function = type(name, (ScaledByItsLargest,), {})
    model = tiny()
    up = model.model.layers[1].mlp.up_proj
    up.forward = lambda x: function.apply(x, up.weight)
    report, got, wanted = both(model, *a_batch(2, 23))
    assert distance(got, wanted) <= FP64_BOUND
    assert report.kept_whole == {f"{name}Backward": 1}


def test_an_operation_along_rows_keeps_its_rows_and_is_named():
    model = tiny(num_hidden_layers=3)
    inner = model.model.layers[1].forward
    model.model.layers[1].forward = lambda x, **options: inner(x, **options) + x.cumsum(1) / 8
    ids, keep = a_batch(2, 19)
    report, got, wanted = both(model, ids, keep)
    assert report.kept_whole == {"CumsumBackward0": 1}
    assert distance(got, wanted) <= FP64_BOUND


def test_a_loss_that_reads_other_modules_and_hidden_states():
    model = tiny()
    value = torch.nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
    ids, keep = a_batch(2, 15)

    with token_filter(model) as tokens:
        output = model(input_ids=ids, output_hidden_states=True)
        values = value(output.hidden_states[-1])
        tokens.backward(loss_of(ids)(output.logits) + values.square().mean(), keep)
    got = take_gradients(model) | {"value": value.weight.grad.clone()}
    value.zero_grad(set_to_none=True)

    with masked(model, keep, model.model.layers):
        output = model(input_ids=ids, output_hidden_states=True)
    hidden = output.hidden_states[-1]
    for tensor in (output.logits, hidden):
        tensor.register_hook(zeroing(keep, columns=1))
    (loss_of(ids)(output.logits) + value(hidden).square().mean()).backward()
    assert distance(got, take_gradients(model) | {"value": value.weight.grad}) <= FP64_BOUND


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (torch.ones(2, 8, dtype=torch.bool), r"keep has shape \[2, 8\]; accepted: .* \[2, 9\]"),
        (torch.ones(18, dtype=torch.bool), r"keep has shape \[18\]; accepted: .* \[2, 9\]"),
        (torch.ones(2, 9), r"keep is torch.float32; accepted: a tensor of torch.bool"),
    ],
)
def test_masks_of_another_shape_are_refused(keep, message):
    ids, _ = a_batch(2, 9)
    model = tiny()
    with pytest.raises(ArgumentError, match=message):
        filtered_backward(model, ids, keep, loss_of(ids))
    assert not take_gradients(model)


def test_losses_of_no_forward_or_of_several_are_refused():
    ids, keep = a_batch(2, 9)
    model = tiny()
    outside = loss_of(ids)(model(input_ids=ids).logits)
    with token_filter(model) as tokens:
        with pytest.raises(ArgumentError, match="outputs of 0 forwards"):
            tokens.backward(outside, keep)
        losses = [loss_of(ids)(model(input_ids=ids).logits) for _ in range(2)]
        with pytest.raises(ArgumentError, match="outputs of 2 forwards"):
            tokens.backward(sum(losses), keep)
        with pytest.raises(ArgumentError, match=r"a loss of shape \[2, 9, 97\]"):
            tokens.backward(model(input_ids=ids).logits, keep)


def test_a_loss_that_reads_the_inside_is_refused():
    ids, keep = a_batch(2, 9)
    model, found = tiny(), []
    model.model.norm.register_forward_hook(lambda module, args, output: found.append(args[0] * 2))
    with token_filter(model) as tokens:
        loss = loss_of(ids)(model(input_ids=ids).logits) + found[0].sum()
        with pytest.raises(ArgumentError, match="tensors inside the model"):
            tokens.backward(loss, keep)


def test_top_share():
    loss = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
    reference = torch.tensor([[0.0, 1.0, 1.0], [0.0, 4.0, 3.0]])
    # Differences: 3, 0, 1, 0, 1, -2.
    expected = {0.0: 0, 0.1: 1, 0.5: 3, 2 / 3: 4, 1.0: 6}
    for share, count in expected.items():
        assert int(top_share(loss, reference, share).sum()) == count
    # Products in binary are 7.000000000000001 and 28.999999999999996.
    hundred = torch.arange(100.0)
    for share, count in {0.07: 7, 0.29: 29}.items():
        assert int(top_share(hundred, hundred, share).sum()) == count
    assert top_share(loss, reference, 0.5).tolist() == [[True, False, True], [False, True, False]]
    with pytest.raises(ArgumentError, match="share is 1.5; accepted: 0 to 1"):
        top_share(loss, reference, 1.5)
    with pytest.raises(ArgumentError, match=r"shape \[3\]; accepted: that of loss, \[2, 3\]"):
        top_share(loss, reference[0], 0.5)
