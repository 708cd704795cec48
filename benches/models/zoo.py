"""Every causal language model architecture of transformers: is its shared step exact?

Each architecture is one small random model, which runs in a forked process of its own: a crash or
an endless loop is a result as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("python", "python/tests")]

import torch  # noqa: E402
import transformers  # noqa: E402
from features import Recorder, notes_of, short  # noqa: E402
from model_zoo import WINDOW, in_fp64, zoo_config, zoo_model  # noqa: E402
from models import distance, group, loss_fn, take_gradients  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

import dormouse  # noqa: E402
from dormouse.hf import SharedPrefix, UnsupportedModelError, Way  # noqa: E402

EXACT, REFUSED, UNBUILT, WRONG = "exact", "refused", "not built", "wrong"

PROMPT_TOKENS, RESPONSE_TOKENS = 37, (5, 1, 9, 3, 14)
MICROBATCH_TOKENS = 12
# How far a token sees, where an architecture limits that: less than the check's own groups are long,
# and more than those but less than the group above.
LIMITS = (WINDOW, 27)
# Weights of a model that fits here; default configurations have a million times as many.
WEIGHTS_MAX = 20_000_000
SECONDS_MAX = 60
FP64_BOUND = 1e-10
# Some C code computes in FP32 whatever it is given. Beyond this a distance is an error.
WRONG_BOUND = 1e-6


@dataclass
class Verdict:
    """What was found about one architecture."""

    model_type: str
    class_name: str
    verdict: str = UNBUILT
    distance: float | None = None
    """Relative distance of the shared gradient from the dense one, in FP64."""
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    error: str = ""
    """The whole message."""


def kinds() -> dict[str, str]:
    """Names of model types and of their classes."""
    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def survey(names: Sequence[str] = ()) -> Iterator[Verdict]:
    """Yields the verdict of each architecture, or of those of ``names``."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for kind in names or kinds():
        yield _apart(kind)


def _apart(kind: str) -> Verdict:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_send, args=(kind, theirs), daemon=True)
    process.start()
    theirs.close()
    verdict, end_s = Verdict(kind, kinds()[kind]), time.monotonic() + SECONDS_MAX
    try:
        while ours.poll(max(0.0, end_s - time.monotonic())):
            found = ours.recv()
            if isinstance(found, dict):
                return Verdict(**found)
            # What it is if it ends here.
            verdict.verdict = found
        verdict.reason = f"did not end in {SECONDS_MAX} s"
    except EOFError:
        process.join()
        verdict.reason = f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return verdict


def _send(kind: str, pipe) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")
    warnings.simplefilter("ignore")
    pipe.send(asdict(judge(kind, pipe.send)))
    pipe.close()
    # Without the destructors of a process that was forked from another.
    os._exit(0)


def judge(kind: str, tell: Callable[[str], None]) -> Verdict:
    """Builds the architecture and runs one group both ways, with the shorter and the longer limit
    of attention if it has one. ``tell``: takes the verdict if nothing comes back from here on."""
    verdict = _judge(kind, LIMITS[0], tell)
    if verdict.verdict in (UNBUILT, WRONG) or not _is_limited(kind):
        return verdict
    if verdict.verdict == REFUSED:
        with contextlib.suppress(Exception):
            other = _judge(kind, None, tell)
            if other.verdict == WRONG:
                other.notes.append("without a sliding window")
                return other
            if other.verdict == EXACT:
                verdict.notes.append("exact without a sliding window")
        return verdict
    other = _judge(kind, LIMITS[1], tell)
    if other.verdict != EXACT:
        other.notes.append(f"with a limit of {LIMITS[1]} tokens")
        return other
    verdict.distance = max(verdict.distance, other.distance)
    return verdict


def _is_limited(kind: str) -> bool:
    shorter, longer = (zoo_config(kind, limit).to_dict() for limit in LIMITS)
    return shorter != longer


def _judge(kind: str, limit: int | None, tell: Callable[[str], None]) -> Verdict:
    verdict = Verdict(kind, kinds()[kind])
    tell(UNBUILT)
    with in_fp64():
        try:
            weights = _weights(kind, limit)
            if weights > WEIGHTS_MAX:
                verdict.reason = f"{weights:,} weights with these settings"
                return verdict
            model = zoo_model(kind, limit=limit)
        except Exception as error:
            verdict.reason, verdict.error = short(error), f"{type(error).__name__}: {error}"
            return verdict
        verdict.class_name = type(model).__name__
        recorder = Recorder()
        with dormouse.Runtime() as runtime, recorder:
            _compare(model, runtime, verdict, tell)
        verdict.notes += recorder.notes() + notes_of(model, verdict)
    return verdict


def _compare(model, runtime, verdict: Verdict, tell: Callable[[str], None]) -> None:
    case, dense, failure = group(PROMPT_TOKENS, RESPONSE_TOKENS), None, None
    try:
        dense_backward(model, case)
        gradients = take_gradients(model)
        if not any(each.any() for each in gradients.values()):
            raise ValueError("all gradients are zero")
        dense = gradients
    except Exception as error:
        # The step must refuse this model.
        failure = error
    tell(WRONG)
    try:
        report = SharedPrefix(model, runtime, sleep=False).backward(
            case, loss_fn, microbatch_tokens=MICROBATCH_TOKENS
        )
    except Exception as error:
        is_refusal = isinstance(error, UnsupportedModelError)
        verdict.verdict = REFUSED if is_refusal else WRONG
        verdict.reason, verdict.error = short(error), f"{type(error).__name__}: {error}"
        return
    if dense is None:
        verdict.verdict, verdict.reason = WRONG, f"accepted; the dense run fails: {short(failure)}"
        return
    if report.checked.way is not Way.PARTS:
        verdict.notes.append(report.checked.way.value)
    verdict.distance = distance(take_gradients(model), dense)
    verdict.verdict = EXACT if verdict.distance <= WRONG_BOUND else WRONG
    if FP64_BOUND < verdict.distance <= WRONG_BOUND:
        verdict.reason = "computes in FP32 in part"


def dense_backward(model, case) -> None:
    """Every response with its whole prompt, through the model's own forward."""
    for i, response in enumerate(case.responses):
        tokens = torch.cat([case.prompt, response[:-1]]).unsqueeze(0)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(case.prompt) - 1 :]
        (case.weights[i] * loss_fn(logits, response, i)).backward()


def _weights(kind: str, limit: int | None) -> int:
    """Counts weights without memory for them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo_config(kind, limit))
    return sum(parameter.numel() for parameter in model.parameters())
