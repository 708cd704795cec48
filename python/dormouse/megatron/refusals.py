"""What a model, its wrappers and its calls must be; everything else is refused by name."""

from __future__ import annotations

import inspect
import sys

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from ..hf.unknown_code import HOOKS
from ..trainers.refusals import UnsupportedTrainerError, refuse
from .balancing import routers_of
from .batches import Microbatch
from .context import is_context_parallel
from .context_attention import ContextAttention
from .routers import NOT_RUN, REPLACED

SINKHORN = "sinkhorn"
POSITIONS = ("rope", "learned_absolute", "none")
# Of TransformerConfig: the values that are accepted, and why others are not.
SETTINGS = (
    ("mtp_num_layers", (None,), "its losses read rows that are shared"),
    ("multi_latent_attention", (False,), "keys are expanded inside the attention"),
    ("experimental_attention_variant", (None,), "it is no softmax attention"),
    ("heterogeneous_block_specs", (False,), "layers differ"),
    ("softmax_type", ("vanilla",), "attention has sinks"),
    ("window_size", (None,), "attention has a window"),
    ("fp8", (None,), "scales depend on the rows of a microbatch"),
    ("fp4", (None,), "scales depend on the rows of a microbatch"),
    ("recompute_granularity", (None,), "prompts sleep instead of being computed again"),
    ("cpu_offloading", (False,), "activations are offloaded already"),
    ("fine_grained_activation_offloading", (False,), "activations are offloaded already"),
    ("cuda_graph_impl", ("none",), "captured graphs run no other attention"),
    ("overlap_moe_expert_parallel_comm", (False,), "layers run out of order"),
    ("gradient_accumulation_fusion", (False,), "it writes gradients past autograd"),
    ("defer_embedding_wgrad_compute", (False,), "it computes gradients past autograd"),
    ("delay_wgrad_compute", (False,), "it computes gradients past autograd"),
    ("enable_autocast", (False,), "it is not tested"),
    ("test_mode", (False,), "replicas wait for each other in each pass, and run other numbers"),
    ("batch_invariant_mode", (False,), "kernels are chosen by the rows of a pass"),
    ("flash_decode", (False,), "it is of generation"),
    ("moe_expert_capacity_factor", (None,), "which tokens are dropped depends on other rows"),
    ("moe_router_force_load_balancing", (False,), "routing is random"),
    ("moe_input_jitter_eps", (None,), "responses would share the noise of their prompt"),
    ("moe_enable_routing_replay", (False,), "recorded experts are those of other rows"),
    ("moe_router_padding_for_quantization", (False,), "experts get rows that depend on others"),
    ("moe_grouped_gemm", (False,), "it is not tested"),
    ("moe_latent_size", (None,), "it is not tested"),
    ("moe_shared_expert_overlap", (False,), "it is not tested"),
    ("moe_permute_fusion", (False,), "it is not tested"),
    ("moe_router_fusion", (False,), "it is not tested"),
    ("moe_token_dispatcher_type", ("alltoall", "allgather"), "it is not tested"),
)
# Of ProcessGroupCollection: groups in which passes run and reduce, and ranks decide.
GROUPS = (
    *("tp", "pp", "mp", "cp", "tp_cp", "dp", "dp_cp", "tp_dp_cp"),
    *("ep", "expt_tp", "tp_ep", "expt_dp"),
)
WRAPPERS = (DistributedDataParallel, Float16Module)
# Methods of GPTModel that do something else with labels than without.
WITH_LABELS = ("forward", "_postprocess")
_WITHOUT_LABELS = "shared passes run it without labels, so what it does with them is lost"
_IN_LOSSES = "losses of tokens may be computed in compute_language_model_loss"
# Methods of routers of which passes run a part, or none.
OF_ROUTERS = ("forward", "routing", *REPLACED, *NOT_RUN)
_IN_PASSES = "passes leave it out, or run it once for the rows of a prompt"
# What routers keep of TransformerConfig when they are made, by its setting.
KEPT_BY_ROUTERS = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "topk",
    "moe_router_score_function": "score_function",
    "moe_router_enable_expert_bias": "enable_expert_bias",
    "calculate_per_token_loss": "calculate_per_token_loss",
}
# Arguments of GPTModel.forward that a call may have.
ARGUMENTS = ("input_ids", "position_ids", "attention_mask", "labels", "loss_mask")


