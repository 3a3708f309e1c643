"""Calibrated rounding: less error where inputs are correlated, the same format, and the inputs that the model has."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_runtime.models.demo.random_models import write_random_model
from moe_runtime.models.loader import Checkpoint, open_checkpoint
from moe_runtime.models.quantized.calibration import Calibration
from moe_runtime.models.quantized.command import quantize_checkpoint
from moe_runtime.models.reference import reference_logits
from moe_runtime.models.registry import load_spec
from moe_runtime.models.weight_roles import TensorRole
from moe_runtime.quant.calibrated import can_calibrate, error_factor, quantize_calibrated
from moe_runtime.quant.formats import FORMATS
from moe_runtime.quant.quantize import quantize
from moe_runtime.quant.tensor import dequantize

F32 = torch.float32
FOUR_BITS = [name for name, form in FORMATS.items() if can_calibrate(form)]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def opened(model_dir: Path) -> Checkpoint:
    return open_checkpoint(model_dir, load_spec(model_dir))


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("columns", [256, 200])
def test_products_come_nearer(name: str, columns: int) -> None:
    """On inputs of the same kind that it has not seen, by a third at least."""
    mix_KK = normal(1, columns, columns) + 3 * normal(2, columns, 16) @ normal(3, 16, columns)
    seen_TK, unseen_TK = normal(4, 400, columns) @ mix_KK, normal(5, 400, columns) @ mix_KK
    weight_NK, form = normal(6, 96, columns) * 0.02, FORMATS[name]
    calibrated = quantize_calibrated(weight_NK, error_factor(seen_TK), form)
    nearest = quantize(weight_NK, form)
    assert calibrated.format == form and calibrated.shape == nearest.shape

    def error(back_NK: Tensor) -> float:
        return float((unseen_TK @ (back_NK - weight_NK).T).norm())

    assert error(dequantize(calibrated)) < 0.67 * error(dequantize(nearest))
    assert dequantize(calibrated).isfinite().all()


@pytest.mark.parametrize("name", FOUR_BITS)
def test_without_correlation_it_is_rounding_to_nearest(name: str) -> None:
    weight_NK = normal(7, 40, 160)
    calibrated, nearest = (
        quantize_calibrated(weight_NK, torch.eye(160), FORMATS[name]),
        quantize(weight_NK, FORMATS[name]),
    )
    for part, tensor in calibrated.parts.items():
        assert torch.equal(tensor, nearest.parts[part]), part


def test_which_formats() -> None:
    assert set(FOUR_BITS) == {name for name in FORMATS if name.startswith("w4a16") or name == "mxfp4"}
    with pytest.raises(ValueError, match="not finite"):
        quantize_calibrated(torch.full((4, 32), torch.nan), torch.eye(32), FORMATS["mxfp4"])


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoe"])
def test_inputs_are_those_of_the_reference_forward(family: str, tmp_path: Path) -> None:
    write_random_model(family, tmp_path, overrides={"mlp_only_layers": [1]} if family == "qwen2_moe" else {})
    checkpoint, tokens_T = opened(tmp_path), torch.arange(1, 200, 3)
    calibration = Calibration(checkpoint, tokens_T)
    attention = checkpoint.attention_weights(F32, lambda *_: None)
    hit: set[tuple[int, int]] = set()

    def expert(layer: int, number: int):  # type: ignore[no-untyped-def]
        hit.add((layer, number))
        return checkpoint.expert(layer, number, FORMATS["float32"])

    logits_TV = reference_logits(tokens_T, checkpoint.spec, attention, expert)
    for layer, spec in enumerate(checkpoint.spec.layers):
        for part in ("q", "k", "v", "o"):
            assert calibration.factor(TensorRole(part, layer)) is not None
        shared = calibration.factor(TensorRole("gate", layer, 0))
        for number in range(spec.ffn.experts.total):
            assert calibration.factor(TensorRole("up", layer, number)) is shared
            found = calibration.factor(TensorRole("down", layer, number))
            assert (found is not None) == ((layer, number) in hit)
            size = spec.ffn.intermediate_of(number)
            assert found is None or found.shape == (size, size)
    head = calibration.factor(TensorRole("lm_head"))
    assert head is not None
    # The head's inputs give the reference's logits, so that every layer before it was the reference's too.
    inputs_TH = calibration._inputs[TensorRole("lm_head")]
    mine_TV = (
        inputs_TH @ attention.embed_VH.T if checkpoint.spec.tied_embeddings else inputs_TH @ attention.lm_head_VH.T
    )  # type: ignore[union-attr]
    torch.testing.assert_close(mine_TV / checkpoint.spec.logits_divisor, logits_TV, rtol=1e-4, atol=1e-4)


def test_a_calibrated_checkpoint_is_one_like_any_other(tmp_path: Path) -> None:
    write_random_model("mixtral", tmp_path / "plain", overrides={"num_hidden_layers": 2})
    form, attention = FORMATS["w4a16-g32"], FORMATS["w4a16-g64-zp"]
    for calibrate in (True, False):
        report = quantize_checkpoint(
            tmp_path / "plain", tmp_path / f"out{calibrate}", form, attention,
            calibrate=calibrate, measure=True, progress=lambda *_: None,
        )  # fmt: skip
        assert report.calibrated == calibrate
        assert report.perplexity is not None and 0.5 < report.perplexity.after / report.perplexity.before < 2
    left, right = (opened(tmp_path / f"out{calibrate}").expert(1, 0, form) for calibrate in (True, False))
    assert not torch.equal(dequantize(left.gate_up_2IH), dequantize(right.gate_up_2IH))  # type: ignore[arg-type]
    int8 = quantize_checkpoint(
        tmp_path / "plain", tmp_path / "int8", FORMATS["w8a16"], None,
        calibrate=True, measure=False, progress=lambda *_: None,
    )  # fmt: skip
    assert not int8.calibrated
