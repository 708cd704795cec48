"""Token filtering with a defect: the comparison with the reference must see each."""

from __future__ import annotations

import pytest
from masked_model import OWN_ATTENTION
from model_zoo import in_fp64, zoo_model
from models import distance, take_gradients, tiny
from test_token_filter import FP64_BOUND, a_batch, with_unknown_operation
from test_token_filter import both as both_dense
from test_token_filter_shared import dense_filtered, shared_filtered, some_tokens
from test_token_filter_shared import both as both_shared
from test_token_scores import a_batch as padded_batch
from test_token_scores import padded

from dormouse.hf import SharedPrefix
from dormouse.hf.filter import attention, graph, microbatch
from dormouse.hf.filter.rows import Rows


def without_dropped_keys(monkeypatch):
    """Kept queries attend to kept keys alone."""
    monkeypatch.setattr(attention, "by_dropped_keys", lambda *arguments: None)


def without_the_causal_mask(monkeypatch):
    """Dropped keys after a query are read."""
    whole = attention.by_dropped_keys

    def mutant(grad_query, grad, query, out, lse, segment, key, value, is_causal, *rest):
        whole(grad_query, grad, query, out, lse, segment, key, value, False, *rest)

    monkeypatch.setattr(attention, "by_dropped_keys", mutant)


def with_the_softmax_of_kept_keys(monkeypatch):
    """The log-sum-exp is that of kept keys."""
    whole = attention.of_segments

    def mutant(grad, query, key, value, out, lse, of, *rest):
        return whole(grad, query, key, value, out, lse - 0.1, of, *rest)

    monkeypatch.setattr(attention, "of_segments", mutant)


def with_neighbouring_rows(monkeypatch):
    """Saved tensors lose other rows than gradients."""
    whole = Rows.gather

    def mutant(self, x, layout):
        return whole(self, x.roll(1, layout.row), layout)

    monkeypatch.setattr(Rows, "gather", mutant)


EVERYWHERE = (
    without_dropped_keys,
    without_the_causal_mask,
    with_the_softmax_of_kept_keys,
    with_neighbouring_rows,
)


@pytest.mark.parametrize("mutate", EVERYWHERE, ids=lambda mutate: mutate.__name__)
def test_of_dense_runs(mutate, monkeypatch):
    ids, keep = a_batch(2, 19)
    mutate(monkeypatch)
    _, got, wanted = both_dense(tiny(), ids, keep)
    assert distance(got, wanted) > 1e3 * FP64_BOUND


def with_gradients_of_dropped_tokens(monkeypatch):
    """A loss of a dropped first token reaches the prompt's last row."""
    monkeypatch.setattr(microbatch.Dropped, "masked", lambda self, given: given)


def without_the_last_row_of_the_prompt(monkeypatch):
    """It is dropped with the first token, which it predicts."""
    whole = microbatch.Dropped.__init__

    def mutant(self, scores, masks):
        whole(self, scores, masks)
        for score, mask in zip(scores, masks, strict=True):
            self._keep[score.rows.start] = mask[0]
        self.rows = Rows(self._keep.unsqueeze(0))

    monkeypatch.setattr(microbatch.Dropped, "__init__", mutant)


@pytest.mark.parametrize(
    "mutate",
    [*EVERYWHERE, with_gradients_of_dropped_tokens, without_the_last_row_of_the_prompt],
    ids=lambda mutate: mutate.__name__,
)
def test_of_shared_steps(mutate, monkeypatch, runtime):
    batch = padded_batch()
    kept = some_tokens(batch[0], batch[2])
    mutate(monkeypatch)
    _, got, wanted = both_shared(tiny(), runtime, batch, kept, graphs="kept")
    assert distance(got, wanted) > 1e3 * FP64_BOUND


def with_keys_of_dropped_rows(monkeypatch):
    """Attention that runs with all rows gives all keys a gradient."""
    whole = attention.with_all_rows

    def mutant(op):
        plan, sizes = whole(op), op.output

        def run(gradients):
            return op.call([op.rows.scatter(gradients[0], attention._QUERY, sizes)])

        return plan._replace(inputs=[None] * len(plan.inputs), run=run)

    monkeypatch.setattr(attention, "with_all_rows", mutant)


def test_of_attention_with_all_rows(monkeypatch, runtime):
    with in_fp64():
        model = zoo_model("mistral")
        batch = padded([17, 17, 17, 17, 17], [12, 16, 11, 18, 13])
        kept = some_tokens(batch[0], batch[2])
        shared = SharedPrefix(model, runtime)
        shared.check()
        with_keys_of_dropped_rows(monkeypatch)
        shared_filtered(shared, *batch, kept)
        got = take_gradients(model)
        dense_filtered(model, *batch, kept, attention=OWN_ATTENTION)
        assert distance(got, take_gradients(model)) > 1e3 * FP64_BOUND


class Everything(set):
    """Every sum is in memory that was allocated for it."""

    def __contains__(self, edge) -> bool:
        return True


def with_sums_in_place(monkeypatch):
    """Each gradient is added to the first, which an addition handed to others too."""
    whole = graph._Sums.__init__

    def mutant(self, *arguments):
        whole(self, *arguments)
        self._own = Everything()

    monkeypatch.setattr(graph._Sums, "__init__", mutant)


def test_of_layers_whose_parts_are_parallel(monkeypatch, runtime):
    with_sums_in_place(monkeypatch)
    with in_fp64():
        model = zoo_model("gpt_neox")
        _, got, wanted = both_dense(model, *a_batch(2, 19))
        assert distance(got, wanted) > 1e3 * FP64_BOUND
        batch = padded([17, 17, 17, 17, 17], [12, 16, 11, 18, 13])
        kept = some_tokens(batch[0], batch[2])
        _, got, wanted = both_shared(model, runtime, batch, kept, graphs="kept")
        assert distance(got, wanted) > 1e3 * FP64_BOUND


def without_anchors_at_attention(monkeypatch):
    """Where rows are is not known at an attention's output."""
    monkeypatch.setattr(attention, "anchor", lambda node, rows, began: None)


def test_of_rows_behind_an_unknown_operation(monkeypatch):
    without_anchors_at_attention(monkeypatch)
    ids, keep = a_batch(2, 19)
    _, got, wanted = both_dense(with_unknown_operation("self_attn.o_proj"), ids, keep)
    assert distance(got, wanted) > 1e3 * FP64_BOUND
