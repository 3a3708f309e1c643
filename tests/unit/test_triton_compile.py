"""Every kind of kernel translated for four GPUs that are not here: no register spills, shared memory that fits, and the
tensor-core instruction of each. `make kernels-report` does all formats at all sizes; here each occurs somewhere.
"""

import os
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch

from moe_runtime.quant.formats import FORMATS

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter defines kernels that cannot be compiled", allow_module_level=True)

from moe_runtime.kernels.triton.catalogue import (
    MODELS,
    Case,
    attention_cases,
    expected_instruction,
    expert_cases,
    linear_case,
    routing_cases,
)
from moe_runtime.kernels.triton.compile import TARGETS, Target, compile_call
from moe_runtime.kernels.triton.tiles import Tile

# One of each way to decode and to scale; the others differ in a constant.
KINDS = ("float32", "bfloat16", "w8a16", "w8a8", "w4a16-g32-zp", "w4a16-g128", "fp8-block", "mxfp4")
DECODE, PREFILL = 16, 4096


@pytest.fixture(autouse=True)
def keep_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path("build/triton").absolute()))


def cover(target: str) -> Iterator[Case]:
    """Each kind in both products, alternating models and regimes."""
    turns = cycle([(model, tokens) for model in MODELS for tokens in (DECODE, PREFILL)])
    for offset, name in enumerate(KINDS):
        for index, (model, tokens) in zip(range(2), turns, strict=False):
            products = [case for case in expert_cases(MODELS[model], FORMATS[name], tokens, target) if case.tile]
            yield products[(index + offset) % 2]
    yield next(iter(expert_cases(MODELS["gpt-oss-120b"], FORMATS["w8a8"], DECODE, target)))
    yield list(routing_cases(MODELS["DeepSeek-V3"], PREFILL))[1]
    yield linear_case(9216, 4096, FORMATS["w4a16-g64-zp"], DECODE, target)
    yield from (case for case in attention_cases(MODELS["Qwen3-235B"], "bfloat16", target))
    yield next(iter(attention_cases(MODELS["gpt-oss-120b"], "fp8", target)))


def check(case: Case, target: Target) -> None:
    build = compile_call(case.call, target)
    place = f"{case.kernel} {case.format} {case.tile} on {target.name}"
    assert not build.spilled, f"{place}: {build.spilled} bytes of spilled registers"
    assert build.shared <= target.shared, f"{place}: {build.shared} bytes of shared memory, of {target.shared}"
    expected = expected_instruction(case, target)
    assert expected is None or build.uses(expected), f"{place}: no {expected} but {sorted(build.instructions)}"


@pytest.mark.parametrize("target", TARGETS)
def test_cover(target: str) -> None:
    for case in cover(target):
        check(case, TARGETS[target])


@pytest.mark.parametrize("name", ["w8a16", "w4a16-g32-zp", "fp8-g128", "mxfp4"])
def test_other_activations(name: str) -> None:
    """float16 is decoded by other bit patterns, and float32 takes the bfloat16 ones."""
    for dtype in (torch.float16, torch.float32):
        cases = expert_cases(MODELS["Qwen3-235B"], FORMATS[name], DECODE, "sm_90", activations=dtype)
        for case in cases:
            assert compile_call(case.call, TARGETS["sm_90"]).uses("wgmma")


def test_spills_and_missing_instructions_are_seen() -> None:
    """A tile that is far too large for the registers, and products that no tensor core makes."""
    tile = Tile(128, 128, 64, 4, 2)
    case = next(iter(expert_cases(MODELS["Mixtral-8x7B"], FORMATS["bfloat16"], DECODE, "sm_90", (tile, tile))))
    build = compile_call(case.call, TARGETS["sm_90"])
    assert build.spilled and build.uses("wgmma") and not build.uses("tcgen05")
    routing = next(iter(routing_cases(MODELS["Mixtral-8x7B"], DECODE)))
    assert not compile_call(routing.call, TARGETS["sm_90"]).instructions


def test_what_decides_a_row_does_not_depend_on_the_number_of_rows() -> None:
    """BLOCK_K, and that the instruction is of the same kind."""
    for target in TARGETS:
        for name in FORMATS:
            for model in MODELS.values():
                few, many = (
                    [case.tile for case in expert_cases(model, FORMATS[name], tokens, target) if case.tile]
                    for tokens in (1, PREFILL)
                )
                assert [tile.block_k for tile in few] == [tile.block_k for tile in many]
                assert target == "sm_80" or all(tile.block_n >= 64 for tile in few + many)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("target", TARGETS)
def test_everything(target: str, model: str) -> None:
    shape = MODELS[model]
    for tokens in (DECODE, PREFILL):
        for form in FORMATS.values():
            for case in expert_cases(shape, form, tokens, target):
                check(case, TARGETS[target])
