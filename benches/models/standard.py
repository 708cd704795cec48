"""Distances of shared and dense gradients to FP64 (docs/method.md §10): JSON on stdout.

    .venv/bin/python benches/models/standard.py [KIND ...]

Each case is a small random model of one architecture, in FP32 or BF16, and one group. The truth is
the dense run of the same weights in FP64. Routers of all three runs select the experts of the dense
run: in BF16 rounding alone would send tokens elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("python", "python/tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from model_zoo import in_fp64, zoo_model  # noqa: E402
from models import group, loss_fn, take_gradients  # noqa: E402

import dormouse  # noqa: E402
from dormouse import Group  # noqa: E402
from dormouse.demo import gradcheck  # noqa: E402
from dormouse.hf import SharedPrefix, routing, support  # noqa: E402

KINDS = (
    *("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
    *("gpt_oss", "gemma2", "gemma3_text", "phi3", "gpt_neox", "olmo2", "granite", "starcoder2"),
    *("stablelm", "cohere", "glm", "deepseek_v3", "falcon", "qwen3_next", "bamba"),
)
# Tokens of the prompt and of the responses: from the shortest, beyond windows of 9 tokens, and as
# many responses as fill many microbatches.
SHAPES = ((2, (1,)), (24, (5, 1, 9)), (60, (7,) * 8), (60, tuple(1 + i % 5 for i in range(33))))
MICROBATCH_TOKENS = 16
# Models per case, pooled. The ratio of a single one scatters by a factor of 1.25 where the group is
# short or in BF16; that of 24 by 1.05, so that an excess of a quarter is seen.
SEEDS = {torch.float32: 8, torch.bfloat16: 24}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    cases = []
    with dormouse.Runtime() as runtime:
        for kind in sys.argv[1:] or KINDS:
            for dtype, seeds in SEEDS.items():
                for shape in SHAPES:
                    runs = [distances(runtime, kind, dtype, shape, seed) for seed in range(seeds)]
                    case = described(kind, dtype, shape, gradcheck.compare_runs(runs))
                    cases.append(case)
                    print(json.dumps(case), file=sys.stderr, flush=True)
    print(json.dumps(cases))


def described(
    kind: str, dtype: torch.dtype, shape: tuple, error: gradcheck.GradError
) -> dict:
    """Returns the figures of a case."""
    return {
        "kind": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "prompt_tokens": shape[0],
        "responses": len(shape[1]),
        **vars(error),
    }


def distances(
    runtime: dormouse.Runtime, kind: str, dtype: torch.dtype, shape: tuple, seed: int
) -> dict[str, gradcheck.Distance]:
    """Runs one model three ways."""
    model = zoo_model(kind, dtype, seed=seed)
    case = group(*shape, seed=100 + seed)
    experts = recorded(model, case)
    dense_backward(model, case, experts)
    dense = take_gradients(model)
    own = Group(case.prompt, case.responses, case.weights, routed_experts=experts)
    SharedPrefix(model, runtime, sleep=False).backward(
        own, loss_fn, microbatch_tokens=MICROBATCH_TOKENS
    )
    shared = take_gradients(model)
    exact = copy.deepcopy(model).double()
    with in_fp64():
        dense_backward(exact, case, experts)
    return gradcheck.distances_of(take_gradients(exact).items(), dense, shared)


def sequences(case: Group) -> list[torch.Tensor]:
    """Returns the rows that a dense run of each response runs."""
    return [torch.cat([case.prompt, each[:-1]]) for each in case.responses]


def recorded(model: torch.nn.Module, case: Group) -> list[torch.Tensor] | None:
    """Returns the experts that a dense run selects; the prompt's are those of the first response.
    None: the model has no router."""
    view = support.resolve(model)
    if not routing.count_experts(view):
        return None
    experts = []
    for tokens in sequences(case):
        with torch.no_grad(), routing.Recorder(view, len(tokens)) as recorder:
            model(input_ids=tokens[None], use_cache=False)
        experts.append(recorder.experts())
        experts[-1][: len(case.prompt) - 1] = experts[0][: len(case.prompt) - 1]
    return experts


def dense_backward(model, case: Group, experts: list[torch.Tensor] | None) -> None:
    """Every response with its whole prompt, through the model's own forward."""
    for i, tokens in enumerate(sequences(case)):
        replay = contextlib.nullcontext()
        if experts is not None:
            replay = routing.replaying(support.resolve(model), experts[i])
        with replay:
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        loss = loss_fn(logits[len(case.prompt) - 1 :], case.responses[i], i)
        (case.weights[i] * loss).backward()


if __name__ == "__main__":
    main()
