"""Predicted and measured seconds of steps, dense and shared: JSON on stdout.

    .venv/bin/python benches/models/prediction.py [smollm2|deep]

Rates are measured once per model (``SharedPrefix.measure_speed``). Then shapes that were not timed for
the rates run, and the figures are compared.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from trees import batch as recorded_tree  # noqa: E402
from trees import dense as dense_tree  # noqa: E402
from trees import token_losses  # noqa: E402

import dormouse  # noqa: E402
from dormouse import Group  # noqa: E402
from dormouse.demo import model as demo_model  # noqa: E402
from dormouse.hf import SharedPrefix  # noqa: E402

# Tokens of the prompt, of each response, and of a microbatch.
GROUPS = (
    (100, (50,) * 4, 256),
    (160, (200,) * 3, 256),
    (320, (40,) * 8, 128),
    (400, (16,) * 16, 256),
    (600, (100, 30, 70, 10), 256),
    (700, (120,) * 2, 128),
)
ROUNDS = 3


def smollm2():
    return demo_model.load_model(demo_model.find())


def deep():
    """48 narrow layers, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704},
        **{"num_hidden_layers": 48, "num_attention_heads": 8, "num_key_value_heads": 4},
    )
    return LlamaForCausalLM(config)


MODELS = {"smollm2": smollm2, "deep": deep}


def main() -> None:
    figures = []
    for name in sys.argv[1:] or MODELS:
        with dormouse.Runtime() as runtime:
            figures += cases(name, MODELS[name](), runtime)
    print(json.dumps(figures))


def cases(name: str, model, runtime: dormouse.Runtime) -> list[dict]:
    """Measures every shape with one model."""
    shared = SharedPrefix(model, runtime, sleep=False)
    measured = shared.measure_speed()
    print(name, measured, file=sys.stderr, flush=True)
    figures = []
    for prompt, responses, microbatch in GROUPS:
        group = drawn(prompt, responses, model.config.vocab_size)
        options = {"microbatch_tokens": microbatch}
        case = f"P={prompt} N={len(responses)} S={max(responses)}"
        figures.append(
            compared(
                f"{name} {case}",
                shared.predict(group, measured=measured, **options),
                lambda group=group: dense_group(model, group),
                lambda group=group, options=options: shared.backward(group, group_loss, **options),
                model,
            )
        )
    if name == "smollm2":
        tree = recorded_tree()
        figures.append(
            compared(
                f"{name} recorded tree",
                shared.predict(tree, measured=measured),
                lambda: dense_tree(model, tree),
                lambda: shared.backward(tree, token_losses),
                model,
            )
        )
    return figures


def compared(case: str, predicted: dict, dense, shared, model) -> dict:
    """Runs both ways in turn, once before they are timed."""
    seconds: dict[str, list[float]] = {"dense": [], "shared": []}
    for _ in range(ROUNDS + 1):
        for way, run in (("dense", dense), ("shared", shared)):
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
            model.zero_grad()
    figures: dict = {"case": case}
    for way, each in seconds.items():
        figures[way] = {"predicted": predicted[f"seconds_{way}"], "measured": median(each[1:])}
    ratios = [slow / fast for slow, fast in zip(*seconds.values(), strict=True)][1:]
    figures["speedup"] = {"predicted": predicted["speedup"], "measured": median(ratios)}
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


def drawn(prompt: int, responses: tuple[int, ...], vocab: int) -> Group:
    generator = torch.Generator().manual_seed(prompt)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(vocab, (count,), generator=generator)

    return Group(tokens(prompt), [tokens(each) for each in responses])


def group_loss(logits, labels, i):
    return torch.nn.functional.cross_entropy(logits, labels)


def dense_group(model, group: Group) -> None:
    """The ordinary way: every response with its whole prompt, with logits of its labels alone."""
    for i, response in enumerate(group.responses):
        tokens = torch.cat([group.prompt, response[:-1]]).unsqueeze(0)
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=len(response)).logits[0]
        (group.weights[i] * group_loss(logits, response, i)).backward()


if __name__ == "__main__":
    main()