def chunks_of(modules: list[torch.nn.Module]) -> list[GPTModel]:
    """Returns the parts of the model that a trainer's list has, one for each virtual stage.

    Raises :class:`UnsupportedTrainerError`.
    """
    chunks = list(map(unwrapped, modules))
    for module, chunk in zip(modules, chunks, strict=True):
        for wrapper in nested(module)[:-1]:
            check_groups(wrapper, f"the {type(wrapper).__name__}", "{}_group")
        check_groups(chunk.pg_collection, "the model's pg_collection")
        _check_around(chunk)
    wanted = chunks[0].config.virtual_pipeline_model_parallel_size or 1
    refuse(
        (
            len(chunks) != wanted,
            f"the model has {len(chunks)} chunks",
            f"{wanted}, virtual_pipeline_model_parallel_size",
        )
    )
    return chunks


def check_groups(holder: object, described: str, attribute: str = "{}") -> None:
    """Compares process groups with those of parallel_state, by their ranks: what ranks do together
    is decided in the latter. ``holder``: has some of :data:`GROUPS`, or is None. ``attribute``: of
    the holder, given a group's name.

    Raises :class:`UnsupportedTrainerError`.
    """
    for name, own in vars(ProcessGroupCollection.use_mpu_process_groups(list(GROUPS))).items():
        group = getattr(holder, attribute.format(name), own)
        found, wanted = map(_ranks_of, (group, own))
        refuse(
            (
                found != wanted,
                f"{attribute.format(name)} of {described} has the ranks {found}, and {wanted} in "
                "parallel_state",
                "process groups with the ranks of those in parallel_state",
            )
        )


def _ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Returns the ranks of a group. None stands for this rank alone, as in Megatron."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _check_around(gpt: GPTModel) -> None:
    """Checks torch's own switches. They may change between steps, and the model's fingerprint does
    not contain them."""
    device = next(gpt.parameters()).device
    refuse(
        (
            gpt.config.deterministic_mode
            and device.type != "cpu"
            and not torch.are_deterministic_algorithms_enabled(),
            f"deterministic_mode is True on {device}, and torch.are_deterministic_algorithms_"
            "enabled() is False, by which shared passes choose kernels",
            "deterministic_mode=True after torch.use_deterministic_algorithms(True)",
        )
    )


