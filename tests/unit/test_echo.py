"""A prompt's text in front of its completion: as it was given, or as its ids decode, with true offsets."""

import json
from pathlib import Path

import pytest
from small_tokenizers import END, START, byte_fallback, byte_level
from tokenizers import Tokenizer, normalizers

from moe_runtime.gateway.echo import echo_of
from moe_runtime.gateway.tokenizer import TextTokenizer
from moe_runtime.protocol.messages import TokenScore


def load(tokenizer: Tokenizer, folder: Path) -> TextTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return TextTokenizer(folder)


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(byte_level(), tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load(byte_fallback(), tmp_path_factory.mktemp("words"))


def ids_of(tokenizer: TextTokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, special_tokens=False))


@pytest.mark.parametrize("skip", [False, True])
def test_a_given_text_is_echoed_whatever_its_tokens_show(words: TextTokenizer, skip: bool) -> None:
    (start,) = ids_of(words, START)
    echo = echo_of(words, (start, *ids_of(words, "Hi an€")), "Hi an€", skip)
    assert echo.text == "Hi an€"
    # The begin-of-text token is not in it; the space belongs to the word behind it.
    assert echo.offsets == (0, 0, 2, 5, 5, 5)


def test_special_tokens_in_a_given_text_have_their_places(bytes_: TextTokenizer) -> None:
    text = f"a{END}b{START}"
    echo = echo_of(bytes_, ids_of(bytes_, text), text, True)
    assert (echo.text, echo.offsets) == (text, (0, 1, 5, 6))


@pytest.mark.parametrize(
    ("skip", "text", "offsets"), [(True, "a€", (0, 1, 1, 1, 1)), (False, f"a{END}€", (0, 1, 5, 5, 5))]
)
def test_ids_are_decoded(bytes_: TextTokenizer, skip: bool, text: str, offsets: tuple[int, ...]) -> None:
    echo = echo_of(bytes_, ids_of(bytes_, f"a{END}€"), None, skip)
    assert (echo.text, echo.offsets) == (text, offsets)


def test_ids_that_end_inside_a_character(bytes_: TextTokenizer) -> None:
    echo = echo_of(bytes_, ids_of(bytes_, "a€")[:-1], None, True)
    assert (echo.text, echo.offsets) == ("a\ufffd", (0, 1, 1))


def test_no_offset_is_beyond_the_text(words: TextTokenizer) -> None:
    """A tokenizer may make more of a text than is there."""
    echo = echo_of(words, ids_of(words, "Hi an an an"), "Hi an", True)
    assert echo.offsets == (0, 2, 5, 5)


def test_scores_of_a_prompt_begin_with_its_second_token(bytes_: TextTokenizer) -> None:
    score = TokenScore(-1.0, 1)
    scored = echo_of(bytes_, ids_of(bytes_, "ab"), None, True).scored([score])
    assert [(entry.offset, entry.score) for entry in scored] == [(0, None), (1, score)]
    with pytest.raises(ValueError, match="shorter"):
        echo_of(bytes_, ids_of(bytes_, "abc"), None, True).scored([score])


def test_a_text_is_given_back_as_it_was_before_the_tokenizer_normalized_it(tmp_path: Path) -> None:
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    tokenizer = load(backend, tmp_path)
    echo = echo_of(tokenizer, ids_of(tokenizer, "e\u0301x"), "e\u0301x", True)
    assert echo.text == "e\u0301x" and echo.offsets == (0, 0, 1)
    assert echo_of(tokenizer, echo.ids, None, True).text == "\xe9x"
