"""A model directory that appears whole or not at all, with the files that go with the weights."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_runtime.errors import ConfigError
from moe_runtime.models.demo.output import MARKER_NAME

REPORT_NAME = "quantization.json"
_COMPANIONS = ("*.json", "tokenizer*", "*.jinja", "*.txt", "*.model", "*.py", "LICENSE*", "NOTICE*")
_REPLACED = ("config.json", "quantize_config.json", REPORT_NAME, MARKER_NAME)


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A scratch directory that becomes `out` (free, see finished_report) at the end; after an error nothing is left.

    Raises OSError as the system does.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        model_dir = Path(scratch, "model")
        model_dir.mkdir()
        yield model_dir
        os.rename(model_dir, out)  # takes the place of an empty directory


def finished_report(out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run with these settings that made `out`; None where `out` is free.

    Raises ConfigError where it holds anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        report = json.loads((out / REPORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{out} holds something else: expected nothing or an empty directory") from None
    if {key: report.get(key) for key in settings} != settings:
        raise ConfigError(f"{out} holds another quantized checkpoint ({_told(report)}): remove it, or write elsewhere")
    return dict(report)


def _told(report: dict[str, Any]) -> str:
    attention = f", attention {report['attention']}" if report.get("attention") else ""
    calibrated = ", calibrated" if report.get("calibrated") else ""
    return f"{report.get('format')}{attention}{calibrated} of {report.get('source')}"


def copy_companions(source: Path, model_dir: Path) -> None:
    """Tokenizer, generation settings, licence: every file beside the weights that does not speak of them."""
    names = {file.name for pattern in _COMPANIONS for file in source.glob(pattern) if file.is_file()}
    for name in sorted(names):
        if name not in _REPLACED and not name.endswith(".index.json"):
            shutil.copyfile(source / name, model_dir / name)
