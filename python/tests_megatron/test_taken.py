"""All batches of a call are taken from the data iterator before it runs any: one that changes
meanwhile is refused."""

from __future__ import annotations

import pytest
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

import cases
import conftest
import dormouse.megatron
from dormouse.megatron import UnsupportedTrainerError
from models import distance

CASE = cases.Case()
# Of the narrowest microbatch.
COLUMNS = 48


@pytest.fixture(scope="module")
def shared():
    cases.join()
    with conftest.a_runtime() as runtime:
        yield dormouse.megatron.share(get_forward_backward_func(), runtime=runtime)


def of_equal_shapes() -> list[dict]:
    return [
        batch | {name: batch[name][:, :COLUMNS] for name in cases.PARTS}
        for batch in cases.batches_of()
    ]


def written_by(write):
    """Returns a function that yields one batch, into which ``write`` puts each."""

    def taken(batches):
        own = {name: each.clone() for name, each in batches[0].items()}
        for batch in batches:
            for name, each in batch.items():
                write(own[name], each)
            yield own

    return taken


def by_numpy(own: torch.Tensor, each: torch.Tensor) -> None:
    """Torch does not count this change."""
    own.numpy()[...] = each.numpy()


def of_weights(batches):
    """Yields batches that have one tensor in common, which the call does not read."""
    own = batches[0]["weights"].clone()
    for batch in batches:
        yield batch | {"weights": own.copy_(batch["weights"])}


def of_one_dict(batches):
    """Yields one dict, which gets the tensors of each batch."""
    own = {}
    for batch in batches:
        own.update(batch)
        yield own


@pytest.mark.parametrize("taken", [
    written_by(torch.Tensor.copy_), written_by(by_numpy), of_weights, of_one_dict
], ids=["copied", "by numpy", "weights alone", "one dict"])
def test_a_batch_that_changes_is_refused_by_name(shared, taken):
    batches, model = of_equal_shapes(), cases.model_of(CASE)
    with pytest.raises(UnsupportedTrainerError, match="batch 0 of 3 changed when a later one was"):
        cases.run(CASE, shared, model, batches, data_iterator=taken(batches))


def test_batches_may_be_views_of_one_tensor_and_come_again(shared):
    batches, model = cases.batches_of(), cases.model_of(CASE)
    weights = torch.cat([each["weights"] for each in batches]).split(CASE.microbatch_rows)
    views = [each | {"weights": own} for each, own in zip(batches, weights, strict=True)]
    found = []
    for function in (get_forward_backward_func(), shared):
        cases.run(CASE, function, model, [*views, views[-1]])
        found.append(cases.gradients(model))
    assert distance(*found) < 1e-10
