"""The texts that come with the project: what is measured on, and what is calibrated with."""

from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moe_runtime.errors import ConfigError

_TOKENS = {"prose": 512, "calibration": 1024}


def text_tokens(model_dir: Path, text: Literal["prose", "calibration"]) -> Tensor:
    """The first tokens [T] of a text in a checkpoint's own tokens. Raises ConfigError where it has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        fault = f"{model_dir} has no tokenizer that transformers can read"
        raise ConfigError(f"{fault} (--no-calibrate --no-perplexity need none): {error}") from error
    words = resources.files("moe_runtime.quant.data").joinpath(f"{text}.txt").read_text(encoding="utf-8")
    return torch.tensor(tokenizer(words)["input_ids"][: _TOKENS[text]])
