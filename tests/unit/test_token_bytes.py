"""The bytes of a token are those that the tokenizer's own decoder makes of it, next to others and alone."""

import pytest
from small_tokenizers import END, START, THINK, byte_fallback, byte_level, metaspace, special_ids
from tokenizers import Tokenizer, decoders

from moe_runtime.gateway.token_bytes import TokenBytes, token_text

EXACT = [byte_level(), byte_fallback(), byte_fallback(strip=False)]


@pytest.mark.parametrize("tokenizer", EXACT, ids=["byte-level", "byte-fallback", "without strip"])
def test_the_bytes_of_all_tokens_joined_are_the_text(tokenizer: Tokenizer) -> None:
    table = TokenBytes(tokenizer)
    assert table.exact
    for text in ("Hi an!", "  Hi  an", "Příliš 🦙 日本語\n\t\x00", f"{THINK}Hi{START} an{END}"):
        ids = tokenizer.encode(text).ids
        joined = b"".join(table[token] for token in ids).decode()
        assert joined.removeprefix(" " if table.strips_space else "") == tokenizer.decode(
            ids, skip_special_tokens=False
        )


def test_every_byte_has_its_token() -> None:
    for tokenizer in EXACT:
        table = TokenBytes(tokenizer)
        seen = {table[token] for token in range(tokenizer.get_vocab_size())}
        assert {bytes([byte]) for byte in range(256)} <= seen


def test_every_token_that_is_text_alone_is_what_it_decodes_to_after_another() -> None:
    for tokenizer in (*EXACT, metaspace()):
        table, before = TokenBytes(tokenizer), tokenizer.token_to_id("!")
        for token in range(tokenizer.get_vocab_size()):
            alone = tokenizer.decode([before, token], skip_special_tokens=False).removeprefix("!")
            if "\ufffd" not in alone and table.exact:
                assert table[token].decode() == alone


def test_hidden_tokens_and_ids_beyond_the_vocabulary_have_none() -> None:
    tokenizer = byte_level()
    shown, hidden = TokenBytes(tokenizer), TokenBytes(tokenizer, special_ids(tokenizer))
    end = tokenizer.token_to_id(END)
    assert (shown[end], hidden[end]) == (END.encode(), b"")
    assert shown[tokenizer.get_vocab_size()] == shown[2**31] == b""
    think = tokenizer.token_to_id(THINK)
    assert shown[think] == hidden[think] == THINK.encode()


def test_only_decoders_that_are_understood_whole_are_exact() -> None:
    assert not TokenBytes(metaspace()).exact
    assert TokenBytes(metaspace())[metaspace().token_to_id("é")] == "é".encode()
    tokenizer = byte_fallback()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    for decoder in (
        decoders.Sequence([*steps, decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([*steps, decoders.Strip("_", 1, 0)]),
        decoders.Sequence([*steps, decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), *steps[:2]]),
        decoders.WordPiece(),
    ):
        tokenizer.decoder = decoder
        assert not TokenBytes(tokenizer).exact


def test_names_of_tokens() -> None:
    assert token_text("é ".encode()) == "é "
    assert token_text(b"\xe2\x82") == r"bytes:\xe2\x82"
    assert token_text(b"") == ""
