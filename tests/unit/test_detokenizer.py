"""The incremental text equals the whole text, whatever the tokens and however they are grouped."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import END, START, THINK, byte_fallback, byte_level, metaspace, special_ids
from tokenizers import Tokenizer

from moe_runtime.gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from moe_runtime.gateway.token_bytes import TokenBytes

TEXTS = [
    "Příliš žluťoučký kůň",
    "🦙🦙 family: 👨‍👩‍👧",
    "日本語テキスト",
    "a\x00b\n\n c",
    "ď",
    "�� real marks �",
    "€" * 60,
    "  Hi  an! ",
    "",
]
BYTES, WORDS, PIECES = byte_level(), byte_fallback(), byte_fallback(strip=False)
TOKENIZERS = {"byte-level": BYTES, "byte-fallback": WORDS, "without strip": PIECES}
Make = Callable[[Tokenizer, Sequence[int], bool], Detokenizer]


def by_bytes(tokenizer: Tokenizer, context: Sequence[int], skip: bool) -> Detokenizer:
    return ByteDetokenizer(TokenBytes(tokenizer, special_ids(tokenizer) if skip else ()), context)


def by_window(tokenizer: Tokenizer, context: Sequence[int], skip: bool) -> Detokenizer:
    silent_ids = special_ids(tokenizer) if skip else ()
    return WindowDetokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens=skip), silent_ids, context)


def pieces(
    make: Make, tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = (), skip: bool = True
) -> list[str]:
    detokenizer = make(tokenizer, context, skip)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


BOTH = pytest.mark.parametrize("make", [by_bytes, by_window])
ALL = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@BOTH
@ALL
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text_and_no_piece_has_half_a_character(
    make: Make, tokenizer: Tokenizer, text: str
) -> None:
    sent = pieces(make, tokenizer, tokenizer.encode(text).ids)
    assert "".join(sent) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in sent)


@BOTH
@given(st.lists(st.integers(0, BYTES.get_vocab_size() + 2), max_size=120), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_tokens_of_a_byte_level_tokenizer_stream_as_they_decode_at_once(
    make: Make, ids: list[int], skip: bool
) -> None:
    assert "".join(pieces(make, BYTES, ids, skip=skip)) == BYTES.decode(ids, skip_special_tokens=skip)


def spelled(text: str) -> list[int]:
    """A text in byte-fallback tokens alone."""
    return [WORDS.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


PARTS = st.one_of(
    st.sampled_from(["▁", "▁Hi", "an", "!", "▁▁", START, END, THINK]).map(lambda token: [WORDS.token_to_id(token)]),
    st.text(max_size=3).map(spelled),
)
SEQUENCES = st.lists(PARTS, max_size=40).map(lambda parts: [token for part in parts for token in part])


@BOTH
@pytest.mark.parametrize("tokenizer", [WORDS, PIECES], ids=["byte-fallback", "without strip"])
@given(SEQUENCES, st.booleans())
@settings(max_examples=300, deadline=None)
def test_characters_in_bytes_between_pieces_stream_as_they_decode_at_once(
    make: Make, tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    assert "".join(pieces(make, tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [WORDS, PIECES], ids=["byte-fallback", "without strip"])
@given(SEQUENCES, SEQUENCES, st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_text_goes_on_where_the_prompt_ends(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool
) -> None:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert before + "".join(pieces(by_bytes, tokenizer, ids, prompt, skip)) == after


@given(st.lists(st.integers(0, 255), max_size=60))
@settings(max_examples=300, deadline=None)
def test_broken_bytes_leave_the_good_ones_around_them(values: list[int]) -> None:
    ids = [WORDS.token_to_id(f"<0x{value:02X}>") for value in values]
    expected = bytes(values).decode("utf-8", "replace").removeprefix(" ")
    assert "".join(pieces(by_bytes, WORDS, ids)) == expected


TOKEN_OF_BYTE = {TokenBytes(BYTES)[token]: token for token in range(256)}


@BOTH
@given(st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x41]), min_size=50, max_size=150))
@settings(max_examples=200, deadline=None)
def test_long_runs_of_broken_characters_stream_as_they_decode_at_once(make: Make, values: list[int]) -> None:
    ids = [TOKEN_OF_BYTE[bytes([value])] for value in values]
    assert BYTES.decode(ids) == bytes(values).decode("utf-8", "replace")
    assert "".join(pieces(make, BYTES, ids)) == BYTES.decode(ids)


def test_a_windows_work_stays_bounded_on_endless_garbage() -> None:
    longest = 0

    def decode(window: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return BYTES.decode(window)

    detokenizer = WindowDetokenizer(decode)
    token = TOKEN_OF_BYTE[b"\x80"]
    text = "".join(detokenizer.push(token) for _ in range(1000)) + detokenizer.finish()
    assert text == "\ufffd" * 1000
    assert longest < 50


@BOTH
def test_special_tokens_have_no_text_even_inside_a_character(make: Make) -> None:
    first, second, third = BYTES.encode("€").ids
    end = BYTES.token_to_id(END)
    assert pieces(make, BYTES, [end, first, end, second, third, end]) == ["", "", "", "", "€", "", ""]


@BOTH
def test_a_shown_special_token_ends_an_unfinished_character(make: Make) -> None:
    first, second, third = BYTES.encode("€").ids
    end = BYTES.token_to_id(END)
    assert "".join(pieces(make, BYTES, [first, end, second, third], skip=False)) == "\ufffd</s>\ufffd\ufffd"


@BOTH
def test_an_unfinished_character_comes_out_at_the_end(make: Make) -> None:
    first, second, _ = BYTES.encode("€").ids
    assert pieces(make, BYTES, [first, second]) == ["", "", "\ufffd"]


@BOTH
def test_the_first_space_depends_on_the_prompt(make: Make) -> None:
    hi, an, start = (WORDS.token_to_id(token) for token in ("▁Hi", "▁an", START))
    assert pieces(make, WORDS, [an, hi]) == ["an", " Hi", ""]
    assert pieces(make, WORDS, [an, hi], context=[start]) == ["an", " Hi", ""]
    assert pieces(make, WORDS, [an, hi], context=[hi]) == [" an", " Hi", ""]
    assert pieces(make, WORDS, [start, an], skip=False) == [START, " an", ""]


def test_other_tokenizers_go_by_the_window() -> None:
    tokenizer = metaspace()
    hi, an, mark = (tokenizer.token_to_id(token) for token in ("▁Hi", "▁an", "!"))
    assert "".join(pieces(by_window, tokenizer, [hi, mark, an])) == tokenizer.decode([hi, mark, an]) == "Hi! an"
    assert "".join(pieces(by_window, tokenizer, [hi], context=[an])) == " Hi"


@BOTH
def test_a_prompt_that_ends_inside_a_character_is_no_context(make: Make) -> None:
    first, second, third = BYTES.encode("€").ids
    a = BYTES.encode("a").ids[0]
    assert "".join(pieces(make, BYTES, [a], context=[first, second])) == "a"
    assert "".join(pieces(make, BYTES, [third, a], context=[first, second])) == "\ufffda"
