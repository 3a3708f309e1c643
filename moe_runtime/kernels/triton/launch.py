"""Starting a kernel: on a GPU, under Triton's interpreter on the CPU, or not at all where tensors are only shapes."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# Triton reads the variable when a kernel is defined, so it is settled by the time this module is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
}


@dataclass(frozen=True)
class Call:
    """One kernel launch: tensors and numbers in the kernel's order, constants that it is specialised for, options."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 1

    def __call__(self) -> None:
        """Launch it, unless the grid is empty or the tensors are fake ones, which have shapes but no numbers."""
        if 0 in self.grid or any(isinstance(arg, FakeTensor) for arg in self.args):
            return
        device = next(arg.device for arg in self.args if isinstance(arg, Tensor))
        options = {} if INTERPRETED else self.options(architecture(device))
        self.kernel[self.grid](*self.args, **self.constants, **options)

    def options(self, architecture: str) -> dict[str, int]:
        """What the compiler is told for this architecture."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if architecture.startswith("gfx"):
            # One instruction shape for every tile, so that a row's result is the same in all of them.
            options["matrix_instr_nonkdim"] = 16
        elif architecture.startswith("sm_1"):
            # Otherwise the assembler spills a few registers in the hope of more programs at once.
            options["maxnreg"] = 255
        return options


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type in which a kernel multiplies numbers of this dtype: the same, but the interpreter's bf16 is float32.

    numpy has no bfloat16, and the interpreter would multiply its bit patterns.
    """
    return tl.float32 if INTERPRETED and dtype is torch.bfloat16 else _TRITON_TYPES[dtype]


def dot_precision() -> str:
    """How float32 products are made: near full precision on NVIDIA's tensor cores, exactly elsewhere."""
    return "ieee" if INTERPRETED or torch.version.hip else "tf32x3"


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one for the interpreter, which runs programs in turn."""
    return torch.cuda.get_device_properties(device).multi_processor_count if _gpu(device) else 1


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, ...; `interpreter` without a GPU. Names a tuning table."""
    if not _gpu(device):
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return int(triton.next_power_of_2(number))
