"""What cannot be shared exactly is refused by name; what shares no prompt runs as in Megatron."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter

import cases
import conftest
import dormouse.megatron
from dormouse.hf import UnsupportedModelError
from dormouse.megatron import UnsupportedTrainerError, refusals, shared_gpt
from models import distance

CASE = cases.Case()
# What a table of hooks is called, and what adds to it.
HOOKS = [
    ("forward hooks", "register_forward_hook"),
    ("forward pre hooks", "register_forward_pre_hook"),
    ("backward hooks", "register_full_backward_hook"),
    ("backward pre hooks", "register_full_backward_pre_hook"),
]


@pytest.fixture(scope="module")
def runtime():
    cases.join()
    with conftest.a_runtime() as runtime:
        yield runtime


@pytest.fixture
def model(runtime):
    return cases.model_of(CASE)


def shared(runtime, **options):
    return dormouse.megatron.share(get_forward_backward_func(), runtime=runtime, **options)


@pytest.mark.parametrize("name, value", [
    ("mtp_num_layers", 1),
    ("multi_latent_attention", True),
    ("experimental_attention_variant", "dsa"),
    ("heterogeneous_block_specs", True),
    ("softmax_type", "learnable"),
    ("window_size", (3, 0)),
    ("fp8", "hybrid"),
    ("fp4", "e2m1"),
    ("recompute_granularity", "full"),
    ("cpu_offloading", True),
    ("fine_grained_activation_offloading", True),
    ("cuda_graph_impl", "local"),
    ("overlap_moe_expert_parallel_comm", True),
    ("gradient_accumulation_fusion", True),
    ("defer_embedding_wgrad_compute", True),
    ("delay_wgrad_compute", True),
    ("enable_autocast", True),
    ("test_mode", True),
    ("batch_invariant_mode", True),
    ("flash_decode", True),
    ("moe_expert_capacity_factor", 1.0),
    ("moe_router_force_load_balancing", True),
    ("moe_input_jitter_eps", 0.01),
    ("moe_enable_routing_replay", True),
    ("moe_router_padding_for_quantization", True),
    ("moe_grouped_gemm", True),
    ("moe_latent_size", 16),
    ("moe_shared_expert_overlap", True),
    ("moe_permute_fusion", True),
    ("moe_router_fusion", True),
    ("moe_token_dispatcher_type", "flex"),
    ("hidden_dropout", 0.1),
    ("attention_dropout", 0.1),
])
def test_a_setting_is_refused_by_name(model, name, value):
    gpt = refusals.unwrapped(model)
    refusals.check_model(gpt)
    setattr(gpt.config, name, value)
    with pytest.raises(UnsupportedTrainerError, match=f"{name} is .*accepted: {name}="):
        refusals.check_model(gpt)


def test_every_setting_is_tested():
    marks = test_a_setting_is_refused_by_name.pytestmark
    tested = {name for name, _ in marks[0].args[1]}
    dropout = {"hidden_dropout", "attention_dropout"}
    assert tested == {name for name, *_ in refusals.SETTINGS} | dropout


def test_a_deterministic_model_needs_torchs_switch_on_a_gpu(model):
    gpt = refusals.unwrapped(model)
    gpt.config.deterministic_mode = True
    refusals.chunks_of([model])
    # Not a CPU, as a GPU is not one.
    gpt.to("meta")
    with pytest.raises(UnsupportedTrainerError, match="on meta.*use_deterministic_algorithms"):
        refusals.chunks_of([model])
    torch.use_deterministic_algorithms(True)
    try:
        refusals.chunks_of([model])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_experts_in_other_parts_than_the_model_are_refused_by_name(runtime, sizes):
    gpt = refusals.unwrapped(cases.model_of(cases.CASES["experts"]))
    of_model, of_experts = sizes
    vars(gpt.config).update(
        tensor_model_parallel_size=of_model, expert_tensor_parallel_size=of_experts
    )
    message = f"parallel_size is {of_experts}, .*accepted: expert_tensor_parallel_size={of_model}"
    with pytest.raises(UnsupportedTrainerError, match=message):
        refusals.check_model(gpt)


def test_dropout_is_accepted_in_evaluation(model):
    gpt = refusals.unwrapped(model)
    gpt.config.hidden_dropout = 0.1
    refusals.check_model(gpt.eval())


def router_of(gpt):
    return gpt.decoder.layers[1].mlp.router


def attention_of(gpt):
    return gpt.decoder.layers[1].self_attention


@pytest.mark.parametrize("change, message", [
    (lambda gpt: setattr(gpt, "position_embedding_type", "yarn"), "position_embedding_type is 'y"),
    (lambda gpt: setattr(gpt, "mtp_process", True), "predicts several tokens"),
    (
        lambda gpt: vars(gpt.config).update(
            fp32_residual_connection=True, pipeline_model_parallel_size=2
        ),
        "fp32_residual_connection is True in a pipeline",
    ),
    (
        lambda gpt: setattr(attention_of(gpt), "core_attention", torch.nn.Identity()),
        "core attention is a Identity",
    ),
    (
        lambda gpt: setattr(gpt.decoder.layers[1], "self_attention", torch.nn.Identity()),
        "a layer's attention is a Identity",
    ),
    (
        lambda gpt: vars(gpt.config).update(
            expert_model_parallel_size=2, moe_token_dispatcher_type="allgather"
        ),
        "moe_token_dispatcher_type is 'allgather'",
    ),
    (
        lambda gpt: vars(gpt.config).update(
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=2,
            moe_token_dispatcher_type="alltoall",
        ),
        "expert_tensor_parallel_size is 2",
    ),
    (
        lambda gpt: setattr(gpt.config, "moe_router_load_balancing_type", "sinkhorn"),
        "type is 'sinkhorn'",
    ),
    (lambda gpt: gpt.decoder.layers.append(torch.nn.Identity()), "a layer is a Identity"),
    (lambda gpt: setattr(gpt.decoder, "layers", torch.nn.ModuleList()), "stage has 0 layers"),
])
def test_a_part_of_the_model_is_refused_by_name(model, change, message):
    gpt = refusals.unwrapped(model)
    change(gpt)
    with pytest.raises(UnsupportedTrainerError, match=message):
        refusals.check_model(gpt)


@pytest.mark.parametrize("setting, message", [
    ({}, "core attention is a DotProductAttention and context_parallel_size above 1"),
    ({"hybrid_context_parallel": True}, "hybrid_context_parallel is True"),
])
def test_context_parallelism_with_others_is_refused_by_name(model, setting, message):
    gpt = refusals.unwrapped(model)
    vars(gpt.config).update(context_parallel_size=2, **setting)
    with pytest.raises(UnsupportedTrainerError, match=message):
        refusals.check_model(gpt)


def test_experts_on_some_ranks_of_a_row_are_refused_by_name(runtime):
    gpt = refusals.unwrapped(cases.model_of(cases.CASES["experts"]))
    vars(gpt.config).update(context_parallel_size=4, expert_model_parallel_size=2)

    def group(size: int) -> mock.Mock:
        return mock.Mock(size=lambda: size)

    of_row = "get_tensor_and_context_parallel_group"
    with (
        mock.patch.object(gpt.pg_collection, "tp_ep", group(2)),
        mock.patch.object(parallel_state, of_row, lambda: group(4)),
        mock.patch.object(dist, "get_process_group_ranks", lambda group: range(group.size())),
        pytest.raises(UnsupportedTrainerError, match="experts are on 2 of the 4 ranks"),
    ):
        shared_gpt.joint_group(gpt)


@contextlib.contextmanager
def of_ranks(ranks):
    """Context of a process group that has these ranks, whatever there is."""
    other, own = mock.Mock(), dist.get_process_group_ranks
    find = mock.Mock(side_effect=lambda group: ranks if group is other else own(group))
    with mock.patch.object(dist, "get_process_group_ranks", find):
        yield other


@pytest.mark.parametrize("name", refusals.GROUPS)
def test_process_groups_of_other_ranks_are_refused_by_name(runtime, model, name):
    message = f"{name} of the model's pg_collection has the ranks .0, 1., and .0. in parallel_state"
    with of_ranks([0, 1]) as group, mock.patch.object(model.module.pg_collection, name, group):
        with pytest.raises(UnsupportedTrainerError, match=message):
            cases.run(CASE, shared(runtime), model, cases.batches_of())


def test_process_groups_of_a_wrapper_are_refused_by_name(runtime, model):
    message = "dp_cp_group of the DistributedDataParallel has the ranks .0, 1."
    with of_ranks([0, 1]) as group, mock.patch.object(model, "dp_cp_group", group):
        with pytest.raises(UnsupportedTrainerError, match=message):
            cases.run(CASE, shared(runtime), model, cases.batches_of())


def test_process_groups_of_the_schedule_are_refused_by_name(runtime, model):
    named = {"pg_collection": ProcessGroupCollection.use_mpu_process_groups()}
    with of_ranks([0, 1]) as group, mock.patch.object(named["pg_collection"], "cp", group):
        with pytest.raises(UnsupportedTrainerError, match="cp of the schedule's pg_collection has"):
            cases.run(CASE, shared(runtime), model, cases.batches_of(), **named)


def test_other_process_groups_of_the_same_ranks_are_accepted(runtime, model):
    own = {name: dist.new_group([0]) for name in refusals.GROUPS}
    # Megatron takes None for a rank alone.
    groups = ProcessGroupCollection(**own | {"pos_embd": None, "embd": None, "dp": None})
    function = functools.partial(shared(runtime), pg_collection=groups)
    model.module.pg_collection = groups
    check(function, model)


def test_attention_for_context_parallelism_is_megatrons_without(runtime):
    """And is refused outside shared passes with it."""
    # Megatron's own cut of rotary tables is for GPUs.
    case = cases.Case(model={"position_embedding_type": "learned_absolute"})
    losses = []
    for kind in (DotProductAttention, dormouse.megatron.ContextAttention):
        with mock.patch.object(cases, "core_attention_of", lambda config, kind=kind: kind):
            model = cases.model_of(case)
        losses.append(cases.forward_step(case, iter(cases.batches_of()), model)[0])
    assert torch.equal(*losses)
    refusals.unwrapped(model).config.context_parallel_size = 2
    with pytest.raises(UnsupportedTrainerError, match="outside shared passes"):
        cases.forward_step(case, iter(cases.batches_of()), model)


def test_kept_graphs_with_expert_parallelism_are_refused_by_name(runtime):
    case = cases.CASES["experts"]
    chunks = cases.chunks_of(case)
    refusals.unwrapped(chunks[0]).config.expert_model_parallel_size = 2
    with pytest.raises(UnsupportedTrainerError, match="graphs is 'kept' with expert_model"):
        cases.run(case, shared(runtime, graphs="kept"), chunks, cases.batches_of())


def test_balanced_experts_over_replicas_are_refused_by_name(runtime):
    chunks = cases.chunks_of(cases.Case(config=cases.BALANCED))
    function = shared(runtime, across_replicas=True)
    with pytest.raises(UnsupportedTrainerError, match="experts and across_replicas is True"):
        cases.run(CASE, function, chunks, cases.batches_of())


@pytest.mark.parametrize("change, message", [
    (
        lambda gpt: setattr(gpt.config, "moe_router_load_balancing_type", "aux_loss"),
        "load_balancing_type is 'aux_loss', and 'none' in a router",
    ),
    (
        lambda gpt: setattr(gpt.config, "moe_router_load_balancing_type", ("none",)),
        r"load_balancing_type is \('none',\)",
    ),
    (
        lambda gpt: setattr(gpt.config, "moe_router_enable_expert_bias", True),
        "enable_expert_bias is True, and False in a router",
    ),
    (
        lambda gpt: setattr(gpt.config, "moe_router_topk", 1),
        "moe_router_topk is 1, and 2 in a router",
    ),
    (
        lambda gpt: setattr(gpt.config, "moe_router_score_function", "sigmoid"),
        "score_function is 'sigmoid', and 'softmax' in a router",
    ),
    (
        lambda gpt: setattr(gpt.config, "calculate_per_token_loss", True),
        "calculate_per_token_loss is True, and False in a router",
    ),
    (
        lambda gpt: setattr(router_of(gpt), "num_experts", 1),
        "num_moe_experts is 4, and 1 in a router",
    ),
    (
        lambda gpt: setattr(router_of(gpt), "config", copy.copy(gpt.config)),
        "a router has a configuration of its own",
    ),
    (lambda gpt: gpt.decoder.layers[1].eval(), "a router's training is False, and True"),
])
def test_a_router_that_differs_from_the_model_is_refused_by_name(runtime, change, message):
    gpt = refusals.unwrapped(cases.model_of(cases.CASES["experts"]))
    change(gpt)
    with pytest.raises(UnsupportedTrainerError, match=message):
        refusals.check_model(gpt)


@pytest.mark.parametrize("name", refusals.OF_ROUTERS)
def test_patched_routers_are_refused_by_name(runtime, monkeypatch, name):
    gpt = refusals.unwrapped(cases.model_of(cases.CASES["experts"]))
    refusals.check_model(gpt)
    own = getattr(TopKRouter, name)
    setattr(router_of(gpt), name, own.__get__(router_of(gpt)))
    with pytest.raises(UnsupportedTrainerError, match=f"a router's {name} is patched"):
        refusals.check_model(gpt)
    delattr(router_of(gpt), name)
    monkeypatch.setattr(TopKRouter, name, functools.wraps(own)(lambda *args, **named: None))
    with pytest.raises(UnsupportedTrainerError, match=f"TopKRouter.{name} is patched"):
        refusals.check_model(gpt)
    # A model without experts has none.
    refusals.check_model(refusals.unwrapped(cases.model_of(CASE)))


def test_a_router_patched_between_calls_is_refused_and_stays(runtime):
    case = cases.Case(config=cases.BALANCED)
    chunks, function = cases.chunks_of(case), shared(runtime)
    cases.run(case, function, chunks, cases.batches_of())
    patch = vars(router_of(refusals.unwrapped(chunks[0])))["is_aux_loss_enabled"] = lambda: False
    with pytest.raises(UnsupportedTrainerError, match="router's is_aux_loss_enabled is patched"):
        cases.run(case, function, chunks, cases.batches_of())
    assert router_of(refusals.unwrapped(chunks[0])).is_aux_loss_enabled is patch


@pytest.mark.parametrize("table, register", HOOKS)
def test_hooks_of_a_router_are_refused_by_name(runtime, table, register):
    gpt = refusals.unwrapped(cases.model_of(cases.CASES["experts"]))
    getattr(router_of(gpt), register)(lambda module, *values: None)
    with pytest.raises(UnsupportedTrainerError, match=f"a router has {table}"):
        refusals.check_model(gpt)


class Behind(torch.nn.Module):
    """What a layer spec may have as a layer's mlp: another module holds the experts."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *args, **named):
        return self.experts(*args, **named)


