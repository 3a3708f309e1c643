"""What may be generated at all: logit_bias, allowed_token_ids, bad_words, min_tokens; greedy, against transformers."""

import random

import pytest
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from tests.serving.reference import Reference
from tests.serving.server import Server

PROMPT = "To install the package,"
TOKENS = 16


@pytest.mark.parametrize("token", [40, 300, 511])
def test_a_bias_of_100_forces_a_token(server: Server, reference: Reference, token: int) -> None:
    answer = server.complete(prompt=PROMPT, max_tokens=6, logit_bias={str(token): 100}, seed=1)
    assert answer["choices"][0]["text"] == reference.text([token] * 6)


def test_a_bias_of_minus_100_bans_a_token(server: Server, reference: Reference) -> None:
    first, second = reference.greedy(reference.ids(PROMPT), TOKENS)[:2]
    banned = {str(first): -100, str(second): -100}
    expected = reference.greedy_text(PROMPT, TOKENS, SuppressTokensLogitsProcessor([first, second]))
    assert server.text(PROMPT, max_tokens=TOKENS, logit_bias=banned) == expected
    assert server.text(PROMPT, max_tokens=TOKENS) != expected


def test_small_biases_are_added_to_the_logits(server: Server, reference: Reference) -> None:
    draw = random.Random(1)
    bias = {token: draw.uniform(-3, 3) for token in draw.sample(range(3, 512), 300)}
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    expected = reference.greedy_text(PROMPT, TOKENS, processor)
    assert server.text(PROMPT, max_tokens=TOKENS, logit_bias={str(t): v for t, v in bias.items()}) == expected


def test_only_allowed_tokens_come(server: Server, reference: Reference) -> None:
    allowed = reference.readable_ids()[::5]
    others = [token for token in range(reference.vocab) if token not in allowed]
    expected = reference.greedy_text(PROMPT, TOKENS, SuppressTokensLogitsProcessor(others))
    assert server.text(PROMPT, max_tokens=TOKENS, allowed_token_ids=allowed) == expected
    drawn = server.complete(prompt=PROMPT, max_tokens=40, temperature=5, seed=3, allowed_token_ids=allowed, logprobs=0)
    assert set(drawn["choices"][0]["logprobs"]["tokens"]) <= {reference.text([token]) for token in allowed}


def test_bad_words_never_come(server: Server, reference: Reference) -> None:
    allowed = reference.readable_ids()
    others = SuppressTokensLogitsProcessor([token for token in range(reference.vocab) if token not in allowed])
    words: list[str] = []
    # Ban what was said until little of the first text is left: one-token words, and longer ones that end in a ban.
    for _ in range(4):
        banned = [ids for word in words for ids in (reference.ids(word), reference.ids(f" {word}"))]
        processors = [others, NoBadWordsLogitsProcessor(banned)] if words else [others]
        made = reference.greedy(reference.ids(PROMPT), TOKENS, *processors)
        text = server.text(PROMPT, max_tokens=TOKENS, bad_words=words, allowed_token_ids=allowed)
        assert text == reference.text(made)
        spelled = [reference.text(made[i : i + count]).strip() for i, count in ((0, 1), (3, 2), (6, 2), (9, 3))]
        words += [word for word in spelled if word and word not in words]
    assert any(len(reference.ids(word)) > 1 for word in words)


def test_min_tokens_delays_the_end_of_text(server: Server, reference: Reference) -> None:
    prompt = reference.ids(PROMPT)
    end = {str(reference.eos): 100}
    answer = server.complete(prompt=PROMPT, temperature=0, max_tokens=TOKENS, logit_bias=end)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1
    for least in (1, 5, TOKENS):
        answer = server.complete(prompt=PROMPT, temperature=0, max_tokens=TOKENS, logit_bias=end, min_tokens=least)
        made = reference.greedy(
            prompt,
            TOKENS,
            SequenceBiasLogitsProcessor({(reference.eos,): 100.0}),
            MinNewTokensLengthLogitsProcessor(len(prompt), least, reference.eos),
        )
        assert answer["choices"][0]["text"] == reference.text(made)
        assert answer["choices"][0]["finish_reason"] == ("length" if least == TOKENS else "stop")
        assert answer["usage"]["completion_tokens"] == min(least + 1, TOKENS)


def test_masks_that_leave_no_token_are_refused(server: Server, reference: Reference) -> None:
    body = {"prompt": PROMPT, "allowed_token_ids": [reference.eos], "min_tokens": 2, "max_tokens": 5}
    assert server.refused(body)["message"]
