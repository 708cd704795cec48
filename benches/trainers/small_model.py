"""The first layers of SmolLM2-135M."""

from __future__ import annotations

import os

from dormouse.demo import model as demo_model

# Read by processes that bench.py starts.
VARIABLE = "BENCH_TRAINERS_LAYERS"
LAYERS = 10


def load():
    """In FP32, as :func:`dormouse.demo.model.load_model` returns it."""
    model = demo_model.load_model(demo_model.find())
    layers = int(os.environ.get(VARIABLE, LAYERS))
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model


def tokenizer():
    return demo_model.load_tokenizer(demo_model.find())
