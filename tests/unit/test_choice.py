"""A choice's text, scores and end follow from its tokens alone, held to a plain reading of the rules."""

from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import END, START, byte_fallback, special_ids

from moe_runtime.gateway.choice import Choice, Delta, TextRules
from moe_runtime.gateway.detokenizer import ByteDetokenizer
from moe_runtime.gateway.metrics import GatewayMetrics, RequestClock
from moe_runtime.gateway.token_bytes import TokenBytes
from moe_runtime.protocol.messages import SamplingParams, Submit, TokenOutput, TokenScore

TOKENIZER = byte_fallback()
SPECIAL = special_ids(TOKENIZER)
NAMES = ["▁Hi", "▁an", "an", "!", "n", "<0xE2>", "<0x82>", "<0xAC>", START, END]
VOCAB = [TOKENIZER.token_to_id(name) for name in NAMES]
CLOCK = RequestClock(GatewayMetrics("gateway0", lambda: ()), 0.0)
SCORE = TokenScore(-1.0, 1)


def detokenizer() -> ByteDetokenizer:
    return ByteDetokenizer(TokenBytes(TOKENIZER, SPECIAL))


def play(rules: TextRules, outputs: list[TokenOutput]) -> tuple[Choice, list[Delta]]:
    """Feed outputs until the choice has ended."""
    choice = Choice(0, Submit("r", (1,), SamplingParams(99)), detokenizer(), rules, CLOCK, 1)
    deltas = []
    for output in outputs:
        deltas.append(choice.accept(output))
        if deltas[-1].finish_reason is not None:
            break
    return choice, deltas


def grouped(tokens: list[int], sizes: list[int], finish: str) -> list[TokenOutput]:
    """The tokens in outputs of these sizes, repeated; the last one ends the text."""
    outputs, start = [], 0
    while start < len(tokens):
        size = sizes[len(outputs) % len(sizes)]
        part = tuple(tokens[start : start + size])
        start += size
        outputs.append(TokenOutput("r", part, finish if start >= len(tokens) else None, (SCORE,) * len(part)))
    return outputs


def expected(rules: TextRules, tokens: list[int], finish: str) -> tuple[str, list[tuple[int, int]], Any, int]:
    """Text, (token, offset) of each scored one, (finish_reason, stop_reason), and how many tokens were taken.

    No stop string is looked for before min_tokens, nor in the text of an included stop token.
    """
    included = finish == "stop" and rules.include_stop
    shown = tokens if finish == "length" or included else tokens[:-1]
    whole = detokenizer()
    pieces = [whole.push(token) for token in shown]
    offsets = [0, *accumulate(map(len, pieces))]
    text = "".join(pieces) + whole.finish()
    begin = offsets[min(rules.min_tokens, len(pieces))]
    searched = text
    if included:
        searched = "".join(pieces[:-1])
    elif len(shown) <= rules.min_tokens:
        searched = ""
    for end in range(begin + 1, len(searched) + 1):
        hits = [stop for stop in rules.stops if searched[begin:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            cut = end if rules.include_stop else end - len(stop)
            scored = [pair for pair in zip(shown, offsets, strict=False) if pair[1] < cut]
            taken = next((i for i, offset in enumerate(offsets) if offset >= end), len(tokens))
            return searched[:cut], scored, ("stop", stop), taken
    named = tokens[-1] if finish == "stop" and tokens[-1] in rules.stop_token_ids else None
    return text, list(zip(shown, offsets, strict=False)), (finish, named), len(tokens)


RULES = st.builds(
    TextRules,
    stops=st.lists(st.sampled_from(["n", "an", "i a", "!!", "€", "nan", "\ufffd"]), max_size=2).map(tuple),
    stop_token_ids=st.sampled_from([(), (VOCAB[3],), (VOCAB[9],)]),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 6),
    scored=st.just(True),
)


@given(
    RULES,
    st.lists(st.sampled_from(VOCAB), min_size=1, max_size=14),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from(["stop", "length"]),
)
@settings(max_examples=600, deadline=None)
def test_any_tokens_in_any_groups(rules: TextRules, tokens: list[int], sizes: list[int], finish: str) -> None:
    text, scored, end, taken = expected(rules, tokens, finish)
    choice, deltas = play(rules, grouped(tokens, sizes, finish))
    assert "".join(delta.text for delta in deltas) == text
    entries = [entry for delta in deltas for entry in delta.scored]
    assert [(entry.token, entry.offset) for entry in entries] == scored
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == end
    assert choice.completion_tokens == taken
    assert all(delta.finish_reason is None for delta in deltas[:-1])


@given(RULES, st.lists(st.sampled_from(VOCAB), min_size=1, max_size=14))
@settings(max_examples=200, deadline=None)
def test_no_score_is_sent_before_its_text(rules: TextRules, tokens: list[int]) -> None:
    _, deltas = play(rules, grouped(tokens, [1], "length"))
    sent = ""
    for delta in deltas[:-1]:
        sent += delta.text
        assert all(entry.offset < len(sent) for entry in delta.scored)


def test_a_token_that_a_stop_string_cuts_in_the_middle_has_a_score() -> None:
    hi, an, mark = VOCAB[0], VOCAB[1], VOCAB[3]
    rules = TextRules(stops=("n!",), scored=True)
    _, deltas = play(rules, grouped([hi, an, mark], [1], "length"))
    assert [delta.text for delta in deltas] == ["Hi", " a", ""]
    assert [[entry.token for entry in delta.scored] for delta in deltas] == [[hi], [], [an]]


def test_without_scores_there_are_none() -> None:
    _, deltas = play(TextRules(), [TokenOutput("r", tuple(VOCAB[:3]), "length")])
    assert deltas == [Delta(0, "Hi anan", "length")]
