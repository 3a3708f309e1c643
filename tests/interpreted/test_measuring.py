"""What runs on a GPU only, the tuner's bench and gpu_check's times, with everything but the clock, at tiny sizes."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from moe_runtime.kernels.triton import measure, tune
from moe_runtime.kernels.triton.catalogue import MODELS, ModelShape
from moe_runtime.kernels.triton.tiles import Product, Tile
from moe_runtime.quant.formats import FORMATS
from tests.interpreted.reference import CPU

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
SECONDS = 1e-3


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every measured call is made once."""
    calls: list[int] = []

    def median_seconds(call: Callable[[], object], *_: object, **__: object) -> float:
        call()
        calls.append(1)
        return SECONDS

    for module in (measure, tune):
        monkeypatch.setattr(module, "median_seconds", median_seconds)
    monkeypatch.setattr(measure, "graph_of", lambda call: call)
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(measure, "product_rate", lambda device, dtype: 1e12)
    return calls


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"DECODE": (1, 3), "PREFILL": 20, "CONTEXT": 48}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(MODELS, "tiny", ModelShape(64, 32, 4, 2, (4, 2, 16, 24)))
    yield module


@pytest.mark.parametrize("name", ["bfloat16", "w8a8", "w4a16-g32-zp", "fp8-block", "mxfp4"])
@pytest.mark.parametrize("role", ["gate_up", "down", "linear"])
def test_the_tuners_bench(role: str, name: str, clock: list[int]) -> None:
    experts = 1 if role == "linear" else 4
    bench = tune.Bench(Product(FORMATS[name], role, experts, 48, 64), 1 if role == "linear" else 2, CPU, torch.float32)
    for mean in (1, 4):
        assert bench.timer(mean)(Tile(16, 32, 32, 4, 2)) == SECONDS
    assert len(clock) == 2


def test_times_of_experts(script: ModuleType) -> None:
    for name in ("bfloat16", "w8a8", "w4a16-g64"):
        rows = list(script.time_experts("tiny", FORMATS[name], CPU))
        assert [row.tokens for row in rows] == [1, 3, 20]
        assert all(row.microseconds == pytest.approx(1e3) and 0 < row.share < 1 for row in rows)
    # One token picks two experts of 3 * 64 * 32 weights.
    one = next(script.time_experts("tiny", FORMATS["float16"], CPU))
    assert one.gigabytes_a_second == pytest.approx(2 * 3 * 64 * 32 * 2 / SECONDS / 1e9)
    assert one.teraflops == pytest.approx(2 * 2 * 3 * 64 * 32 / SECONDS / 1e12)


def test_times_of_attention(script: ModuleType) -> None:
    for cache in ("bfloat16", "int8", "fp8"):
        rows = list(script.time_attention("tiny", cache, CPU))
        assert [row.tokens for row in rows] == [1, 3, 20]
        assert [row.kernel.split()[0] for row in rows] == ["decode", "decode", "prefill"]


def test_a_wrong_result_fails_the_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "check_jobs", lambda formats: iter([("sort", "", ""), ("linear", "w8a16", "float16")]))
    out = tmp_path / "gpu_check.json"
    monkeypatch.setattr("sys.argv", ["gpu_check", "--out", str(out)])
    assert script.main() == 0
    assert [one["error"] <= one["limit"] for one in json.loads(out.read_text())["checks"]] == [True, True]
    monkeypatch.setattr(script.selfcheck, "check_linear", lambda *_: 0.1)
    assert script.main() == 1
    monkeypatch.setattr(script.selfcheck, "check_linear", lambda *_: 1 / 0)
    assert script.main() == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
