"""What a trainer must be for its prompts to be shared; everything else is refused by name."""

from __future__ import annotations

import inspect

from ..hf import sharding, tensor_parallel
from ..hf.support import rope_tables
from ..trainers.refusals import UnsupportedTrainerError, refuse

METHOD = "_get_per_token_logps_and_entropies"
# Of TRL 1.16's method, after self; those of images follow.
PARAMETERS = (
    "model",
    "input_ids",
    "attention_mask",
    "logits_to_keep",
    "batch_size",
    "compute_entropy",
    "compute_aux_loss",
)

# Argument of Beam's layers: a factor of the queries, which grows with their positions.
QUERY_SCALE = "attention_scaling"


def check_class(trainer_class: type) -> None:
    """Checks that the class computes its log-probabilities by the method that is replaced."""
    own = getattr(trainer_class, METHOD, None)
    found = () if own is None else tuple(inspect.signature(own).parameters)[1:]
    if found[: len(PARAMETERS)] != PARAMETERS:
        raise UnsupportedTrainerError(
            f"{trainer_class.__name__} has no {METHOD}({', '.join(PARAMETERS)}, ...); accepted: "
            "GRPOTrainer and RLOOTrainer of TRL 1.16"
        )


def check_trainer(trainer) -> None:
    """Checks a trainer after its construction."""
    accelerator = trainer.accelerator
    backend = accelerator.state.dynamo_plugin.backend.value
    refuse(
        (
            getattr(trainer, "_is_vlm", False),
            "the processing class is that of a model with images",
            "a tokenizer",
        ),
        (
            getattr(trainer.args, "use_liger_kernel", False),
            "use_liger_kernel replaces the layers' functions",
            "use_liger_kernel=False",
        ),
        (
            getattr(trainer, "aux_loss_enabled", False),
            "the routers' auxiliary loss needs router logits with a graph",
            "router_aux_loss_coef=0.0",
        ),
        (
            getattr(trainer.args, "torch_compile", False),
            "torch_compile wraps the whole model",
            "torch_compile=False",
        ),
        (
            backend != "NO",
            f"Accelerate compiles the whole model by {backend}, as its configuration or "
            "ACCELERATE_DYNAMO_BACKEND says",
            'dynamo_backend "no"',
        ),
        (
            _scales_by_position(trainer.model),
            "queries are scaled by their positions, and the trainer numbers those of rows that are "
            "padded on the left by column",
            "a model without attn_temperature_tuning, llama_4_scaling_beta and attention_scaling",
        ),
        (
            getattr(trainer, "is_fsdp_enabled", False)
            or getattr(trainer, "is_deepspeed_enabled", False),
            "weights or gradients are sharded by FSDP or DeepSpeed",
            "one process, or DistributedDataParallel",
        ),
        (
            accelerator.num_processes > 1
            and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False),
            "sync_each_batch reduces gradients after every microbatch, and those of shared prompts "
            "are known after the last of a window: a rank that shares prompts would keep one that "
            "shares none waiting",
            "accelerator_config without sync_each_batch",
        ),
        (
            getattr(trainer, "is_distributed_loading_by_transformers", False)
            or sharding.sharded_modules(trainer.model)
            or tensor_parallel.has_parts(trainer.model),
            "each rank holds parts of the model's weights, which from_pretrained(distributed_config"
            "=...), fully_shard or a tp_plan gave it",
            "a model that every rank loads whole, in one process or in DistributedDataParallel",
        ),
    )


def _scales_by_position(model) -> bool:
    """Whether attention depends on absolute positions so little, or from such a length on, that
    short rows do not show it."""
    config = model.config.get_text_config()
    return (
        bool(getattr(config, "attn_temperature_tuning", False))
        or any(table.get("llama_4_scaling_beta") for table in rope_tables(config))
        or any(
            QUERY_SCALE in inspect.signature(type(module).forward).parameters
            for module in model.modules()
        )
    )