def test_a_router_in_another_place_is_refused_by_name(runtime):
    # It counts, and adds no losses, which the check would see.
    counts = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    case = cases.Case(config=cases.EXPERTS | counts)
    chunks, function = cases.chunks_of(case), shared(runtime)
    layer = refusals.unwrapped(chunks[0]).decoder.layers[1]
    layer.mlp = Behind(layer.mlp)
    message = "a router is at decoder.layers.1.mlp.experts.router, a TopKRouter"
    with pytest.raises(UnsupportedTrainerError, match=message):
        cases.run(case, function, chunks, cases.batches_of())


def test_a_router_of_another_class_is_refused_by_name(runtime):
    gpt = refusals.unwrapped(cases.model_of(cases.CASES["experts"]))
    refusals.check_model(gpt)
    gpt.decoder.layers[1].mlp.router = torch.nn.Identity()
    with pytest.raises(UnsupportedTrainerError, match="a layer's router is a Identity"):
        refusals.check_model(gpt)


def test_wrappers_are_refused_by_name(model):
    with pytest.raises(UnsupportedTrainerError, match="2 chunks"):
        refusals.chunks_of([model, model])
    with pytest.raises(UnsupportedTrainerError, match="the model is a Linear"):
        refusals.unwrapped(torch.nn.Linear(1, 1))
    model.ddp_config.overlap_param_gather = True
    with pytest.raises(UnsupportedTrainerError, match="overlap_param_gather"):
        refusals.unwrapped(model)
    model.ddp_config.overlap_param_gather = False


