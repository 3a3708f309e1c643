"""From a checkpoint's directory to its ModelSpec: the only place that asks transformers to read a config."""

import json
from pathlib import Path
from typing import Any

import msgspec

from moe_runtime.errors import ConfigError
from moe_runtime.models import granitemoe, mixtral, olmoe, qwen2_moe, qwen3_moe
from moe_runtime.models.family import Family, HfConfig
from moe_runtime.models.hf_config import token_ids
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.tensor_table import FLOAT_DTYPES, read_table
from moe_runtime.quant.checkpoints.read import read_quantization

FAMILIES: dict[str, Family] = {
    "mixtral": mixtral.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "olmoe": olmoe.FAMILY,
    "granitemoe": granitemoe.FAMILY,
}


def load_spec(model_dir: Path) -> ModelSpec:
    """Read config.json and generation_config.json of a checkpoint's directory.

    Raises ConfigError that names the key, its value and what is supported for whatever cannot be served.
    """
    raw = read_config(model_dir)
    family = FAMILIES.get(raw.get("model_type", ""))
    if family is None:
        raise ConfigError(
            f"{model_dir / 'config.json'}: model_type is {raw.get('model_type')!r}: supported are {', '.join(FAMILIES)}"
        )
    read_quantization(raw)  # refuses what it does not understand, before any node has started
    config = _hf_config(model_dir)
    spec = family.to_spec(config)
    return msgspec.structs.replace(
        spec, eos_ids=_generation_eos(model_dir) or spec.eos_ids, checkpoint_dtype=_stored_dtype(model_dir, config)
    )


def read_config(model_dir: Path) -> dict[str, Any]:
    """A checkpoint's config.json as it is."""
    return _read_json(model_dir / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: expected a Hugging Face checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: expected an object")
    return content


def _hf_config(model_dir: Path) -> HfConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"{model_dir / 'config.json'} is refused by transformers: {error}") from error


def _generation_eos(model_dir: Path) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    return token_ids(_read_json(path).get("eos_token_id")) if path.exists() else ()


def _stored_dtype(model_dir: Path, config: HfConfig) -> str:
    """The config's dtype, or where it says none the embedding's, as a torch dtype's name."""
    if config.dtype is not None:
        return str(config.dtype).removeprefix("torch.")
    embedding = read_table(model_dir).get("model.embed_tokens.weight")
    return FLOAT_DTYPES.get(embedding.dtype, "float32") if embedding else "float32"
