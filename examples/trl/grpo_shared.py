"""GRPO of a small language model with TRL: words that rhyme with "day". No download is needed.

    python -m dormouse run examples/trl/grpo_shared.py
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import dormouse.trl

letters = ["<pad>", "<end>", *"abcdefghijklmnopqrstuvwxyz .?"]
vocabulary = {letter: number for number, letter in enumerate(letters)}
characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=characters, pad_token="<pad>", eos_token="<end>", padding_side="left"
)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
questions = [f"a word that rhymes with {word}, please. " * 4 for word in ("day", "say", "may")]


def reward(completions, **columns):
    return [float(text.count("ay")) + 0.1 * text.count("a") for text in completions]


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = dormouse.trl.share(GRPOTrainer)(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="target/examples/grpo",
            use_cpu=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            num_generations=8,
            max_completion_length=16,
            max_steps=5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": questions * 8}),
        processing_class=tokenizer,
    )
    trainer.train()
