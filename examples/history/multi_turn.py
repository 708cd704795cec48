"""GRPO on turns whose prompts read earlier turns of a history: in the order of their weights, and
in one in which prompts begin alike. Embeddings are bags of words, hashed. No download is needed.

    python examples/history/multi_turn.py
"""

import random
import zlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dormouse import Conversation, Runtime
from dormouse.hf import SharedPrefix
from dormouse.history import Dialogue, Turn, order_for_sharing
from dormouse.schedule import Forest

VOCAB, DIMENSION, READ, SAMPLES, RESPONSE = 4096, 256, 4, 4, 12
PLACES = ("harbour", "castle", "orchard")
FACTS = ("opening", "ticket", "guide", "cafe", "bus", "dog")


def ids(text):
    return [zlib.crc32(word.encode()) % VOCAB for word in text.split()]


def embedding(text):
    return torch.bincount(torch.tensor(ids(text)) % DIMENSION, minlength=DIMENSION).float()


def fill(history, words=40):
    """Earlier turns: one on each fact of each place, an hour apart."""
    drawn = random.Random(0)
    for hour, (fact, place) in enumerate((f, p) for f in FACTS for p in PLACES):
        query = f"the {fact} of the {place}"
        rest = " ".join(f"w{drawn.randrange(300)}" for _ in range(words))
        passage = f"{place} {fact}: {rest}"
        history.record([Turn(embedding(query), query, passage, f"see {fact}", hour * 3600.0)])


def batch(history, ordered):
    """Turns on each place, each with ``SAMPLES`` responses: a conversation has the passages that
    its turn reads, the queries so far and a response, which alone carries loss."""
    turns, read = [], []
    for number, place in enumerate(PLACES):
        asks = [f"what of the {fact} at the {place} ?" for fact in FACTS[number::2]]
        turns += [asks[: end + 1] for end in range(len(asks))]
    for asks in turns:
        found = history.retrieve(embedding(asks[-1]), 1e5, READ)
        read.append([each.passage for each in found])
    if ordered:
        read = order_for_sharing(read, lambda passage: len(ids(passage)))
    drawn, conversations = torch.Generator().manual_seed(0), []
    for asks, passages in zip(turns, read, strict=True):
        prompt = ids(" ".join(["answer from these notes:", *passages, *asks]))
        responses = torch.randint(VOCAB, (SAMPLES, RESPONSE), generator=drawn)
        rewards = (responses < VOCAB // 4).float().mean(1)
        for response, advantage in zip(responses, rewards - rewards.mean(), strict=True):
            tokens = torch.cat([torch.tensor(prompt), response])
            spans = [(len(prompt), len(tokens))]
            conversations.append(Conversation(tokens, spans, float(advantage) / RESPONSE))
    return conversations


def loss(logits, labels, i, positions):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def computed(conversations):
    """Tokens that a step computes, and those of every conversation by itself."""
    with Forest.from_ids([each.tokens for each in conversations], vocab=VOCAB) as forest:
        return forest.info()["tree_tokens"], forest.info()["dense_tokens"]


if __name__ == "__main__":
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2)
    )  # fmt: skip
    with Dialogue(DIMENSION, alpha=0.8) as history, Runtime() as runtime:
        fill(history)
        for name, ordered in (("as retrieved", False), ("ordered", True)):
            tokens, plain = computed(batch(history, ordered))
            print(f"{name}: {tokens} tokens computed of {plain}, {plain / tokens:.2f} times fewer")
        report = SharedPrefix(model, runtime).backward(batch(history, ordered=True), loss)
        torch.optim.SGD(model.parameters(), 0.1).step()
        print(f"a step on the ordered batch: loss {report.loss:.4f}, {report.counts}")
