"""Greedy text is transformers' own, however it is asked for and whatever runs beside it."""

import pytest

from tests.serving.reference import Reference
from tests.serving.server import Server

PROMPTS = (
    "Water boils at 100 degrees",
    "x",
    "Příliš žluťoučký 🦙",
    "def mean(values):\n    total = 0\n",
    "She opened the letter slowly. " * 6,
)
TOKENS = 24
GREEDY = [{"temperature": 0}, {"top_k": 1}, {"temperature": 1e-9}, {"temperature": 0.8, "top_k": 1, "seed": 5}]
RANDOM = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_greedy_is_the_references_text(server: Server, reference: Reference, prompt: str) -> None:
    assert server.text(prompt, max_tokens=TOKENS) == reference.greedy_text(prompt, TOKENS)


def test_every_way_to_ask_for_greedy_agrees_beside_others_that_draw(server: Server, reference: Reference) -> None:
    bodies = [{"prompt": prompt, "max_tokens": TOKENS, **way} for prompt in PROMPTS for way in GREEDY]
    noise = [{"prompt": prompt, "max_tokens": TOKENS, **RANDOM} for prompt in PROMPTS]
    texts = server.texts([*bodies, *noise])
    expected = [reference.greedy_text(prompt, TOKENS) for prompt in PROMPTS for _ in GREEDY]
    assert texts[: len(bodies)] == expected
    drawn = texts[len(bodies) :]
    assert all(text != reference.greedy_text(prompt, TOKENS) for text, prompt in zip(drawn, PROMPTS, strict=True))


def test_a_chat_is_its_template_through_the_model(server: Server, reference: Reference) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo 🦙"}]
    prompt = reference.chat_ids(messages, add_generation_prompt=True)
    expected = reference.text(reference.greedy(prompt, TOKENS))
    answer = server.chat(messages=messages, temperature=0, max_tokens=TOKENS)
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_streamed_text_is_the_whole_text(server: Server) -> None:
    for prompt in PROMPTS:
        pieces = server.stream(prompt=prompt, temperature=0, max_tokens=TOKENS)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == server.text(prompt, max_tokens=TOKENS)
