"""What a model must have for a shared-prefix step to be attempted; everything else is refused.

Nothing here makes a model exact: :mod:`.check` finds out by running it. These checks name what is
known to be inexact before any pass runs. Each raises :class:`UnsupportedModelError` with the value
seen and what is accepted.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
import transformers
from transformers.modeling_layers import GradientCheckpointingLayer

from .. import host_memory
from ..errors import DormouseError, is_out_of_memory
from . import likelihood
from .accumulation import has_hooks_at_end

# Rotary tables that depend on positions alone. Dynamic NTK and longrope depend on the total
# length of each trajectory, which a shared prefix does not have.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
# Of PhiMoE: scales the tables of every other type once a trajectory is longer than the original.
SCALE_BY_LENGTH = "long_mscale"

# Head dimensions that flash attention accepts on a GPU.
HEAD_DIM_STEP = 8
HEAD_DIM_MAX = 256

# Errors of a model's code that are reported as a refusal.
ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)

# Where transformers' code is. Wrappers of a forward may have its name and signature.
TRANSFORMERS = os.path.dirname(transformers.__file__)
# Argument of transformers' models: rows, as a tensor of indices.
LOGITS_ROWS = "logits_to_keep"

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class UnsupportedModelError(DormouseError, ValueError):
    """The model cannot share a prefix exactly; says what was seen and what is accepted."""


class Way(Enum):
    """How responses read the keys of the prefixes before them, the cheapest first."""

    PARTS = "parts"
    """Attention in parts, one per prefix and one for the rows themselves."""
    JOINED = "joined keys"
    """The model's own attention over the keys of the path and of a microbatch, under a mask."""
    ALONE = "one response at a time"
    """The model's own attention, positions and masks, as if it continued a generation."""


@dataclass(frozen=True)
class ModelView:
    """A causal language model and its decoder layers."""

    model: torch.nn.Module
    """Called as the trainer calls it: adapters, hooks and patches apply."""
    layers: tuple[torch.nn.Module, ...]
    config: object
    """The configuration of the text model."""
    prompt_dropout: bool = True
    """Whether the prompt's rows run with the model's dropout; see :mod:`.dropout`."""
    way: Way | None = None
    """None: the first that its layers' code allows (:func:`.mixers.ways_of`)."""
    own_mixers: object | None = None
    """Takes over attention that is not transformers' (:func:`.mixers.of`); None: it is."""

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        arguments: dict,
        logits_rows: torch.Tensor | None = None,
    ):
        """Runs the model on one row of tokens, 1-D like ``positions``; returns its output.

        ``arguments``: others of its forward. ``logits_rows``: the rows that need logits; None: all.
        See :attr:`selects_logits`.
        """
        if logits_rows is not None:
            arguments = arguments | {LOGITS_ROWS: logits_rows}
        if self.way is not Way.ALONE:
            arguments = arguments | {"position_ids": positions.unsqueeze(0)}
        return self.model(input_ids=tokens.unsqueeze(0), **arguments)

    def read_buffers(self) -> Iterator[torch.Tensor]:
        """Yields the buffers on which passes may depend."""
        yield from self.model.buffers()

    def forget(self) -> None:
        """Drops what the view itself keeps of the last pass, and with it the pass's graph."""

    def run_dense(self, tokens: torch.Tensor, **arguments):
        """Runs the model on one row of tokens, 1-D, with its own positions and attention."""
        return self.model(input_ids=tokens.unsqueeze(0), use_cache=False, **arguments)

    def log_probabilities(
        self, logits: torch.Tensor, labels: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """Returns :func:`.likelihood.log_probabilities` of rows of :meth:`run`."""
        return likelihood.log_probabilities(logits, labels, temperature)

    @property
    def selects_logits(self) -> bool:
        """Whether the model's forward computes the logits of selected rows alone: its forward is
        transformers' own, and nothing of the trainer's runs around it."""
        model = self.model
        if "forward" in vars(model) or model._forward_hooks or model._forward_pre_hooks:
            return False
        forward = type(model).forward
        if not inspect.getfile(forward).startswith(TRANSFORMERS):
            return False
        return LOGITS_ROWS in inspect.signature(forward).parameters

    @property
    def heads(self) -> int:
        """Query heads of a layer, or heads of its scan; 1 for a layer without heads."""
        config = self.config
        return figure(config, "num_attention_heads") or figure(config, "num_heads") or 1

    @property
    def has_attention(self) -> bool:
        """Whether any layer may have attention: a model of scans alone has none."""
        return figure(self.config, "num_attention_heads") is not None

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a layer."""
        return figure(self.config, "num_key_value_heads") or self.heads

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return figure(self.config, "head_dim") or self.config.hidden_size // self.heads

    @property
    def embedding(self) -> torch.nn.Module:
        """The input embedding."""
        return self.model.get_input_embeddings()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below this."""
        return whole_size(self.embedding.weight)[0]


def whole_size(parameter: torch.nn.Parameter) -> torch.Size:
    """Returns the size of a weight. DeepSpeed's stage 3 leaves an empty one between passes."""
    return getattr(parameter, "ds_shape", parameter.shape)


def free_bytes(device: torch.device) -> int:
    """Returns the unused bytes of the device's memory. What torch caches counts as unused."""
    if device.type != "cuda":
        return host_memory.free_bytes()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns an error of the model's code into a refusal."""
    try:
        yield
    except DormouseError:
        raise
    except ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"{what} fails on a group of random tokens: {type(error).__name__}: {error}"
        ) from error


