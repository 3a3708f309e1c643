"""Kernels translated for a GPU that is not at hand, and what the machine code says about itself."""

import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from moe_runtime.kernels.triton.launch import Call


@dataclass(frozen=True)
class Target:
    """A GPU's architecture. shared: bytes of shared memory that a program can have. tensor: its product instruction."""

    name: str
    gpu: GPUTarget
    shared: int
    tensor: str


TARGETS = {
    "sm_80": Target("sm_80", GPUTarget("cuda", 80, 32), 163 * 1024, "mma.sync"),
    "sm_90": Target("sm_90", GPUTarget("cuda", 90, 32), 227 * 1024, "wgmma.mma_async"),
    "sm_100": Target("sm_100", GPUTarget("cuda", 100, 32), 227 * 1024, "tcgen05.mma"),
    "gfx942": Target("gfx942", GPUTarget("hip", "gfx942", 64), 64 * 1024, "v_mfma"),
}

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """spilled: bytes a thread keeps in memory, where a kernel without arrays has only what found no register.

    instructions: how often which product occurs.
    """

    registers: int
    spilled: int
    shared: int
    instructions: Mapping[str, int]
    seconds: float
    assembly: Mapping[str, Any]

    def uses(self, instruction: str) -> bool:
        return any(name.startswith(instruction) for name in self.instructions)


def compile_call(call: Call, target: Target) -> Build:
    """Compile what `call` would launch there; its tensors may be on the meta device."""
    constants = dict(call.constants)
    if target.gpu.backend == "hip" and "PRECISION" in constants:
        constants["PRECISION"] = "ieee"
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    unspecialised = set(call.kernel.do_not_specialize or ())
    for index, (name, arg) in enumerate(zip(call.kernel.arg_names, call.args, strict=False)):
        if isinstance(arg, Tensor):
            signature[name] = f"*{_TYPES[arg.dtype]}"
        elif isinstance(arg, float):
            signature[name] = "fp32"
        elif arg == 1 and name not in unspecialised:
            signature[name], constants[name] = "constexpr", 1
            continue
        else:
            signature[name] = "i32" if arg < 2**31 else "i64"
        if isinstance(arg, Tensor) or (isinstance(arg, int) and arg % 16 == 0 and name not in unspecialised):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(call.constants, "constexpr")
    source = ASTSource(call.kernel, signature, constants, attributes)
    begin = time.perf_counter()
    compiled = triton.compile(source, target=target.gpu, options=call.options(target.name))
    return _build(compiled, target, time.perf_counter() - begin)


def _build(compiled: CompiledKernel, target: Target, seconds: float) -> Build:
    assembly, shared = compiled.asm, int(compiled.metadata.shared)
    if target.gpu.backend == "hip":
        text = assembly["amdgcn"]
        numbers = {
            key: int(value) for key, value in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text)
        }
        registers, spilled = numbers["vgpr_count"], numbers["private_segment_fixed_size"]
        return Build(registers, spilled, shared, _count(text, r"v_s?mfma[a-z]*_\w+"), seconds, assembly)
    registers, stack = _resources(assembly["cubin"])
    pattern = r"(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[.\w:]*"
    return Build(registers, stack, shared, _count(assembly["ptx"], pattern), seconds, assembly)


def _count(text: str, pattern: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in re.findall(pattern, text):
        found[name] = found.get(name, 0) + 1
    return found


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of memory) of a thread."""
    output = _nvidia_tool("cuobjdump", "-res-usage", cubin)
    numbers = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", output)
    assert numbers is not None, output
    return int(numbers[1]), int(numbers[2]) + int(numbers[3])


def machine_code(build: Build) -> str:
    """The disassembled program."""
    return (
        build.assembly["amdgcn"]
        if "amdgcn" in build.assembly
        else _nvidia_tool("cuobjdump", "-sass", build.assembly["cubin"])
    )


def _nvidia_tool(name: str, option: str, cubin: bytes) -> str:
    """Output of a tool that comes with Triton, which reads files only."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
