"""Sums of a call's passes under ``fully_shard``: as wide as FSDP's sums of microbatches."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from model_zoo import zoo_model
from models import distance, take_gradients, tiny
from padded_batch import padded_values
from test_token_scores import padded
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from dormouse.hf import SharedPrefix, support
from dormouse.hf.twins import Twins
from dormouse.hf.whole_weights import WholeParameters

PROMPTS = 64


@pytest.fixture(scope="module")
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("graphs", ["kept", "twice"])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_a_call_of_many_prompts_is_as_near_to_fp64_as_microbatches(
    reduce_dtype, graphs, one_rank, runtime
):
    prompts = [3 + row // 2 for row in range(2 * PROMPTS)]
    ids, mask, keep = padded(prompts, [6] * len(prompts))
    # Gradients of equal responses point one way: their rounding averages out, that of sums does not.
    ids[:, -keep:] = ids[0, -keep:]

    def loss_of(values, rows=slice(None)):
        return (values * mask[rows, -keep:]).sum()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    # Of few layers, whose own rounding is less than that of sums.
    first = tiny(dtype=torch.float32, num_hidden_layers=1)
    plain, shared = (fully_shard(copy.deepcopy(first), mp_policy=policy) for _ in range(2))
    for row in range(0, len(ids), 2):
        rows = slice(row, row + 2)
        loss_of(padded_values(plain, ids[rows], mask[rows], keep)[0], rows).backward()
    scores = SharedPrefix(shared, runtime).score(
        ids, mask, keep=keep, graphs=graphs, microbatch_tokens=64
    )
    loss_of(scores.log_probabilities).backward()
    model = tiny(num_hidden_layers=1)
    model.load_state_dict({n: p.to(torch.bfloat16) for n, p in first.state_dict().items()})
    loss_of(padded_values(model, ids, mask, keep)[0]).backward()
    truth = take_gradients(model)
    ours, theirs = (
        distance({n: p.grad.full_tensor() for n, p in each.named_parameters()}, truth)
        for each in (shared, plain)
    )
    print(f"SUMS {reduce_dtype} {graphs}: shared {ours:.4f}, microbatches {theirs:.4f}")
    assert 0 < ours <= 1.25 * theirs < 0.1


def test_a_call_frees_the_weights_that_it_gathered(one_rank, runtime, monkeypatch):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(tiny(dtype=torch.float32), mp_policy=policy)
    gather, storages = WholeParameters.gather, set()

    def noted(parameters):
        weights = gather(parameters)
        gathered = weights._gathered.values()
        storages.update(StorageWeakRef(each.data.untyped_storage()) for each in gathered)
        return weights

    monkeypatch.setattr(WholeParameters, "gather", noted)
    shared = SharedPrefix(model, runtime)
    ids, mask, keep = padded([17, 17, 11], [4, 6, 5])
    for _ in range(2):
        scores = shared.score(ids, mask, keep=keep)
        scores.log_probabilities.sum().backward()
    del scores
    gc.collect()
    assert len(storages) >= 2 * len(list(model.parameters()))
    assert [each for each in storages if not each.expired()] == []


def test_graphs_are_kept_beside_the_sums(one_rank, runtime, monkeypatch):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(tiny(dtype=torch.float32), mp_policy=policy)
    shared = SharedPrefix(model, runtime)
    ids, mask, keep = padded([17, 17, 11], [4, 6, 5])

    def graphs(free_bytes: int) -> str:
        monkeypatch.setattr(support, "free_bytes", lambda device: free_bytes)
        return shared.score(ids, mask, keep=keep, graphs="auto").graphs

    sum_bytes = 4 * sum(p.numel() for p in model.parameters())
    assert graphs(sum_bytes + (1 << 30)) == "kept"
    # As much as the sums of all weights, of which nothing is left for graphs.
    assert graphs(sum_bytes) == "twice"
    narrow = SharedPrefix(fully_shard(tiny(dtype=torch.bfloat16)), runtime)
    assert narrow.score(ids, mask, keep=keep, graphs="auto").graphs == "kept"


def test_scaled_embeddings_add_up_once(one_rank, runtime, monkeypatch):
    """A gradient as large as the embedding in each microbatch would take longer than the rest."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    first = zoo_model("gemma2", torch.float32, tie_word_embeddings=False)
    model = fully_shard(copy.deepcopy(first), mp_policy=policy)
    own, added = Twins._add, []

    def counted(twins, twin):
        added.append(twin is model.get_input_embeddings().weight)
        own(twins, twin)

    monkeypatch.setattr(Twins, "_add", counted)
    # Without padding on the left, whose rows are no numbers in FP64.
    ids, mask, keep = padded([17, 17, 17, 17], [4, 6, 5, 7], left=0)
    shared = SharedPrefix(model, runtime)

    def gradient(microbatch_tokens: int) -> torch.Tensor:
        scores = shared.score(
            ids, mask, keep=keep, microbatch_tokens=microbatch_tokens, graphs="kept"
        )
        added.clear()
        scores.log_probabilities.sum().backward()
        found = model.get_input_embeddings().weight.grad.full_tensor()
        model.zero_grad()
        return found

    found = [(gradient(tokens), added.count(True)) for tokens in (8, 64)]
    # Of the prompt alone, however many microbatches there are.
    assert [count for _, count in found] == [1, 1]
    plain = copy.deepcopy(first).bfloat16().double()
    values = padded_values(plain, ids, mask, keep)[0]
    values.sum().backward()
    truth = {"embedding": plain.get_input_embeddings().weight.grad}
    assert all(distance({"embedding": each}, truth) < 0.05 for each, _ in found)
