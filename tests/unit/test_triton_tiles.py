"""Which tile is chosen: the rule, tuned tables, and the tuner, with a clock of the test's own."""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from moe_runtime.kernels.triton import tiles, tune
from moe_runtime.kernels.triton.tiles import BUCKETS, Product, Tile, choose_tile, default_tile, load_table, save_table
from moe_runtime.quant.formats import FORMATS

PRODUCT = Product(FORMATS["w8a16"], "gate_up", 8, 1024, 512)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tiles, "TABLES", tmp_path)
    load_table.cache_clear()
    return tmp_path


def test_block_m_is_near_twice_the_mean_rows() -> None:
    found = {mean: default_tile(PRODUCT, mean, "sm_90").block_m for mean in (1, 8, 9, 16, 32, 64, 65, 1000)}
    assert found == {1: 16, 8: 16, 9: 32, 16: 32, 32: 64, 64: 64, 65: 128, 1000: 128}


def test_a_tuned_tile_wins_where_there_is_one(tables: Path) -> None:
    tuned = Tile(32, 64, 128, 4, 5, persistent=True)
    save_table(tables / "sm_90.json", {PRODUCT.key: {"4": tuned}})
    load_table.cache_clear()
    assert choose_tile(PRODUCT, 8 * 3, "sm_90") == tuned
    assert choose_tile(PRODUCT, 8 * 3, "sm_90", table=False) == default_tile(PRODUCT, 3, "sm_90")
    assert choose_tile(PRODUCT, 8 * 5, "sm_90") == default_tile(PRODUCT, 5, "sm_90")
    assert choose_tile(replace(PRODUCT, n=2048), 8 * 3, "sm_90") == default_tile(PRODUCT, 3, "sm_90")
    assert choose_tile(PRODUCT, 8 * 3, "sm_80") == default_tile(PRODUCT, 3, "sm_80")


@pytest.mark.parametrize("text", ["[1]", '{"x": {"4": {"block_m": 1}}}', '{"x": 3}', "{"])
def test_what_is_not_a_table_is_refused_by_name(tables: Path, text: str) -> None:
    (tables / "sm_90.json").write_text(text)
    with pytest.raises(ValueError, match=r"sm_90\.json is not a table of tiles"):
        load_table("sm_90")


def seconds_of(best: Tile, mean: int) -> tune.Time:
    """The further from `best` (with BLOCK_M for this number of rows), the slower; five stages do not fit."""

    def seconds(tile: Tile) -> float:
        if tile.stages == 5:
            raise OutOfResources(1, 0, "shared memory")
        wanted, found = asdict(replace(best, block_m=16 if mean < 16 else 128)), asdict(tile)
        return mean * (1.0 + sum(wanted[key] != found[key] for key in wanted))

    return seconds


def test_the_tuner_finds_the_fastest_with_one_block_k(tables: Path) -> None:
    best = Tile(16, 128, 64, 8, 3, persistent=True)
    entry = tune.tune(PRODUCT, "sm_90", lambda mean: seconds_of(best, mean), time.monotonic() + 60)
    assert list(entry) == [str(bucket) for bucket in BUCKETS]
    assert entry["1"] == best and entry["1024"] == replace(best, block_m=128)
    assert {tile.block_k for tile in entry.values()} == {64}
    save_table(tables / "sm_90.json", {PRODUCT.key: entry})
    load_table.cache_clear()
    assert load_table("sm_90")[PRODUCT.key] == entry
    assert json.loads((tables / "sm_90.json").read_text())[PRODUCT.key]["1"]["persistent"] is True


def test_the_second_product_keeps_the_first_ones_block_m() -> None:
    best = Tile(16, 64, 64, 4, 2)
    settled = {str(bucket): 32 for bucket in BUCKETS}
    entry = tune.tune(PRODUCT, "sm_90", lambda mean: seconds_of(best, mean), time.monotonic() + 60, settled)
    assert {tile.block_m for tile in entry.values()} == {32}


def test_without_time_nothing_is_tuned() -> None:
    assert tune.tune(PRODUCT, "sm_90", lambda mean: seconds_of(Tile(16, 64, 64, 4, 2), mean), 0.0) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--linear 64x32", "there is no GPU here"),
        ("--linear 64-32", "invalid matrix value: '64-32'"),
        ("--experts 8 --hidden 64", "expected --experts, --hidden, --intermediate and --picks together"),
        ("", "or --linear"),
    ],
)
def test_the_command_says_what_is_missing(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["tune", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        tune.main()
    assert message in capsys.readouterr().err