def nested(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a part of a model after what is around it, from outside."""
    found = [module]
    while isinstance(found[-1], WRAPPERS):
        found.append(found[-1].module)
    return found


def unwrapped(module: torch.nn.Module) -> GPTModel:
    """Returns the model in its wrappers.

    Raises :class:`UnsupportedTrainerError`.
    """
    *wrappers, inner = nested(module)
    for wrapper in wrappers:
        refuse(
            (
                getattr(settings_of(wrapper), "overlap_param_gather", False),
                "overlap_param_gather gathers the weights of a module as it runs",
                "overlap_param_gather=False",
            )
        )
    refuse(
        (
            not isinstance(inner, GPTModel),
            f"the model is a {type(inner).__name__}",
            "megatron.core's GPTModel, in its DistributedDataParallel and Float16Module or not",
        ),
        *(
            (
                name in vars(inner),
                f"the model's {name} is patched: {_WITHOUT_LABELS}",
                f"that of its class; {_IN_LOSSES}",
            )
            for name in WITH_LABELS
        ),
        *(
            (
                getattr(type(inner), name, None) is not getattr(GPTModel, name),
                f"{type(inner).__name__} has a {name} of its own: {_WITHOUT_LABELS}",
                f"GPTModel.{name}; {_IN_LOSSES}",
            )
            for name in ("__call__", *WITH_LABELS)
        ),
        *(
            (
                not _is_of_its_file(GPTModel, name),
                f"GPTModel.{name} is patched: {_WITHOUT_LABELS}",
                f"megatron.core's; {_IN_LOSSES}",
            )
            for name in WITH_LABELS
        ),
        *(
            (
                _has_hooks(inner, table),
                f"the model has {_described(table)}: they see the logits of shared passes, not the "
                "losses of a call",
                "hooks of its DistributedDataParallel or Float16Module, which see the losses",
            )
            for table in HOOKS
        ),
    )
    return inner


def _is_of_its_file(kind: type, name: str) -> bool:
    """Returns whether a method of a class is the one of the file that defines the class, whatever
    name a wrapper of it took over."""
    method = getattr(kind, name, None)
    if _globals(method).get("__name__") == "torch._dynamo.eval_frame":
        method = method._torchdynamo_orig_callable
    is_here = _globals(method) is vars(sys.modules[kind.__module__])
    return is_here and method.__qualname__ == f"{kind.__name__}.{name}"


def _globals(function) -> dict:
    return getattr(function, "__globals__", {})


def _has_hooks(module: torch.nn.Module, table: str) -> bool:
    # Those of dormouse.offload change nothing.
    modules = (getattr(hook, "__module__", None) for hook in getattr(module, table).values())
    return any(not str(each).startswith("dormouse.") for each in modules)


def _described(table: str) -> str:
    """Returns what a table of hooks has, in words."""
    return table.strip("_").replace("_", " ")


def settings_of(module: torch.nn.Module) -> DistributedDataParallelConfig | None:
    """Returns how gradients of a module are reduced; None if it is not wrapped for that."""
    return getattr(module, "ddp_config", None)


def check_model(gpt: GPTModel) -> None:
    """Checks what may change between steps, too. Raises :class:`UnsupportedTrainerError`."""
    config = gpt.config
    is_expert_parallel = config.expert_model_parallel_size > 1
    is_split = is_context_parallel(gpt)
    refuse(
        *(
            (
                getattr(config, name, accepted[0]) not in accepted,
                f"{name} is {getattr(config, name, None)}: {why}",
                f"{name}={accepted[0]!r}",
            )
            for name, accepted, why in SETTINGS
        ),
        (
            config.fp32_residual_connection and config.pipeline_model_parallel_size > 1,
            "fp32_residual_connection is True in a pipeline: stages send each other hidden states "
            "in the dtype of weights",
            "fp32_residual_connection=False, or pipeline_model_parallel_size=1",
        ),
        (
            is_split and config.hybrid_context_parallel,
            "hybrid_context_parallel is True: rows are on different numbers of ranks",
            "hybrid_context_parallel=False",
        ),
        (
            SINKHORN in config.moe_router_load_balancing_type,
            "moe_router_load_balancing_type is 'sinkhorn': routing of a row depends on others",
            "'none'",
        ),
        (
            is_expert_parallel and config.moe_token_dispatcher_type != "alltoall",
            f"moe_token_dispatcher_type is {config.moe_token_dispatcher_type!r} and "
            "expert_model_parallel_size above 1: it takes as many rows from each rank",
            "'alltoall'",
        ),
        (
            is_expert_parallel and config.expert_tensor_parallel_size > 1,
            f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size} and "
            "expert_model_parallel_size above 1: it is not tested",
            "expert_tensor_parallel_size=1",
        ),
        (
            config.num_moe_experts is not None
            and not is_expert_parallel
            and config.expert_tensor_parallel_size != config.tensor_model_parallel_size,
            f"expert_tensor_parallel_size is {config.expert_tensor_parallel_size}, "
            f"tensor_model_parallel_size {config.tensor_model_parallel_size} and "
            "expert_model_parallel_size 1: it is not tested",
            f"expert_tensor_parallel_size={config.tensor_model_parallel_size}",
        ),
        (
            gpt.mtp_process,
            "the model predicts several tokens: its losses read rows that are shared",
            "mtp_block_spec=None",
        ),
        (
            gpt.post_process and _outputs_of(gpt) != gpt.vocab_size,
            f"the output layer is a {type(getattr(gpt, 'output_layer', None)).__name__} of "
            f"{_outputs_of(gpt)} numbers for each token, as of a value head",
            f"{gpt.vocab_size}, the size of the vocabulary",
        ),
        (
            gpt.position_embedding_type not in POSITIONS,
            f"position_embedding_type is {gpt.position_embedding_type!r}",
            ", ".join(map(repr, POSITIONS)),
        ),
        (
            config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl != "native",
            f"cross_entropy_fusion_impl is {config.cross_entropy_fusion_impl!r}",
            "'native'",
        ),
    )
    refuse(
        (
            len(gpt.decoder.layers) == 0,
            "a pipeline stage has 0 layers, so no keys of a prompt",
            "at least one layer in each part of the model",
        )
    )
    for name in ("hidden_dropout", "attention_dropout"):
        rate = getattr(config, name)
        refuse(
            (
                gpt.training and rate > 0,
                f"{name} is {rate}: responses would share the masks of their prompt",
                f"{name}=0.0",
            )
        )
    for layer in gpt.decoder.layers:
        _check_layer(layer, is_split)
    routers = [each for each in routers_of(gpt) if each is not None]
    others = [
        f"{name}, a {type(module).__name__}"
        for name, module in gpt.named_modules()
        if isinstance(module, Router) and all(module is not each for each in routers)
    ]
    refuse(
        (
            others,
            f"a router is at {', '.join(others[:1])}: it counts and balances the rows of passes",
            "routers of the MoELayer at decoder.layers.N.mlp",
        ),
        *(
            (
                routers and not _is_of_its_file(TopKRouter, name),
                f"TopKRouter.{name} is patched: {_IN_PASSES}",
                "megatron.core's",
            )
            for name in OF_ROUTERS
        ),
    )
    for router in routers:
        _check_router(gpt, router)


def _outputs_of(gpt: GPTModel) -> int | None:
    """Returns the width of the output layer, of Megatron's class or torch's; None: it does not
    say."""
    layer = getattr(gpt, "output_layer", None)
    return getattr(layer, "output_size", getattr(layer, "out_features", None))


def _check_router(gpt: GPTModel, router: TopKRouter) -> None:
    config, kinds = gpt.config, gpt.config.moe_router_load_balancing_type
    refuse(
        (
            not isinstance(kinds, (str, list)) or router.routing_type != kinds,
            f"moe_router_load_balancing_type is {kinds!r}, and {router.routing_type!r} in a router",
            "a string or a list, the same since the model was made",
        ),
        (
            router.config is not config,
            "a router has a configuration of its own",
            "that of the model, the same object",
        ),
        *(
            (
                getattr(router, kept) != getattr(config, name),
                f"{name} is {getattr(config, name)!r}, and {getattr(router, kept)!r} in a router",
                "the same since the model was made",
            )
            for name, kept in KEPT_BY_ROUTERS.items()
        ),
        *(
            (
                name in vars(router),
                f"a router's {name} is patched: {_IN_PASSES}",
                "that of its class",
            )
            for name in OF_ROUTERS
        ),
        *(
            (
                _has_hooks(router, table),
                f"a router has {_described(table)}: they see the rows of a prompt once",
                "none",
            )
            for table in HOOKS
        ),
        (
            router.training != gpt.training,
            f"a router's training is {router.training}, and {gpt.training} that of the model",
            "the same",
        ),
    )


def _check_layer(layer: torch.nn.Module, is_split: bool) -> None:
    attention = getattr(layer, "self_attention", None)
    core = getattr(attention, "core_attention", None)
    experts = getattr(layer, "mlp", None)
    router = getattr(experts, "router", None)
    refuse(
        (
            not isinstance(layer, TransformerLayer),
            f"a layer is a {type(layer).__name__}",
            "megatron.core's TransformerLayer",
        ),
        (
            not isinstance(attention, SelfAttention),
            f"a layer's attention is a {type(attention).__name__}",
            "megatron.core's SelfAttention",
        ),
        (
            not isinstance(core, DotProductAttention),
            f"a layer's core attention is a {type(core).__name__}",
            "megatron.core's DotProductAttention, as in get_gpt_layer_local_spec",
        ),
        (
            is_split and not isinstance(core, ContextAttention),
            f"a layer's core attention is a {type(core).__name__} and context_parallel_size above "
            "1: it takes the keys of this rank's tokens for all",
            "dormouse.megatron.ContextAttention, or context_parallel_size=1",
        ),
        (
            isinstance(experts, MoELayer) and type(router) is not TopKRouter,
            f"a layer's router is a {type(router).__name__}",
            "megatron.core's TopKRouter",
        ),
    )


_signature = inspect.signature(GPTModel.forward)


def arguments_of(args: tuple, named: dict) -> dict:
    """Returns the arguments of a call of the model by name.

    Raises :class:`UnsupportedTrainerError` for others than :data:`ARGUMENTS`.
    """
    given = _signature.bind(None, *args, **named).arguments
    others = [
        name
        for name, value in given.items()
        if name not in ("self", *ARGUMENTS) and value is not None
    ]
    refuse(
        (others, f"the model is called with {', '.join(others)}", ", ".join(ARGUMENTS)),
        (
            given.get("labels") is None,
            "the model is called without labels, so it returns the logits of every token",
            "labels, of which it returns the losses",
        ),
    )
    return given


def check_call(given: dict, batch: Microbatch, columns: torch.Tensor) -> None:
    """Checks a call of the model against the batch of its microbatch. ``given``: its arguments.
    ``columns``: of whole rows, those that the batch has.

    Raises :class:`UnsupportedTrainerError`.
    """
    for name, own in (("input_ids", batch.tokens), ("labels", batch.labels)):
        value = given[name]
        if value.shape != own.shape or not torch.equal(value.to(own.device), own):
            raise UnsupportedTrainerError(
                f"the model is called with other {name} than its microbatch has; accepted: one "
                "call for each batch of the data iterator, in their order, of its tokens"
            )
    loss_mask = given.get("loss_mask")
    if loss_mask is not None:
        _check_loss_mask(loss_mask, batch.loss_mask)
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is not None:
        counted = columns.to(positions.device)
        if not torch.equal(positions, counted.expand_as(positions)):
            raise UnsupportedTrainerError(
                "position_ids do not count the tokens of each row from 0; accepted: "
                "torch.arange(columns), with context parallelism this rank's part of it"
            )
    if mask is not None:
        causal = torch.arange(int(columns.max()) + 1) > columns[:, None]
        if not torch.equal(mask.bool(), causal.to(mask.device).expand_as(mask)):
            raise UnsupportedTrainerError(
                "attention_mask is not causal; accepted: None, or True above the diagonal"
            )


def _check_loss_mask(given: torch.Tensor, own: torch.Tensor) -> None:
    """Checks the mask of a call. The model ignores it, but the trainer's loss reads it, too: what
    it adds to the batch's mask would be losses of 0."""
    refuse(
        (
            given.shape != own.shape,
            f"the model is called with a loss_mask of shape {tuple(given.shape)}",
            f"None, or {tuple(own.shape)}, as of the batch",
        )
    )
    wide = (given != 0) & (own.to(given.device) == 0)
    refuse(
        (
            bool(wide.any()),
            f"the model is called with a loss_mask that has {int(wide.sum())} labels which that of "
            "its batch has not: losses are of the latter's",
            "None, or labels that the loss_mask of the batch has, too",
        )
    )
