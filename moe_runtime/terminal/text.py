"""Text from elsewhere, made harmless for a terminal."""

import re

# C0 but for \n and \t, DEL, C1: everything that a terminal may take as an order.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
MAX_LINE = 400


def neutralise(text: str) -> str:
    """The text with each control character as a visible symbol; \\n and \\t stay, \\r goes without a trace."""
    return _CONTROL.sub(_symbol, text.replace("\r", ""))


def one_line(text: str) -> str:
    """A message as one harmless line of at most MAX_LINE characters."""
    line = neutralise(" ".join(well_formed(text).split()))
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..."


def well_formed(text: str) -> str:
    """The text with lone surrogates, which no encoding can write, replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<{code:02X}>"
