"""Draws through the real server: their distribution, and that a seed and nothing else decides them."""

from typing import Any

import pytest
import torch

from tests.serving.reference import Reference
from tests.serving.server import Server

PROMPT = "Cook over a low heat"
DRAWING = {"temperature": 1.0, "max_tokens": 12}
DRAWS = 512


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.parametrize("seed", [0, -7, 2**63 - 1, -(2**63)])
def test_a_seed_decides(server: Server, seed: int) -> None:
    body = {"prompt": PROMPT, "seed": seed, **DRAWING}
    first, again = (texts(server.complete(**body)) for _ in range(2))
    assert first == again
    assert texts(server.complete(**{**body, "seed": seed ^ 1})) != first


def test_without_a_seed_texts_differ(server: Server) -> None:
    assert len({server.text(PROMPT, **DRAWING) for _ in range(4)}) == 4


def test_neighbours_change_nothing(server: Server) -> None:
    kinds = ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 1}, {"logit_bias": {"300": 5}})
    bodies = [{"prompt": f"{PROMPT} {i}", "seed": i, **DRAWING, **kinds[i % len(kinds)]} for i in range(24)]
    alone = [texts(server.complete(**body))[0] for body in bodies]
    assert server.texts(bodies) == alone


@pytest.mark.parametrize("seed", [11, 2**63 - 2])
def test_choice_i_draws_with_seed_plus_i(server: Server, seed: int) -> None:
    prompts = [PROMPT, "another prompt"]
    together = texts(server.complete(prompt=prompts, n=4, seed=seed, **DRAWING))
    assert len(together) == 8
    for index, text in enumerate(together):
        prompt, choice = prompts[index // 4], index % 4
        wrapped = (seed + choice + 2**63) % 2**64 - 2**63
        assert server.text(prompt, seed=wrapped, **DRAWING) == text
    assert len(set(together)) == 8


def test_n_greedy_choices_are_alike_and_the_prompt_counts_once(server: Server, reference: Reference) -> None:
    answer = server.complete(prompt=PROMPT, n=3, temperature=0, max_tokens=5)
    assert texts(answer) == [reference.greedy_text(PROMPT, 5)] * 3
    assert answer["usage"]["prompt_tokens"] == len(reference.ids(PROMPT))
    assert answer["usage"]["completion_tokens"] == 15
    chat = server.chat(messages=[{"role": "user", "content": "x"}], n=3, seed=4, **DRAWING)
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 3


def test_a_top_k_beyond_the_vocabulary_is_all_of_it(server: Server) -> None:
    body = {"prompt": PROMPT, "seed": 3, **DRAWING}
    everything = texts(server.complete(**body))
    for top_k in (-1, 512, 513, 9_999_999, 2**70):
        assert texts(server.complete(**body, top_k=top_k)) == everything


def test_the_distribution_is_the_parameters(server: Server, reference: Reference) -> None:
    """Temperature, then top-k, then top-p over what is left, then min-p relative to the best: chi-square."""
    scaled_V = reference.logprobs(reference.ids(PROMPT))[-1].double() / 1.7
    probs_V = scaled_V.softmax(-1)
    order = probs_V.argsort(descending=True)[:40]
    top = probs_V[order] / probs_V[order].sum()
    kept = order[(top.cumsum(0) - top < 0.8) & (top >= 0.1 * top[0])]
    expected = {int(token): DRAWS * float(probs_V[token] / probs_V[kept].sum()) for token in kept}
    assert 5 < len(expected) < 40 and min(expected.values()) > 5, "choose other parameters"

    body = {"prompt": PROMPT, "temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.1, "max_tokens": 1}
    answers = [server.complete(**body, n=DRAWS // 2, seed=seed, logprobs=0) for seed in (0, DRAWS // 2)]
    scores = [choice["logprobs"] for answer in answers for choice in answer["choices"]]
    # A token's own log-probability tells which it is, also where its text alone is no character.
    raw_V = reference.logprobs(reference.ids(PROMPT))[-1]
    drawn = torch.tensor([int((raw_V - score["token_logprobs"][0]).abs().argmin()) for score in scores])
    counts = torch.bincount(drawn, minlength=len(probs_V))
    assert set(counts.nonzero().flatten().tolist()) <= set(expected)
    chi_square = sum((int(counts[token]) - mean) ** 2 / mean for token, mean in expected.items())
    freedom = len(expected) - 1
    # Wilson and Hilferty: exceeded once in 30,000.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5) ** 3
