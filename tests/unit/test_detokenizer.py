"""The incremental text equals the whole text, whatever the tokens and however they are grouped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moe_runtime.gateway.detokenizer import Detokenizer

TEXTS = [
    "Příliš žluťoučký kůň",
    "🦙🦙 family: 👨‍👩‍👧",
    "日本語テキスト",
    "a\x00b\n\n c",
    "ď",
    "�� real marks �",
    "€" * 60,
]


def byte_level() -> Tokenizer:
    """One token per byte, and one special token at 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Words with a leading mark for their space, and bytes for everything else, as in Llama's and Mixtral's files."""
    words = ["<unk>", "▁", "▁Hello", "▁world", "!", "▁the"]
    vocab = {token: index for index, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTES = byte_level()
WORDS = sentencepiece()


def byte_token(value: int) -> int:
    """The token of one byte: byte-level tokenizers write it as a printable stand-in."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return BYTES.token_to_id(chr(value if value in printable else 256 + hidden.index(value)))


TOKEN_OF_BYTE = [byte_token(value) for value in range(256)]


def stream(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(lambda window: tokenizer.decode(window), {256}, context or [])
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text_and_no_piece_has_half_a_character(text: str) -> None:
    pieces = stream(BYTES, BYTES.encode(text).ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_stream_as_they_decode_at_once(ids: list[int]) -> None:
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids)


@given(st.lists(st.sampled_from([0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x41]), min_size=50, max_size=150))
@settings(max_examples=300, deadline=None)
def test_long_runs_of_broken_characters_stream_as_they_decode_at_once(values: list[int]) -> None:
    ids = [TOKEN_OF_BYTE[value] for value in values]
    assert BYTES.decode(ids) == bytes(values).decode("utf-8", "replace")
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids)


def test_work_stays_bounded_on_endless_garbage() -> None:
    longest = 0

    def decode(window: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return BYTES.decode(window)

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(TOKEN_OF_BYTE[0x80]) for _ in range(1000)) + detokenizer.finish()
    assert text == "\ufffd" * 1000
    assert longest < 50


def test_special_tokens_have_no_text_even_inside_a_character() -> None:
    first, second, third = BYTES.encode("€").ids
    assert stream(BYTES, [256, first, 256, second, third, 256]) == ["", "", "", "", "€", "", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    first, second, _ = BYTES.encode("€").ids
    assert stream(BYTES, [first, second]) == ["", "", "\ufffd"]


def test_leading_space_follows_from_the_prompt() -> None:
    hello, world = WORDS.token_to_id("▁Hello"), WORDS.token_to_id("▁world")
    assert stream(WORDS, [world, hello]) == ["world", " Hello", ""]
    assert stream(WORDS, [world, hello], context=[hello]) == [" world", " Hello", ""]


def test_byte_fallback_tokens_make_characters() -> None:
    ids = [WORDS.token_to_id("▁Hello"), *(WORDS.token_to_id(f"<0x{byte:02X}>") for byte in "🦙€".encode())]
    pieces = stream(WORDS, ids)
    assert "".join(pieces) == WORDS.decode(ids) == "Hello🦙€"
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_prompt_that_ends_inside_a_character_is_no_context() -> None:
    first, second, third = BYTES.encode("€").ids
    a = BYTES.encode("a").ids[0]
    assert "".join(stream(BYTES, [a], context=[first, second])) == "a"
    assert "".join(stream(BYTES, [third, a], context=[first, second])) == "\ufffda"
