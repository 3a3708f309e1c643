"""From what a user calls a model to a directory on this machine: a path, or an id through Hugging Face's cache."""

from pathlib import Path

from moe_runtime.errors import ConfigError
from moe_runtime.models.tensor_table import weight_files

# What serving needs; other formats of the same weights would only fill the disk.
FILE_PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.txt", "*.model"]


def resolve_model(path_or_id: str) -> Path:
    """A local directory as it is, else the snapshot of a model id: from the cache when it is there, else downloaded.

    Raises ConfigError that says why when neither can be had (no such path or id, no network, HF_HUB_OFFLINE).
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model {path_or_id} is a file: expected a checkpoint's directory or a model id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = _cached(path_or_id)
        return cached or Path(snapshot_download(path_or_id, allow_patterns=FILE_PATTERNS))
    except HFValidationError:
        raise ConfigError(f"model {path_or_id} is neither an existing directory nor a model id (owner/name)") from None
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {path_or_id} is no directory here, not in Hugging Face's cache, and cannot be downloaded: "
            f"{_first_line(error)}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"model {path_or_id} is not here and its download failed: {_first_line(error)}") from error


def _cached(model_id: str) -> Path | None:
    """The cached snapshot if it holds the config and every shard; a broken-off download is no snapshot."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(model_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    whole = all(file.exists() for file in [snapshot / "config.json", *weight_files(snapshot)])
    return snapshot if whole else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