def penalized(name):
    """Returns a method of GPTModel that adds to the losses of labels."""
    own = getattr(GPTModel, name)

    # As a decorator does: it takes over the name.
    @functools.wraps(own)
    def changed(gpt, *args, labels=None, **named):
        return own(gpt, *args, labels=labels, **named) + (labels is not None)

    return changed


@pytest.mark.parametrize("name", ["forward", "_postprocess"])
@pytest.mark.parametrize("place, message", [
    ("a subclass", "Penalized has a {} of its own"),
    ("the class", "GPTModel.{} is patched"),
    ("the model", "the model's {} is patched"),
])
def test_what_does_more_with_labels_is_refused_by_name(runtime, monkeypatch, place, message, name):
    model, function = cases.model_of(CASE), shared(runtime)
    gpt, changed = model.module, penalized(name)
    check(function, model)
    # Between two calls, too.
    if place == "a subclass":
        gpt.__class__ = type("Penalized", (type(gpt),), {name: changed})
    elif place == "the class":
        monkeypatch.setattr(GPTModel, name, changed)
    else:
        setattr(gpt, name, changed.__get__(gpt))
    with pytest.raises(UnsupportedTrainerError, match=message.format(name)):
        cases.run(CASE, function, model, cases.batches_of())


def test_a_call_of_a_subclass_is_refused_by_name(model):
    kind = type(model.module)
    model.module.__class__ = type("Called", (kind,), {"__call__": lambda *args, **named: None})
    with pytest.raises(UnsupportedTrainerError, match="Called has a __call__ of its own"):
        refusals.unwrapped(model)