def logits_of(output) -> torch.Tensor:
    """Returns the logits of a model's output, ``[batch, tokens, vocab]``."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise UnsupportedModelError(
            f"the model returns {type(output).__name__} without logits; accepted: an output with "
            "logits of every token"
        )
    return logits


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor ``[1, rows, ...]`` as ``[rows, ...]``.

    The gradient of ``tensor[0]`` is copied into zeros, that of this view is not.
    """
    is_one = tensor.dim() > 2 and tensor.shape[0] == 1
    return tensor.squeeze(0) if is_one else tensor[0]


def resolve(model: torch.nn.Module, prompt_dropout: bool = True) -> ModelView:
    """Returns the model with its layers. Raises :class:`UnsupportedModelError`."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(
            f"{type(model).__name__!r} is not a transformers model; accepted: causal language "
            "models of transformers, with or without peft adapters"
        )
    config = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} has an encoder; accepted: causal language models"
        )
    if not getattr(config, "is_causal", True):
        raise UnsupportedModelError(
            "config.is_causal is False, so prompt tokens attend to responses; accepted: True"
        )
    view = ModelView(model, _layers(model, config), config, prompt_dropout)
    _check_rope(view)
    return view


def _layers(model: torch.nn.Module, config) -> tuple[torch.nn.Module, ...]:
    count = getattr(config, "num_hidden_layers", None)
    # Lists of other modules may be as long: heads, for example.
    lists = [
        (not isinstance(module[0], GradientCheckpointingLayer), name.count("."), module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and count > 0
    ]
    if not lists:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {count} layers (config.num_hidden_layers); "
            "accepted: one torch.nn.ModuleList of all decoder layers"
        )
    return tuple(min(lists, key=lambda item: item[:2])[2])


def figure(config, name: str) -> int | float | None:
    """Returns a number of a configuration, the largest where each layer has its own; None for none.

    Layers have their own in a list, or in configurations of theirs: the whole model's then raises
    an error for that name.
    """
    # As configurations look names up.
    name = (getattr(config, "attribute_map", None) or {}).get(name, name)
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        value = [getattr(each, name, None) for each in config.per_layer_config]
    else:
        value = getattr(config, name, None)
    if not isinstance(value, list | tuple):
        return value
    return max((each for each in value if each is not None), default=None)


def configurations(config) -> Iterator[object]:
    """Yields a configuration and those inside it: of the text, of images, of experts."""
    yield config
    yield from (each for each in vars(config).values() if hasattr(each, "to_dict"))


def rope_tables(config) -> list[dict]:
    """Returns the tables of rotary settings of a configuration: its own, and those of each type of
    layers, of which some may have none."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


def _check_rope(view: ModelView) -> None:
    for table in rope_tables(view.config):
        kind = table.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"rotary scaling {kind!r} depends on each trajectory's length; "
                f"accepted: {', '.join(ROPE_TYPES)}"
            )
        if kind != "default" and SCALE_BY_LENGTH in table:
            raise UnsupportedModelError(
                f"rotary scaling {kind!r} with {SCALE_BY_LENGTH} depends on each trajectory's "
                "length; accepted: default"
            )


def check_step(model: torch.nn.Module, view: ModelView, device: torch.device) -> None:
    """Checks what may change between steps: dropout of attention, dtype, device.

    ``device``: the runtime's.
    """
    rate = figure(view.config, "attention_dropout") or 0.0
    if model.training and rate > 0.0:
        raise UnsupportedModelError(
            f"attention_dropout {rate}: a shared prefix would share its mask; accepted: 0"
        )
    devices = {p.device for p in model.parameters()}
    if devices != {device}:
        seen = ", ".join(sorted(map(str, devices)))
        remedy = f"model.to({str(device)!r})"
        if len(devices) == 1 and next(iter(devices)).type in ("cpu", "cuda"):
            remedy += f", or a runtime of the model's device: dormouse.install({seen!r}).runtime"
        raise UnsupportedModelError(
            f"parameters on {seen} with a runtime of {device} are not supported; accepted: all on "
            f"one device. Call {remedy}"
        )
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if not dtypes <= set(DTYPES):
        names = ", ".join(sorted(str(d) for d in dtypes - set(DTYPES)))
        raise UnsupportedModelError(
            f"parameters in {names} are not supported; accepted: {', '.join(map(str, DTYPES))}"
        )
    width = view.head_dim
    fits = width % HEAD_DIM_STEP == 0 and width <= HEAD_DIM_MAX
    if device.type == "cuda" and view.has_attention and not fits:
        raise UnsupportedModelError(
            f"head_dim {width} does not fit torch's kernels on a GPU; "
            f"accepted: multiples of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}"
        )


def check_hooks(model: torch.nn.Module) -> None:
    """Checks that no hook sees the gradients of single passes."""
    for name, parameter in model.named_parameters():
        has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if has_hooks or (parameter.requires_grad and has_hooks_at_end(parameter)):
            raise UnsupportedModelError(
                f"parameter {name!r} has a gradient hook, which would see the gradients of other "
                "backwards than in a dense run; accepted: none"
            )
