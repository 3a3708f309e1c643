"""`moe-runtime quantize`: a plain checkpoint as a quantized one that loads without work."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from moe_runtime.errors import ConfigError
from moe_runtime.models.demo.output import write_json
from moe_runtime.models.loader import fingerprint, open_checkpoint
from moe_runtime.models.quantized.calibration import Calibration
from moe_runtime.models.quantized.directory import REPORT_NAME, copy_companions, finished_report, new_directory
from moe_runtime.models.quantized.perplexity import perplexity
from moe_runtime.models.quantized.report import Report, read_report
from moe_runtime.models.quantized.rewrite import Rewrite, write_weights
from moe_runtime.models.quantized.shards import SHARD_BYTES, ShardWriter
from moe_runtime.models.quantized.source import PlainSource
from moe_runtime.models.quantized.texts import text_tokens
from moe_runtime.models.registry import load_spec
from moe_runtime.quant.calibrated import can_calibrate
from moe_runtime.quant.formats import QUANTIZED, Format

ATTENTION_FORMATS = tuple(name for name in QUANTIZED if name.startswith(("w8a16", "w4a16")))

# Called often, with the fraction done and what is being done; what it raises stops the work.
Progress = Callable[[float, str], None]


def quantize_checkpoint(
    source: Path,
    out: Path,
    form: Format,
    attention: Format | None,
    *,
    calibrate: bool,
    measure: bool,
    progress: Progress,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Write the checkpoint at `source` to `out` with its experts in `form`, and attention and LM head if asked.

    The layout is compressed-tensors'. `out` appears when all is done, or not at all; one that holds the same already is
    left alone. `calibrate`: formats that gain by it are rounded with the inputs of a bundled text in view (see
    quant.calibrated). `measure`: perplexity before and after. Raises ConfigError for formats and directories that will
    not do and where the system refuses to write, and CheckpointError as the loader does.
    """
    if not form.quantized:
        raise ConfigError(f"--format is {form.name}: expected one of {', '.join(QUANTIZED)}")
    if attention is not None and attention.name not in ATTENTION_FORMATS:
        raise ConfigError(f"--attention is {attention.name}: expected one of {', '.join(ATTENTION_FORMATS)}")
    rewrite = Rewrite(PlainSource(source, load_spec(source)), form, attention)
    settings = {
        "source": source.resolve().name,
        "fingerprint": f"{fingerprint(source):016x}",
        "format": form.name,
        "attention": attention.name if attention else None,
        "calibrated": calibrate and any(one is not None and can_calibrate(one) for one in (form, attention)),
    }
    done = finished_report(out, settings)
    if done:
        return read_report(done)
    try:
        with new_directory(Path(os.path.abspath(out))) as model_dir:
            copy_companions(source, model_dir)
            write_json(model_dir / "config.json", rewrite.config())
            calibrate_on = source if settings["calibrated"] else None
            tree = settings | _write(rewrite, model_dir, calibrate_on, progress, shard_bytes)
            tree["perplexity"] = _measure(source, model_dir, progress) if measure else None
            write_json(model_dir / REPORT_NAME, tree)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    return read_report(tree)


def _write(
    rewrite: Rewrite, model_dir: Path, calibrate_on: Path | None, progress: Progress, shard_bytes: int
) -> dict[str, Any]:
    """The weights; answers with what the report says of them."""
    plans = {name: plan for item in rewrite.items() for name, plan in item.plans().items()}
    calibration = _calibration(calibrate_on) if calibrate_on else None
    with ShardWriter(model_dir, plans, shard_bytes) as writer:
        experts, attention = write_weights(rewrite, writer, calibration, progress)
    open_checkpoint(model_dir, load_spec(model_dir))  # what was written must be what is read
    head = attention.pop(-1, None)
    return {
        "bytes_before": rewrite.source.nbytes,
        "bytes_after": sum(plan.nbytes for plan in plans.values()),
        "layers": [
            {
                "layer": layer,
                "experts": loss.relative,
                "attention": attention[layer].relative if layer in attention else None,
            }
            for layer, loss in sorted(experts.items())
        ],
        "lm_head": head.relative if head else None,
    }


def _calibration(source: Path) -> Calibration:
    return Calibration(open_checkpoint(source, load_spec(source)), text_tokens(source, "calibration"))


def _measure(before: Path, after: Path, progress: Progress) -> dict[str, float]:
    tokens_T = text_tokens(before, "prose")
    measured: dict[str, float] = {"tokens": len(tokens_T)}
    for when, model_dir in (("before", before), ("after", after)):
        told = partial(_tell, progress, f"perplexity {when}")
        measured[when] = perplexity(model_dir, tokens_T, told)
    return measured


def _tell(progress: Progress, stage: str, fraction: float, what: str) -> None:
    progress(fraction, f"{stage}, {what}")
