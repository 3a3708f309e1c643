"""Stop strings: cut a stream of text exactly at the first one, and never send a beginning of one that is cut."""

from collections.abc import Sequence


class StopStrings:
    """Matches any of several stop strings over pieces of text, in constant work per character (Knuth-Morris-Pratt).

    The string that is complete first wins; of those that end together, the longest. So the cut does not depend on how
    the text is divided. include: the text is cut behind the string instead of before it, so none has to be held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """The text that is safe to send now. Once `hit` is a stop string the text is over: nothing more may come."""
        if not self._patterns:
            return piece
        assert self.hit is None, "text after a stop string"
        text = self._held + piece
        for position in range(len(self._held), len(text)):
            self.hit = self._advance(text[position])
            if self.hit is not None:
                self._held = ""
                return text[: position + 1 - (0 if self._include else len(self.hit))]
        sendable = len(text) if self._include else len(text) - max(self._matched)
        self._held = text[sendable:]
        return text[:sendable]

    def finish(self) -> str:
        """The held beginning of a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Feed one character; the longest stop string that it completes, if any."""
        complete: str | None = None
        for index, (stop, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop) and (complete is None or len(complete) < matched):
                complete = stop
        return complete


def _borders(pattern: str) -> list[int]:
    """Per prefix of the pattern, the length of its longest proper beginning that is also its end."""
    borders = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[length] != pattern[position]:
            length = borders[length - 1]
        if pattern[length] == pattern[position]:
            length += 1
        borders[position] = length
    return borders
