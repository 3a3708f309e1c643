"""Seeded sampling: the parameters that tests use, and whether two texts part where a draw is within rounding of
another.
"""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention_nodes.decoding.random import draw_key, gumbel
from moe_runtime.models.demo import build_dense_model, default_dense_dir
from tests.cluster.reference import prompts

SEEDED_TOKENS = 16
# Noisy logits closer than this may change places by rounding: the fp32 logits of two runs differ by up to 1e-4.
BOUNDARY = 1e-3


def sampling_options() -> list[dict[str, float | int]]:
    """One combination of parameters per prompt, each with a seed of its own."""
    kinds: list[dict[str, float | int]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 40},
        {"temperature": 0.9, "min_p": 0.05, "top_p": 0.95},
    ]
    return [{**kinds[i % len(kinds)], "seed": 1000 + i} for i in range(len(prompts()))]


def is_near_boundary(model_dir: Path, prompt: str, options: Mapping[str, float | int], one: str, other: str) -> bool:
    """Whether, where the texts part, the two best noisy logits are within BOUNDARY of each other.

    Judged by the dense model that the demo model was made from, which computes the same function.
    """
    build_dense_model(default_dense_dir(), progress=lambda what: None)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(default_dense_dir(), dtype=torch.float32)
    ids, other_ids = (tokenizer(prompt + text)["input_ids"] for text in (one, other))
    common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other_ids, strict=False))]
    with torch.inference_mode():
        logits_V = model(torch.tensor([common])).logits[0, -1] / options["temperature"]
    keys_V = torch.full((len(logits_V),), draw_key(int(options["seed"]), len(common)))
    noisy_V = logits_V.double() + gumbel(keys_V, torch.arange(len(logits_V)))
    best, second = noisy_V.topk(2).values.tolist()
    return best - second < BOUNDARY
