"""Records the rollouts of the demo: real passages, sampled answers, rule-based rewards.

Deterministic for one build of torch and one seed: each group has its own generator, so a subset
records the same groups. Old log-probabilities come from a forward of each whole sequence in FP32,
as a trainer recomputes them, not from the sampler's cache.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from . import model as models
from . import paths, rewards, trace
from .dense import response_logits

QUESTIONS_FILE = "questions.toml"

RESPONSES = 8
RESPONSE_TOKENS_MAX = 48
PROMPT_TOKENS_MIN = 400
PROMPT_TOKENS_MAX = 768
TEMPERATURE = 1.0
SEED = 2026

GROUPS_KEPT_MIN = 8

# Minimum mean response length of the default group, the one with the longest prompt.
DEFAULT_MEAN_LENGTH_MIN = 40


@dataclass(frozen=True)
class Question:
    """One passage with its question and the facts an answer should name."""

    id: str
    work: str
    question: str
    facts: list[list[str]]
    passage: str
    instruction: str

    @property
    def text(self) -> str:
        """Returns the user message."""
        return f"{self.instruction}\n\n{self.passage}\n\nQuestion: {self.question}"


def questions(directory: Path = paths.PROMPT_DIR) -> list[Question]:
    """Returns every question of ``questions.toml`` with its passage."""
    data = tomllib.loads((directory / QUESTIONS_FILE).read_text(encoding="utf-8"))
    found = []
    for entry in data["prompt"]:
        passage = (directory / f"{entry['id']}.txt").read_text(encoding="utf-8").strip()
        found.append(Question(**entry, passage=passage, instruction=data["instruction"]))
    return found


def record(directory: Path = paths.TRACE_DIR, seed: int = SEED) -> trace.Trace:
    """Samples every group, keeps those whose rewards differ, writes the trace."""
    source = models.find()
    tokenizer = models.load_tokenizer(source)
    policy = models.load_model(source).eval()
    groups = []
    bar = tqdm(questions(), desc="record", unit="prompt")
    for question in bar:
        bar.set_postfix_str(question.id)
        group = record_group(policy, tokenizer, question, seed)
        if group is None:
            bar.write(f"{question.id}: every response earned the same; left out")
            continue
        earned = " ".join(f"{r.reward:.2f}" for r in group.rollouts)
        bar.write(
            f"{question.id}: prompt {len(group.prompt)}, mean response "
            f"{group.mean_length:.1f} tokens, rewards {earned}"
        )
        groups.append(group)
    if len(groups) < GROUPS_KEPT_MIN:
        raise RuntimeError(f"{len(groups)} groups kept; accepted: at least {GROUPS_KEPT_MIN}")
    made = trace.Trace(
        model={"id": models.MODEL_ID, "file": source.path.name, "sha256": source.sha256},
        sampling={
            "seed": seed,
            "temperature": TEMPERATURE,
            "responses": RESPONSES,
            "response_tokens_max": RESPONSE_TOKENS_MAX,
            "dtype": "float32",
            "torch": torch.__version__,
        },
        default_group=choose_default(groups),
        groups=[group.id for group in groups],
        directory=directory,
    )
    trace.write(made, groups)
    return made


def choose_default(groups: list[trace.RolloutGroup]) -> str:
    """Returns the group with the longest prompt among those with long responses."""
    long = [g for g in groups if g.mean_length >= DEFAULT_MEAN_LENGTH_MIN] or groups
    return max(long, key=lambda group: len(group.prompt)).id


def record_group(policy, tokenizer, question: Question, seed: int) -> trace.RolloutGroup | None:
    """Returns one group, or None if all its advantages are zero."""
    messages = [{"role": "user", "content": question.text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    if not PROMPT_TOKENS_MIN <= len(prompt) <= PROMPT_TOKENS_MAX:
        raise ValueError(
            f"{question.id}: prompt of {len(prompt)} tokens; "
            f"accepted: {PROMPT_TOKENS_MIN} to {PROMPT_TOKENS_MAX}"
        )
    responses, _ = sample(policy, prompt, tokenizer.eos_token_id, generator(seed, question.id))
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses]
    earned = [
        rewards.reward(text, question.facts, finished=tokens[-1] == tokenizer.eos_token_id)
        for text, tokens in zip(texts, responses, strict=True)
    ]
    scores = trace.advantages(earned)
    if not any(scores):
        return None
    rollouts = [
        trace.Rollout(tokens, text, logprobs(policy, prompt, tokens), reward, round(score, 6))
        for tokens, text, reward, score in zip(responses, texts, earned, scores, strict=True)
    ]
    return trace.RolloutGroup(question.id, question.work, question.question, prompt, rollouts)


@torch.no_grad()
def sample(
    policy,
    prompt: list[int],
    stop: int,
    generator: torch.Generator,
    temperatures: Sequence[float] = (TEMPERATURE,) * RESPONSES,
    tokens_max: int = RESPONSE_TOKENS_MAX,
) -> tuple[list[list[int]], list[list[float]]]:
    """Samples an answer of each temperature from the policy, the end token included; 0 is for the
    most likely tokens. Returns token ids, and their log-probabilities at temperature 1, which come
    from the sampler's cache."""
    first = policy(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    cache = first.past_key_values
    cache.batch_repeat_interleave(len(temperatures))
    logits = first.logits[:, -1].float().expand(len(temperatures), -1)
    divisors = torch.tensor([each or 1.0 for each in temperatures]).unsqueeze(1)
    greedy = torch.tensor([each == 0 for each in temperatures])
    responses: list[list[int]] = [[] for _ in temperatures]
    logprobs: list[list[float]] = [[] for _ in temperatures]
    for step in range(tokens_max):
        drawn = torch.multinomial(torch.softmax(logits / divisors, -1), 1, generator=generator)
        drawn[greedy] = logits[greedy].argmax(-1, keepdim=True)
        chosen = torch.log_softmax(logits, -1).gather(1, drawn)[:, 0].tolist()
        for row, token in enumerate(drawn[:, 0].tolist()):
            if not responses[row] or responses[row][-1] != stop:
                responses[row].append(token)
                logprobs[row].append(chosen[row])
        if step + 1 == tokens_max or all(response[-1] == stop for response in responses):
            break
        out = policy(input_ids=drawn, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1].float()
    return responses, logprobs


@torch.no_grad()
def logprobs(policy, prompt: list[int], response: list[int]) -> list[float]:
    """Returns the policy's log-probability of each response token, by one dense forward."""
    labels = torch.tensor(response)
    logits = response_logits(policy, torch.tensor(prompt), labels)
    chosen = torch.log_softmax(logits, dim=-1).gather(1, labels.unsqueeze(1))[:, 0]
    return [round(value, trace.LOGPROB_DECIMALS) for value in chosen.tolist()]


def generator(seed: int, name: str) -> torch.Generator:
    """Returns the generator of what has this name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
