"""A rollout engine and a trainer in one process: each sleeps while the other works.

    python -m dormouse run examples/colocated/train.py
"""

import copy
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from dormouse import Runtime
from dormouse.hf import SharedPrefix

PROMPT, RESPONSE, ROWS, UPDATES = 96, 16, 8, 4
sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
torch.manual_seed(0)
policy = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads))
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
(files := Path("target/examples/colocated")).mkdir(parents=True, exist_ok=True)
runtime = Runtime(nvme_dir=files)
shared = SharedPrefix(policy, runtime)
# transformers' generation stands for the engine. The contents of its cache are not kept.
weights, moments = runtime.tag("weights"), runtime.tag("optimizer")
kv_cache = runtime.tag("kv_cache", backup=False)
with weights.collect():
    engine = copy.deepcopy(policy).eval()
with kv_cache.collect():
    cache = StaticCache(policy.config, max_cache_len=PROMPT + RESPONSE)
    cache.early_initialization(ROWS, 2, 64, torch.float32, runtime.device)


def generate():
    """Returns responses to one prompt, with it: ``[ROWS, PROMPT + RESPONSE]``."""
    prompts = torch.randint(3, 64, (1, PROMPT)).repeat(ROWS, 1)
    cache.reset()
    own = {"past_key_values": cache, "do_sample": True, "pad_token_id": 0, "eos_token_id": None}
    return engine.generate(prompts, max_new_tokens=RESPONSE, **own)


for update in range(UPDATES):
    moments.sleep()
    weights.wake()
    engine.load_state_dict(policy.state_dict())
    kv_cache.wake()
    in_rollout = runtime.stats()["asleep"]["current_bytes"]
    ids = generate()
    weights.sleep()
    kv_cache.sleep()
    moments.wake()
    in_training = runtime.stats()["asleep"]["current_bytes"]
    rewards = (ids[:, -RESPONSE:] % 2 == 0).float().mean(1)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    logps = shared.score(ids, torch.ones_like(ids), keep=RESPONSE).log_probabilities
    (-(torch.exp(logps - logps.detach()) * advantages[:, None]).mean()).backward()
    with moments.collect():
        optimizer.step()
    optimizer.zero_grad()
    print(f"update {update}: reward={rewards.mean():.3f}, {in_rollout=}, {in_training=}")
