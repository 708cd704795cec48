"""What verl's engine must be for prompts to be shared; everything else is refused by name."""

from __future__ import annotations

import inspect

from ..trainers.refusals import UnsupportedTrainerError, refuse

# Of verl 0.9.1's engine, after self.
METHODS = {
    "forward_backward_batch": ("data", "loss_function", "forward_only"),
    "forward_step": ("micro_batch", "loss_function", "forward_only"),
    "prepare_model_inputs": ("micro_batch",),
    "prepare_model_outputs": ("output", "output_args", "micro_batch", "logits_processor_func"),
}


def check_class(engine_class: type) -> None:
    """Checks that the class has the methods that are replaced."""
    for name, parameters in METHODS.items():
        own = getattr(engine_class, name, None)
        found = () if own is None else tuple(inspect.signature(own).parameters)[1:]
        if found != parameters:
            raise UnsupportedTrainerError(
                f"{engine_class.__name__} has no {name}({', '.join(parameters)}); accepted: "
                "FSDPEngineWithLMHead of verl 0.9.1"
            )


def check_engine(engine) -> None:
    """Checks an engine before its model is loaded."""
    config, model = engine.engine_config, engine.model_config
    refuse(
        (
            config.strategy != "fsdp2",
            f"strategy is {config.strategy}, which flattens parameters or shards them otherwise",
            "strategy=fsdp2",
        ),
        (
            config.ulysses_sequence_parallel_size != 1,
            f"ulysses_sequence_parallel_size is {config.ulysses_sequence_parallel_size}",
            "ulysses_sequence_parallel_size=1",
        ),
        (
            config.use_fused_kernels or model.use_fused_kernels,
            "use_fused_kernels replaces the model's head",
            "use_fused_kernels=False",
        ),
        (
            model.use_liger,
            "use_liger replaces the layers' functions",
            "use_liger=False",
        ),
        (
            model.enable_activation_offload,
            "enable_activation_offload wraps the layers' forward",
            "enable_activation_offload=False; prompts sleep instead",
        ),
        (
            config.qat.enable,
            "qat quantizes weights in each forward",
            "qat.enable=False",
        ),
        (
            model.mtp.enable,
            "mtp adds a loss of further tokens",
            "mtp.enable=False",
        ),
    )