@pytest.mark.parametrize("table, register", HOOKS)
def test_hooks_of_the_model_are_refused_by_name(runtime, model, table, register):
    function = shared(runtime)
    check(function, model)
    hook = getattr(model.module, register)(lambda module, *values: None)
    with pytest.raises(UnsupportedTrainerError, match=f"the model has {table}: .*which see the"):
        cases.run(CASE, function, model, cases.batches_of())
    hook.remove()
    check(function, model)


def test_hooks_of_a_wrapper_see_losses(runtime, model):
    """And their gradients are those of Megatron's call."""
    model.register_forward_hook(lambda module, args, losses: 2 * losses)
    check(shared(runtime), model)


@pytest.mark.filterwarnings("ignore:dormouse.offload. nothing slept")
def test_hooks_of_dormouse_are_accepted(runtime, model):
    with dormouse.offload(model, runtime=runtime):
        check(shared(runtime), model)


def test_a_loss_of_tokens_of_a_class_is_its_own(runtime, model):
    """And has its gradients."""

    def doubled(gpt, labels, logits):
        return 2 * kind.compute_language_model_loss(gpt, labels, logits)

    kind = type(model.module)
    own = {"compute_language_model_loss": doubled}
    model.module.__class__ = type("Doubled", (kind,), own)
    check(shared(runtime), model)


