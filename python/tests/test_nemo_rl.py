"""The adapter for NeMo-RL with a stand-in for its functions, which need Python 3.13 and a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from example_scripts import differ_in_few_lines_and_agree
from models import distance, take_gradients, tiny
from test_token_scores import padded

import dormouse.nemo_rl
from dormouse.nemo_rl import MODULE, WORKER, UnsupportedTrainerError
from dormouse.nemo_rl.refusals import FUNCTION
from dormouse.trainers import short_prompts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "nemo_rl"
sys.path.insert(0, str(EXAMPLES))
from nemo_rl_stand_in import (
    InputType,
    LogprobsPostProcessor,
    LossPostProcessor,
    Sampling,
    forward_with_post_processing_fn,
    microbatch_of,
    processors,
)

COUNTS = {"global_valid_seqs": torch.tensor(6.0), "global_valid_toks": torch.tensor(29.0)}


def a_module() -> ModuleType:
    """Returns a module of its own with what :func:`dormouse.nemo_rl.share` needs."""
    module = ModuleType("nemo_rl_stand_in.train")
    for each in (forward_with_post_processing_fn, LossPostProcessor, LogprobsPostProcessor):
        setattr(module, each.__name__, each)
    return module


@pytest.fixture
def module(runtime):
    """A module of its own that shares prompts."""
    module = a_module()
    dormouse.nemo_rl.share(module, runtime=runtime)
    return module


def a_batch(*, dtype=torch.float64, longer=0, seed=3):
    """Rows of three prompts in any order, padded on the right. One has no response, and one two
    turns with what a tool returned between them."""
    prompts = [n + longer for n in (17, 11, 17, 17, 11, 23, 17)]
    ids, mask, keep = padded(prompts, [4, 6, 1, 8, 3, 0, 5], left=2, right=1, seed=seed)
    columns = ids.shape[1]
    data = {"input_ids": torch.zeros_like(ids), "token_mask": torch.zeros(ids.shape, dtype=dtype)}
    for row, has in enumerate(mask != 0):
        tokens = ids[row][has]
        data["input_ids"][row, : len(tokens)] = tokens
        response = int(has[columns - keep :].sum())
        data["token_mask"][row, len(tokens) - response : len(tokens)] = 1
    start = int(data["token_mask"][1].argmax())
    data["token_mask"][1, start + 2 : start + 4] = 0
    generator = torch.Generator().manual_seed(seed)
    data |= {
        "input_lengths": mask.sum(1),
        "sample_mask": torch.tensor([1, 1, 0, 1, 1, 1, 1], dtype=dtype),
        "prev_logprobs": torch.rand(ids.shape, generator=generator, dtype=dtype) - 3,
        "advantages": torch.rand(ids.shape, generator=generator, dtype=dtype) - 0.5,
    }
    return microbatch_of(data)


def computed(function, model, batch, temperature):
    """Returns the loss, metrics and gradients."""
    sampling = Sampling(temperature=temperature)
    loss, metrics, same = function(
        model=model,
        post_processing_fn=processors(sampling_params=sampling).loss,
        processed_mb=batch,
        sampling_params=sampling,
        **COUNTS,
    )
    assert same is batch
    loss.backward()
    return float(loss.detach()), metrics, take_gradients(model)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_metrics_and_gradients_are_those_of_the_function(temperature, module):
    model, batch = tiny(), a_batch()
    shared = getattr(module, FUNCTION)
    wanted = computed(forward_with_post_processing_fn, model, batch, temperature)
    got = computed(shared, model, batch, temperature)
    assert got[0] == pytest.approx(wanted[0], rel=1e-12)
    assert got[1] == {"ratio": pytest.approx(wanted[1]["ratio"], rel=1e-12)}
    assert distance(got[2], wanted[2]) < 1e-10
    assert (shared.sharing.rows, shared.sharing.prompts) == (6, 2)


def test_a_batch_with_a_prompt_of_one_token_runs_the_own_function(module, caplog):
    short_prompts.note.cache_clear()
    model, batch = tiny(), a_batch()
    # The second row's response begins at its second token.
    batch.data_dict["token_mask"][1, 1:11] = 1
    shared = getattr(module, FUNCTION)
    wanted = computed(forward_with_post_processing_fn, model, batch, 0.7)
    for _ in range(2):
        got = computed(shared, model, batch, 0.7)
        assert got[:2] == wanted[:2] and distance(got[2], wanted[2]) == 0
    assert [each.message for each in caplog.records] == [
        "a batch with a prompt of fewer than 2 tokens runs as in NeMo-RL"
    ]
    assert shared.sharing.rows == 0


def test_log_probabilities_are_at_their_own_tokens(module):
    model, batch = tiny().eval(), a_batch()
    call = {"post_processing_fn": processors().logprobs, "processed_mb": batch}
    with torch.no_grad():
        got, metrics, _ = module.forward_with_post_processing_fn(model=model, **call)
        wanted, _, _ = forward_with_post_processing_fn(model=model, **call)
    assert metrics["logprobs"] is got and got.shape == batch.data_dict["input_ids"].shape
    is_response = batch.data_dict["token_mask"]
    assert ((got - wanted) * is_response).abs().max() < 1e-10
    assert (got[:, :11] == 0).all(), "values of prompts"


def test_a_batch_without_responses_adds_nothing(module):
    """As NeMo-RL's dummy micro-batches, which ranks run for each other's sake."""
    model, batch = tiny(), a_batch()
    batch.data_dict["token_mask"][:] = 0
    loss, _, gradients = computed(module.forward_with_post_processing_fn, model, batch, 1.0)
    assert loss == 0 and all(not gradient.any() for gradient in gradients.values())


def test_other_calls_run_the_own_function(module, caplog):
    dormouse.nemo_rl.forward._note_own_forward.cache_clear()
    model, batch, function = tiny(), a_batch(), module.forward_with_post_processing_fn

    def of_logits(data, global_valid_seqs, global_valid_toks, logits):
        return logits.sum(), {}

    of_logits.input_type = InputType.LOGIT
    function(model, processors(of_logits).loss, batch, **COUNTS)
    del batch.data_dict["token_mask"]
    function(model, processors().logprobs, batch)
    function(model, processors().logprobs, batch)
    assert [each.message for each in caplog.records] == [
        f"a call for {name}, or without token_mask, runs as in NeMo-RL"
        for name in ("LossPostProcessor", "LogprobsPostProcessor")
    ]
    assert function.sharing.rows == 0


def test_calls_that_are_refused(module):
    batch, function = a_batch(), module.forward_with_post_processing_fn
    images = dataclasses.replace(batch.processed_inputs, vlm_kwargs={"pixel_values": None})
    with_images = dataclasses.replace(batch, processed_inputs=images)
    beside = a_batch()
    beside.data_dict["token_mask"][0, -1] = 1
    for post, each, sampling, match in (
        (processors(cp_size=2), batch, None, "cp_size is 2"),
        (processors(enable_seq_packing=True), batch, None, "sequence_packing"),
        (processors(), with_images, None, "images"),
        (processors(), batch, Sampling(top_k=5), "top_k is 5"),
        (processors(), batch, Sampling(top_p=0.9), "top_p is 0.9"),
        (processors(), beside, None, "padding"),
    ):
        with pytest.raises(UnsupportedTrainerError, match=match):
            function(tiny(), post.loss, each, sampling_params=sampling, **COUNTS)


def test_a_function_that_computes_otherwise_is_refused(runtime):
    module = a_module()

    def altered(model, post_processing_fn, processed_mb, is_reward_model=False,
                allow_flash_attn_args=True, global_valid_seqs=None, global_valid_toks=None,
                sampling_params=None, sequence_dim=1):  # fmt: skip
        own = forward_with_post_processing_fn
        found, metrics, same = own(model, post_processing_fn, processed_mb)
        return 1.01 * found, metrics, same

    module.forward_with_post_processing_fn = altered
    function = dormouse.nemo_rl.share(module, runtime=runtime)
    with pytest.raises(UnsupportedTrainerError, match="own log-probabilities"):
        function(tiny(), processors().logprobs, a_batch())


def test_a_module_is_restored(runtime):
    module = a_module()
    assert dormouse.nemo_rl.share(module, runtime=runtime) is getattr(module, FUNCTION)
    with pytest.raises(UnsupportedTrainerError, match="already"):
        dormouse.nemo_rl.share(module, runtime=runtime)
    for _ in range(2):
        dormouse.nemo_rl.restore(module)
        assert getattr(module, FUNCTION) is forward_with_post_processing_fn


def test_another_signature_is_refused():
    module = a_module()
    module.forward_with_post_processing_fn = lambda model, data: None
    with pytest.raises(UnsupportedTrainerError, match="of NeMo-RL 0.6 and 0.7"):
        dormouse.nemo_rl.share(module)


def test_a_worker_that_is_imported_is_refused(runtime, monkeypatch):
    monkeypatch.setitem(sys.modules, WORKER, a_module())
    with pytest.raises(UnsupportedTrainerError, match="share\\(\\) before"):
        dormouse.nemo_rl.share(a_module(), runtime=runtime)


def test_register_of_a_module_that_is_imported(runtime, monkeypatch):
    module = a_module()
    monkeypatch.setitem(sys.modules, MODULE, module)
    dormouse.nemo_rl.register(runtime=runtime, graphs="twice")
    assert getattr(module, FUNCTION).sharing.rows == 0


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with NeMo-RL's two modules, of which the worker alone imports the other."""
    for name, text in (
        (MODULE, "from nemo_rl_stand_in import *\n"),
        (WORKER, f"from {MODULE} import {FUNCTION}\n"),
    ):
        *packages, file = name.split(".")
        for depth in range(len(packages)):
            folder = tmp_path.joinpath(*packages[: depth + 1])
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        tmp_path.joinpath(*packages, f"{file}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path
    for name in [each for each in sys.modules if each.split(".")[0] == "nemo_rl"]:
        del sys.modules[name]


def test_a_worker_that_imports_the_module_shares(package, runtime):
    finders = list(sys.meta_path)
    dormouse.nemo_rl.register(runtime=runtime)
    assert MODULE not in sys.modules
    worker = importlib.import_module(WORKER)
    assert sys.meta_path == finders
    computed(getattr(worker, FUNCTION), tiny(), a_batch(), 0.7)
    assert getattr(worker, FUNCTION).sharing.rows == 6


def test_an_import_that_failed_shares_when_it_is_repeated(package, runtime):
    module = package.joinpath(*MODULE.split(".")).with_suffix(".py")
    text = module.read_text()
    module.write_text("raise RuntimeError\n")
    dormouse.nemo_rl.register(runtime=runtime)
    with pytest.raises(RuntimeError):
        importlib.import_module(WORKER)
    module.write_text(text)
    importlib.invalidate_caches()
    assert getattr(importlib.import_module(WORKER), FUNCTION).sharing.rows == 0


@pytest.mark.slow
def test_examples_differ_in_few_lines_and_agree():
    differ_in_few_lines_and_agree(EXAMPLES, ("policy.py", "policy_shared.py"))
