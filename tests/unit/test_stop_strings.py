"""Stop strings cut exactly, wherever the pieces divide."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.gateway.stop_strings import StopStrings

SMALL = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The first end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def feed(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    matcher = StopStrings(stops)
    sent = []
    for piece in pieces:
        sent.append(matcher.push(piece))
        if matcher.hit:
            return sent, True
    return [*sent, matcher.finish()], False


@given(SMALL, STOPS, st.data())
def test_any_division_gives_the_same_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    sent, hit = feed(pieces, stops)
    assert ("".join(sent), hit) == expected(text, stops)


@given(SMALL, STOPS)
def test_exactly_what_could_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent = ""
    for end in range(1, len(text) + 1):
        sent += matcher.push(text[end - 1])
        if matcher.hit:
            return
        beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
        held = max((len(beginning) for beginning in beginnings if text[:end].endswith(beginning)), default=0)
        assert sent == text[: end - held]


def test_text_held_back_comes_at_the_end() -> None:
    matcher = StopStrings(["###"])
    assert matcher.push("one ##") == "one "
    assert not matcher.hit
    assert matcher.finish() == "##"


def test_without_stop_strings_text_passes_through() -> None:
    assert feed(["a", "", "b"], []) == (["a", "", "b", ""], False)


def test_a_stop_string_may_overlap_a_failed_one() -> None:
    assert feed(list("aaab!"), ["aab"]) == (["", "", "a", ""], True)