def test_a_value_head_is_refused_by_name(runtime, model):
    model.module.output_layer = torch.nn.Linear(32, 1, dtype=torch.float64)
    with pytest.raises(UnsupportedTrainerError, match="a Linear of 1 numbers .*value head"):
        cases.run(CASE, shared(runtime), model, cases.batches_of())


def changed(**fields):
    """Returns batches of which the first differs."""
    batches = cases.batches_of()
    batches[0] |= {name: change(batches[0][name]) for name, change in fields.items()}
    return batches


@pytest.mark.parametrize("batches, message", [
    (lambda: changed(labels=lambda x: x.roll(1, 1)), "labels of row 0 .* are not the next tokens"),
    (lambda: changed(loss_mask=lambda x: x[:, 1:]), "have the shapes"),
    (lambda: [{"tokens": each["tokens"]} for each in cases.batches_of()], "without tokens, labels"),
    (lambda: [tuple(each) for each in cases.batches_of()], "is a tuple"),
])
def test_batches_are_refused_by_name(runtime, model, batches, message):
    with pytest.raises(UnsupportedTrainerError, match=message):
        cases.run(CASE, shared(runtime), model, batches())


def call(change):
    """Returns a forward step whose call of the model differs. ``change(arguments)`` changes it."""

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        arguments = {
            "input_ids": batch["tokens"],
            "position_ids": torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"]),
            "attention_mask": None,
            "labels": batch["labels"],
            "loss_mask": batch["loss_mask"].clone(),
        }
        change(arguments)
        losses = model(**arguments)
        return losses, lambda output: cases.loss_func(CASE, batch, output)

    return forward_step


