"""The demo model against the dense model it was made from, run by transformers; its tokenizer against plain BPE."""

import argparse
import heapq
import json
import pydoc
import re
import subprocess
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, MixtralForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from moe_runtime.models.demo import build_demo_model, build_dense_model, default_demo_dir, default_dense_dir

PROMPTS = ("Write a haiku about autumn.", "How many legs do 3 spiders have?", "Explain gravity to a child.")


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    build_demo_model(default_demo_dir(), progress=print)
    return default_demo_dir()


@pytest.fixture(scope="session")
def tokenizer(demo_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_dir)


@pytest.fixture(scope="module")
def moe(demo_dir: Path) -> PreTrainedModel:
    return MixtralForCausalLM.from_pretrained(demo_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def dense() -> PreTrainedModel:
    build_dense_model(default_dense_dir(), progress=print)
    return LlamaForCausalLM.from_pretrained(default_dense_dir(), dtype=torch.float32).eval()


@pytest.mark.parametrize("prompt", PROMPTS)
@torch.inference_mode()
def test_the_moe_is_the_dense_function(
    prompt: str, moe: PreTrainedModel, dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected, found = (model.generate(**inputs, max_new_tokens=32, do_sample=False) for model in (dense, moe))
    assert tokenizer.decode(found[0]) == tokenizer.decode(expected[0])
    torch.testing.assert_close(moe(expected).logits, dense(expected).logits, rtol=0, atol=1e-3)


@torch.inference_mode()
def test_the_dense_model_predicts_english(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rows of q and k in the wrong order would leave both models equal and confused: a loss of 5.4 instead of 2.6."""
    token_ids = tokenizer(textwrap.dedent(heapq.__doc__ or ""), return_tensors="pt").input_ids
    assert dense(token_ids, labels=token_ids).loss < 3.0


@torch.inference_mode()
def test_router_is_skewed_and_idles_no_expert(moe: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    documentation = [textwrap.dedent(module.__doc__ or "") for module in (argparse, heapq, json, pydoc, re, subprocess)]
    loads = torch.zeros(moe.config.num_hidden_layers, moe.config.num_local_experts)
    for text in documentation:
        out = moe.model(tokenizer(text, return_tensors="pt").input_ids[:, :1024], output_router_logits=True)
        for layer, router_logits in enumerate(out.router_logits):
            chosen = router_logits.topk(moe.config.num_experts_per_tok).indices.flatten()
            loads[layer] += torch.bincount(chosen, minlength=loads.shape[1])
    skew = loads.amax(1) / loads.mean(1)
    print(f"max/mean load by layer: {skew.mean():.2f} ({skew.min():.2f} to {skew.max():.2f})")
    assert 1.8 < skew.mean() < 4.5
    assert loads.min() > 0


# The tokenizer

SAMPLES = (
    "In 1969, 384,400 km; 3.14159 and x² + ½ = ٣٤ \u3007 Ⅷ",
    "it's we'll I'd they've don't CAN'T 'tis",
    "tabs\tand  double   spaces \n\n  indented\r\n\ttrailing  ",
    "naïve café Ünïcödé 日本語のテキスト русский текст हिन्दी العربية",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b zero width, \x00 nul, \ufffd",
    "def f(x):\n    return x ** 2  # 12 chars\n",
    "https://example.org/a?b=1&c=%20#frag <b>bold</b> `code` {{ jinja }}",
    " leading", "trailing ", "", " ", "7", "\n",
)  # fmt: skip


def test_known_encodings(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("In 1969") == [788, 216, 33, 41, 38, 41]
    assert tokenizer.tokenize("v2025") == ["v", "2", "0", "2", "5"]
    assert tokenizer.encode("<|im_start|>user\n") == [1, *tokenizer.encode("user\n")]


@pytest.mark.parametrize("text", [*SAMPLES, textwrap.dedent(argparse.__doc__ or "")])
def test_encodings_are_plain_bpe_and_round_trip(text: str, demo_dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = json.loads((demo_dir / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    expected = [model["vocab"][piece] for word in split_words(text) for piece in merge_word(word, ranks)]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def split_words(text: str) -> list[str]:
    """llama.cpp's two patterns for SmolLM, one after the other: every numeral alone, then GPT-2's words."""
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return [word for part in regex.findall(r"\p{N}|\P{N}+", text) for word in regex.findall(words, part)]


def merge_word(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-level BPE by its definition: apply the best-ranked merge, leftmost first, until none applies."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    letters = {byte: chr(byte) for byte in kept} | {byte: chr(256 + order) for order, byte in enumerate(moved)}
    pieces = [letters[byte] for byte in word.encode()]
    while len(pieces) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(pieces)))
        if rank == len(ranks):
            break
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    return pieces


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    text = system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    prompted = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
    assert prompted == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
