"""Which tile a product uses: from the tuned table of this architecture, or else by a rule.

What decides a row's result (BLOCK_K and the instruction, which follows from BLOCK_N and the warps) depends on the
weights alone; the number of rows only chooses BLOCK_M, the depth of prefetching and the grid.

Legend: M rows, N weight rows (outputs), K columns (inputs).
"""

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moe_runtime.kernels.triton.launch import power_of_two
from moe_runtime.quant.formats import Format

TABLES = Path(__file__).parent / "tables"
# Bytes of shared memory for tiles in flight, with something left for the rest; and how many tiles pay there.
_SHARED_AND_STAGES = {"sm_80": (150 * 1024, 3), "sm_90": (200 * 1024, 4), "sm_100": (200 * 1024, 4)}
_LEAST = (60 * 1024, 2)
# Rows an expert gets on average; a table has an entry for each, and the next larger one is used.
BUCKETS = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Tile:
    """persistent: as many programs as multiprocessors, each taking tiles in turn; else a program for each tile."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    persistent: bool = False


@dataclass(frozen=True)
class Product:
    """What a table is looked up by. role: gate_up (N outputs of each), down, or linear."""

    format: Format
    role: str
    experts: int
    n: int
    k: int

    @property
    def key(self) -> str:
        return f"{self.format.name} {self.role} {self.experts}x{self.n}x{self.k}"


def choose_tile(product: Product, rows: int, architecture: str, table: bool = True) -> Tile:
    """The tile for rows in all (picks, or tokens of a linear layer). `table` off: the rule only."""
    mean = max(1, -(-rows // product.experts))
    bucket = bucket_of(mean)
    tuned = load_table(architecture).get(product.key, {}).get(str(bucket)) if table else None
    return tuned or default_tile(product, mean, architecture)


def bucket_of(mean_rows: int) -> int:
    return next((bucket for bucket in BUCKETS if mean_rows <= bucket), BUCKETS[-1])


def default_tile(product: Product, mean_rows: int, architecture: str) -> Tile:
    """BLOCK_M near twice the mean rows from 16 to 64, and 128 where products and not bytes take the time."""
    if architecture == "interpreter":
        return Tile(16, 32, 32, 4, 1)
    form, doubled = product.format, product.role == "gate_up"
    block_m, block_k = min(_most_rows(form, architecture), max(16, power_of_two(2 * mean_rows))), default_block_k(form)
    if block_m > 64 and mean_rows <= 64:
        block_m = 64
    block_n = 64
    if architecture == "sm_90" and block_m == 128 and not doubled and form.activations == "float":
        block_n = 128
    elif architecture == "sm_100" and block_m == 64 and not doubled:
        # The instruction's own size, and the registers of eight warps.
        block_n = 128
    elif architecture == "sm_80" and block_m > 32 and doubled and form.group[1]:
        # Sums of a step beside those of all steps, twice: too much for 64 rows of weights.
        block_n = 32
    warps = 8 if block_m * block_n * (2 if doubled else 1) > 64 * 64 else 4
    return Tile(block_m, block_n, block_k, warps, _stages(product, block_m, block_n, block_k, architecture))


def _most_rows(form: Format, architecture: str) -> int:
    """What the registers hold: full precision takes three products, and groups a second sum or scaled weights.

    sm_100 keeps sums in memory of their own, but not those of int8 products, which Triton makes the older way.
    """
    if form.dtype is torch.float32:
        return 32
    return 64 if form.group[1] or (form.activations == "int8" and architecture == "sm_100") else 128


def default_block_k(form: Format) -> int:
    """128 columns; 64 where groups are not larger, which costs registers; of plain weights 128 bytes."""
    if not form.quantized:
        return 128 // form.dtype.itemsize
    return 64 if form.group[1] in (32, 64) else 128


def _stages(product: Product, block_m: int, block_n: int, block_k: int, architecture: str) -> int:
    """As many tiles in flight as shared memory holds, at most the architecture's number."""
    form = product.format
    x_bytes = 1 if form.activations == "int8" else max(2, form.dtype.itemsize if not form.quantized else 2)
    weights = block_n * (2 if product.role == "gate_up" else 1)
    step = block_k * (block_m * x_bytes + weights * form.dtype.itemsize // form.packed)
    shared, most = _SHARED_AND_STAGES.get(architecture, _LEAST)
    return max(2, min(most, shared // step))


@functools.cache
def load_table(architecture: str) -> dict[str, dict[str, Tile]]:
    """Tuned tiles by product and bucket; empty where nobody has tuned. Raises ValueError for what is not a table."""
    path = TABLES / f"{architecture}.json"
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {key: {rows: Tile(**tile) for rows, tile in of.items()} for key, of in entries.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is not a table of tiles: {error}") from None


def save_table(path: Path, table: dict[str, dict[str, Tile]]) -> None:
    plain = {key: {rows: asdict(tile) for rows, tile in of.items()} for key, of in sorted(table.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