@pytest.mark.parametrize("change, message", [
    (lambda given: given.update(input_ids=given["input_ids"] + 1), "other input_ids"),
    (lambda given: given.update(labels=given["labels"] + 1), "other labels"),
    (lambda given: given.update(labels=None), "without labels"),
    (lambda given: given.update(position_ids=given["position_ids"] + 1), "position_ids"),
    (lambda given: given.update(attention_mask=torch.zeros(1, 1, 64, 64).bool()), "not causal"),
    (lambda given: given["loss_mask"].fill_(1), "a loss_mask that has [0-9]+ labels which"),
    (lambda given: given.update(loss_mask=given["loss_mask"][:, 1:]), r"of shape \(2, 63\).*64\)"),
    (lambda given: given.update(runtime_gather_output=True), "called with runtime_gather_output"),
    (lambda given: given.update(packed_seq_params=object()), "called with packed_seq_params"),
])
def test_calls_are_refused_by_name(runtime, model, change, message):
    function = shared(runtime)
    with pytest.raises(UnsupportedTrainerError, match=message):
        cases.run(CASE, function, model, cases.batches_of(), forward_step_func=call(change))
    assert "forward" not in vars(model.module)
    # The next call is right.
    check(function, model)


def check(function, model) -> None:
    """Compares a call with Megatron's own."""
    cases.run(CASE, get_forward_backward_func(), model, cases.batches_of())
    wanted = cases.gradients(model)
    cases.run(CASE, function, model, cases.batches_of())
    assert distance(cases.gradients(model), wanted) < 1e-10


def test_a_causal_mask_and_a_loss_mask_are_accepted(runtime, model):
    """The mask of the batch, with other values, or a part of it."""

    def change(given):
        columns = given["labels"].shape[1]
        given["attention_mask"] = torch.ones(1, 1, columns, columns).triu(1).bool()
        given["loss_mask"] *= 2
        given["loss_mask"][0] = 0

    found = []
    for function in (get_forward_backward_func(), shared(runtime)):
        batches = cases.batches_of()
        # Megatron also takes a list of iterators, and a model that is in no list.
        own = {"forward_step_func": call(change), "data_iterator": [iter(batches)], "model": model}
        cases.run(CASE, function, model, batches, **own)
        found.append(cases.gradients(model))
    assert distance(*found) < 1e-10


def test_a_rank_without_data_is_refused(runtime, model):
    with pytest.raises(UnsupportedTrainerError, match="data_iterator is None"):
        shared(runtime)(data_iterator=None, model=[model], num_microbatches=1)


@pytest.mark.parametrize("calls, message", [(0, "not called for the last 3"), (2, "more often")])
def test_a_model_that_is_not_called_once_for_each_batch_is_refused(runtime, model, calls, message):
    batches = cases.batches_of()
    # Calls of the model that follow one another have the tokens of batches that do.
    following = iter([*batches, batches[0]])

    def forward_step(data_iterator, model):
        next(data_iterator)
        total = torch.zeros((), requires_grad=True)
        for own in [next(following) for _ in range(calls)]:
            total = total + model(own["tokens"], None, None, labels=own["labels"]).sum()
        return total, lambda output: (output.clone(), {})

    with pytest.raises(UnsupportedTrainerError, match=message):
        cases.run(CASE, shared(runtime), model, batches, forward_step_func=forward_step)


