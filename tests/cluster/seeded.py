"""Seeded sampling: the parameters that tests use, and whether two texts part where a draw is within rounding of
another.
"""

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention_nodes.decoding.draw import grouped, noisy_groups, noisy_members
from attention_nodes.decoding.random import draw_key
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
    """Whether, where the texts part, the two best groups or tokens of the draw are within BOUNDARY of each other.

    Judged by the dense model that the demo model was made from, which computes the same function.
    """
    build_dense_model(default_dense_dir(), progress=lambda what: None)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(default_dense_dir(), dtype=torch.float32)
    ids, other_ids = (tokenizer(prompt + text)["input_ids"] for text in (one, other))
    common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, other_ids, strict=False))]
    with torch.inference_mode():
        logits_V = model(torch.tensor([common])).logits[0, -1] / options["temperature"]
    key_1 = torch.tensor([draw_key(int(options["seed"]), len(common))])
    weights_1GM = grouped((logits_V - logits_V.max()).exp()[None])
    groups_G = noisy_groups(weights_1GM, key_1)[0]
    group_1 = groups_G.argmax(keepdim=True)
    members_M = noisy_members(weights_1GM[0, group_1], group_1, key_1)[0]
    return any(float(best - second) < BOUNDARY for best, second in (groups_G.topk(2).values, members_M.topk(2).values))
