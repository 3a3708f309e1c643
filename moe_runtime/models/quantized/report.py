"""What quantizing a checkpoint did to it: as JSON beside its weights, and as a table."""

from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table


class Perplexity(msgspec.Struct, frozen=True):
    """Before and after, on so many tokens of the bundled text (see perplexity.py)."""

    before: float
    after: float
    tokens: int


class LayerError(msgspec.Struct, frozen=True):
    """Norm of the error over norm of the weights; attention null where it stayed plain."""

    layer: int
    experts: float
    attention: float | None


class Report(msgspec.Struct, frozen=True):
    """source: the original's directory name; fingerprint: its hash; bytes: of all weights."""

    source: str
    fingerprint: str
    format: str
    attention: str | None
    calibrated: bool
    bytes_before: int
    bytes_after: int
    layers: tuple[LayerError, ...]
    lm_head: float | None
    perplexity: Perplexity | None


def read_report(tree: Mapping[str, Any]) -> Report:
    """A report from its JSON; raises ValueError for anything else."""
    return msgspec.convert(tree, Report)


def show(report: Report, console: Console) -> None:
    """The table of errors, then sizes and perplexity."""
    table = Table()
    for column in ("layer", "experts", "attention"):
        table.add_column(column, justify="right")
    for layer in report.layers:
        table.add_row(str(layer.layer), _share(layer.experts), _share(layer.attention))
    if report.lm_head is not None:
        table.add_row("LM head", "", _share(report.lm_head))
    title = f"{report.source} as {report.format}" + (f", attention {report.attention}" if report.attention else "")
    title += ", calibrated" if report.calibrated else ""
    lines = [f"{title}: relative error (norm of the error over norm of the weights)"]
    saved = report.bytes_before / report.bytes_after
    lines.append(f"weights: {_size(report.bytes_before)} -> {_size(report.bytes_after)} ({saved:.2f} times smaller)")
    if report.perplexity:
        measured = report.perplexity
        rise = measured.after / measured.before - 1
        change = f"{measured.before:.3f} -> {measured.after:.3f} ({rise:+.2%})"
        lines.append(f"perplexity: {change} on {measured.tokens} tokens of the bundled text, with plain activations")
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _share(error: float | None) -> str:
    return "plain" if error is None else f"{error:.3%}"


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