def test_a_loss_that_raises_leaves_nothing_behind(runtime, model):
    function, losses = shared(runtime), iter(range(3))

    def forward_step(data_iterator, model):
        output, loss_func = cases.forward_step(CASE, data_iterator, model)
        if next(losses) == 1:
            raise FloatingPointError("the second loss")
        return output, loss_func

    with pytest.raises(FloatingPointError):
        cases.run(CASE, function, model, cases.batches_of(), forward_step_func=forward_step)
    assert runtime.stats()["asleep"]["current_bytes"] == 0
    check(function, model)


def test_batches_without_shared_prompts_run_as_in_megatron(runtime, model, caplog):
    caplog.set_level(logging.WARNING, "dormouse.megatron.forward_backward")
    # Pretraining: every label carries loss, so a prompt is one token.
    whole = changed(loss_mask=torch.ones_like)
    for batches in (cases.batches_of()[:1], whole):
        function = shared(runtime)
        for _ in range(2):
            cases.run(CASE, get_forward_backward_func(), model, batches)
            wanted = cases.gradients(model)
            cases.run(CASE, function, model, batches)
            assert distance(cases.gradients(model), wanted) == 0
        assert function.sharing.rows == 0
    # Each is told once.
    assert [record.message for record in caplog.records] == [
        "no prompt is shared by the rows of 1 microbatches, so they run as in Megatron: rows share "
        "a prompt if they are equal up to the first label with a loss",
        "no prompt is shared by the rows of 3 microbatches, so they run as in Megatron: a row has "
        "fewer than 2 tokens up to its first label with a loss",
    ]


def test_a_model_is_checked_once(runtime, model):
    check_once = mock.patch.object(
        shared_gpt.SharedGPT, "_check", autospec=True, side_effect=shared_gpt.SharedGPT._check
    )
    with check_once as found:
        function = shared(runtime)
        for _ in range(3):
            cases.run(CASE, function, model, cases.batches_of())
    assert found.call_count == 1


def test_evaluation_runs_no_backward(runtime, model):
    function = shared(runtime)
    model.eval()
    with torch.no_grad():
        wanted, found = (
            cases.run(CASE, each, model, cases.batches_of(), forward_only=True)
            for each in (get_forward_backward_func(), function)
        )
    assert function.sharing.prompts == 2
    for own, ours in zip(wanted, found, strict=True):
        torch.testing.assert_close(ours["loss"], own["loss"].to(ours["loss"]))
    assert all(not gradient.any() for gradient in cases.gradients(model).values())
    check(function, model.train())


def test_other_data_than_losses_are_megatrons(runtime, model):
    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        return model(batch["tokens"], None, None), lambda logits, non_loss_data: logits

    options = {"forward_only": True, "collect_non_loss_data": True}
    found = cases.run(
        *(CASE, shared(runtime), model, cases.batches_of()),
        forward_step_func=forward_step,
        **options,
    )
    assert [each.shape[-1] for each in found] == [cases.VOCABULARY] * 3


def test_a_model_that_is_not_causal_is_refused_by_running(runtime, model):
    core = model.module.decoder.layers[1].self_attention.core_attention
    core.scale_mask_softmax.attn_mask_type = None
    with pytest.raises(UnsupportedModelError, match="not exact"):
        cases.run(CASE, shared(runtime), model, cases.batches_of())


def test_batches_of_another_form_are_read_by_the_caller(runtime, model):
    def read(batch):
        return dormouse.megatron.Microbatch(batch["tokens"], batch["labels"], batch["loss_mask"])

    cases_read = []
    check(shared(runtime, read=lambda batch: cases_read.append(batch) or read(batch)), model)
    assert len(cases_read) == 3
