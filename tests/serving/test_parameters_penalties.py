"""Presence and frequency penalties count the new tokens only, the repetition penalty the prompt's too."""

from collections.abc import Sequence

import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from tests.serving.reference import Reference
from tests.serving.server import Server

# A text that repeats itself, so that counting it or not shows.
PROMPT = "the time of the number of the time of the number of the"
TOKENS = 24


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence, counting what follows the prompt."""

    def __init__(self, prompt_tokens: int, presence: float = 0.0, frequency: float = 0.0) -> None:
        self._prompt_tokens = prompt_tokens
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_tokens :], minlength=scores.shape[1])
        return scores - counts * self._frequency - (counts > 0) * self._presence


def expected(reference: Reference, *processors: LogitsProcessor) -> str:
    return reference.greedy_text(PROMPT, TOKENS, *processors)


@pytest.mark.parametrize("penalty", [0.3, 0.8, 1.2, 2.0])
def test_repetition_penalty_is_transformers(server: Server, reference: Reference, penalty: float) -> None:
    text = server.text(PROMPT, max_tokens=TOKENS, repetition_penalty=penalty)
    assert text == expected(reference, RepetitionPenaltyLogitsProcessor(penalty))
    assert text != expected(reference)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(2.0, 0.0), (-2.0, 0.0), (0.0, 2.0), (0.0, -1.5), (1.0, 0.5), (-1.0, 2.0)]
)
def test_presence_and_frequency_are_openais(
    server: Server, reference: Reference, presence: float, frequency: float
) -> None:
    penalties = OpenAIPenalties(len(reference.ids(PROMPT)), presence, frequency)
    text = server.text(PROMPT, max_tokens=TOKENS, presence_penalty=presence, frequency_penalty=frequency)
    assert text == expected(reference, penalties)


def test_repetition_comes_before_the_other_two(server: Server, reference: Reference) -> None:
    processors: Sequence[LogitsProcessor] = (
        SequenceBiasLogitsProcessor({(300,): 1.5, (301,): -1.5}),
        RepetitionPenaltyLogitsProcessor(1.4),
        OpenAIPenalties(len(reference.ids(PROMPT)), 0.5, 0.9),
    )
    text = server.text(
        PROMPT,
        max_tokens=TOKENS,
        logit_bias={"300": 1.5, "301": -1.5},
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.9,
    )
    assert text == expected(reference, *processors)


def test_the_first_token_shows_who_counts_the_prompt(server: Server, reference: Reference) -> None:
    """A token of the prompt is made the best by a small margin: only a penalty that counts it there can unseat it."""
    prompt = reference.ids(PROMPT)
    logits_V = reference.logprobs(prompt)[-1]
    token = prompt[0]
    bias = {str(token): float(logits_V.max() - logits_V[token]) + 0.5}
    for neutral in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1}):
        assert server.text(PROMPT, max_tokens=1, logit_bias=bias, **neutral) == reference.text([token])
    assert server.text(PROMPT, max_tokens=1, logit_bias=bias, repetition_penalty=2) != reference.text([token])


def test_penalties_count_what_was_generated_before_a_preemption(server: Server) -> None:
    """Many at once, so that the pool runs out: each as it was alone."""
    kinds = ({"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.3})
    bodies = [
        {"prompt": f"{PROMPT} {index}", "max_tokens": 40, "temperature": 0, **kinds[index % 3]} for index in range(12)
    ]
    alone = [server.complete(**body)["choices"][0]["text"] for body in bodies]
    before = server.total("preemptions_total")
    assert server.texts(bodies) == alone
    server.wait_empty()
    assert server.total("preemptions_total") > before
