"""Times the kernels that decide what a token costs on a CPU, beside what the machine can do at best.

    python benchmarks/bench_kernels.py [--shapes large demo] [--formats ...] [--tokens ...] [--threads 2]

Experts of one layer, in one call, with random routing: milliseconds, the weights' bytes a second against the bandwidth
at which all threads read more bytes than caches hold, and multiply-adds a second against the float and int8 peaks.
Candidates beside them: the same kernels with one call a product (unfused), torch's packed int8 and int4 products, and
oneDNN's. The best of many turns counts, since other load only slows.

Writes build/bench/kernels.json. Legend: T tokens, K picks, H hidden, I intermediate, N outputs.
"""

import argparse
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.bench.report import Row, print_table, write_report
from moe_runtime.kernels.bank import BankShape, ExpertBank, Weight
from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native import records
from moe_runtime.kernels.native_bank import NativeBank
from moe_runtime.kernels.native_linear import NativeLinear
from moe_runtime.kernels.onednn_bank import OneDnnBank
from moe_runtime.kernels.workers import Workers
from moe_runtime.quant.formats import FORMATS, Format
from moe_runtime.quant.quantize import quantize

FORMATS_SHOWN = ("w8a16", "w4a16-g64", "w4a16-g32-zp", "mxfp4", "w8a8", "fp8", "fp8-block", "bfloat16", "float32")
TOKENS = (1, 2, 4, 16, 64, 512)
READ_BYTES, READ_PIECE = 512 << 20, 64 << 20  # a piece a turn, so that none is in a cache when it is read again
LAYERS_BYTES = 160 << 20  # of as many layers as it takes, for one alone may fit a cache
SECONDS = 0.4  # spent on each figure
ROUTINGS = 8
UNFUSED = ("w8a16", "w4a16-g64", "w8a8")  # for which a call a product is shown as well
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    name: str
    hidden: int
    intermediate: int
    experts: int
    picks: int
    tokens: Sequence[int]

    def bank_shape(self, form: Format) -> BankShape:
        return BankShape(self.experts, self.hidden, self.intermediate, form)

    @property
    def title(self) -> str:
        return f"hidden {self.hidden}, {self.experts} experts of {self.intermediate}, top-{self.picks}"


LAYERS = {
    "large": Layer("large", 2048, 768, 64, 8, TOKENS),
    "demo": Layer("demo", 576, 384, 32, 4, (1, 16)),
}


class Machine:
    """Ceilings, measured again and again; the highest of each counts."""

    def __init__(self, threads: int) -> None:
        found = native.library()
        assert found is not None, "the extension is not built: pip install -e ."
        self._library, self._threads, self._isa = found, threads, native.usual_isa()
        self._memory = records.Memory(READ_BYTES)
        ctypes.memset(self._memory.address, 1, READ_BYTES)
        self.read = self.floats = self.bytes = 0.0
        for _ in range(5):
            self.measure()

    def measure(self) -> None:
        read, peak = self._library.moe_read_bandwidth, self._library.moe_peak
        for start in range(0, READ_BYTES, READ_PIECE):
            self.read = max(self.read, read(self._memory.address + start, READ_PIECE, self._threads, self._isa))
        for _ in range(4):
            self.floats = max(self.floats, peak(self._isa, b"float", self._threads, 4000))
            self.bytes = max(self.bytes, peak(self._isa, b"bytes", self._threads, 4000))

    def rows(self) -> list[Row]:
        name = f"{native.here()[0]}, {self._threads} threads"
        return [
            Row(name, "read bandwidth", self.read / 1e9, "GB/s"),
            Row(name, "float32 peak", self.floats / 1e9, "GF/s"),
            Row(name, "int8 peak", self.bytes / 1e9, "GF/s"),
        ]


@dataclass(frozen=True)
class Candidate:
    """A way to compute a layer's experts. nbytes: of all experts. dtype: of x."""

    name: str
    compute: Experts
    nbytes: int
    dtype: torch.dtype = torch.bfloat16


def random_expert(shape: BankShape) -> tuple[Weight, Weight]:
    def one(rows: int, columns: int) -> Weight:
        plain_NK = torch.randn(rows, columns) * columns**-0.5
        return quantize(plain_NK, shape.format) if shape.format.quantized else plain_NK.to(shape.format.dtype)

    return one(2 * shape.intermediate, shape.hidden), one(shape.hidden, shape.intermediate)


def filled(bank: ExpertBank, expert: tuple[Weight, Weight]) -> ExpertBank:
    """The same numbers in every expert, each in memory of its own."""
    for position in range(bank.shape.experts):
        bank.store(position, *expert)
    return bank


def layers(shape: BankShape, make: Callable[[], Experts]) -> Experts:
    """Several layers' experts in turn, as a model visits them."""
    turns = cycle([make() for _ in range(-(-LAYERS_BYTES // shape.nbytes))])
    return lambda x_TH, slots_TK, weights_TK: next(turns)(x_TH, slots_TK, weights_TK)


def one_by_one(shape: BankShape, make: Callable[[], Sequence[Product]]) -> Experts:
    pairs = [make() for _ in range(shape.experts)]
    return lambda x_TH, slots_TK, weights_TK: grouped(x_TH, slots_TK, weights_TK, pairs)


def grouped(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, pairs: Sequence[Sequence[Product]]) -> Tensor:
    """Rows sorted by expert, two products and a SiLU for each: what a call a layer saves."""
    flat, y_TH = slots_TK.flatten(), torch.zeros(x_TH.shape)
    order_R = flat.argsort(stable=True)
    counts_N = torch.bincount(flat, minlength=len(pairs)).tolist()
    token_R = order_R // slots_TK.shape[1]
    outs = []
    for expert, x_BH in enumerate(x_TH[token_R].split(counts_N)):
        if len(x_BH):
            gate_up, down = pairs[expert]
            gate_BI, up_BI = gate_up(x_BH).chunk(2, dim=-1)
            outs.append(down(F.silu(gate_BI).mul_(up_BI)))
    return y_TH.index_add_(0, token_R, torch.cat(outs).float() * weights_TK.flatten()[order_R, None]).to(x_TH.dtype)


def native_candidates(shape: BankShape, threads: int) -> Iterator[Candidate]:
    form, expert = shape.format, random_expert(shape)
    dtype = torch.float32 if form.name == "float32" else torch.bfloat16
    banks = layers(shape, lambda: filled(NativeBank(shape, threads), expert))
    yield Candidate(f"{form.name}, native", banks, shape.nbytes, dtype)
    del banks
    if form.name in UNFUSED:
        pairs = layers(
            shape, lambda: one_by_one(shape, lambda: [NativeLinear(weight, threads=threads) for weight in expert])
        )
        yield Candidate(f"{form.name}, native, a call a product", pairs, shape.nbytes, dtype)


def onednn_candidates(shape: BankShape, threads: int) -> Iterator[Candidate]:
    if shape.format.name in ("bfloat16", "float32"):
        expert, workers = random_expert(shape), Workers(threads)
        banks = layers(shape, lambda: filled(OneDnnBank(shape, workers), expert))
        yield Candidate(f"{shape.format.name}, oneDNN", banks, shape.nbytes, shape.format.dtype)


def torch_candidates(shape: BankShape) -> Iterator[Candidate]:
    sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
    make = {"w8a16": int8pack, "w4a16-g64": int4pack}.get(shape.format.name)
    if make is not None:
        pairs = layers(shape, lambda: one_by_one(shape, lambda: [make(*size) for size in sizes]))
        yield Candidate(f"{shape.format.name}, torch's {make.__name__}", pairs, shape.nbytes)


def int8pack(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    weight_NK = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    scales_N = torch.rand(rows, dtype=torch.bfloat16) / columns
    return lambda x_TK: torch.ops.aten._weight_int8pack_mm(x_TK, weight_NK, scales_N)


def int4pack(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    codes_NK = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK, 1)
    scales_and_zeros = torch.rand(columns // 64, rows, 2).to(torch.bfloat16) / columns
    return lambda x_TK: torch.ops.aten._weight_int4pack_mm_for_cpu(x_TK, packed, 64, scales_and_zeros)


def best_seconds(call: Callable[[int], object]) -> float:
    best, turn, until = float("inf"), 0, time.perf_counter() + SECONDS
    while turn < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        call(turn)
        best, turn = min(best, time.perf_counter() - start), turn + 1
    return best


def measure(candidate: Candidate, layer: Layer, tokens: int) -> tuple[float, float]:
    """(seconds of a call, experts it hits)."""
    generator = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, layer.hidden, generator=generator).to(candidate.dtype)
    weights_TK = torch.rand(tokens, layer.picks, generator=generator)
    routings = [torch.rand(tokens, layer.experts).topk(layer.picks).indices for _ in range(ROUTINGS)]
    hit = sum(len(slots_TK.unique()) for slots_TK in routings) / ROUTINGS
    return best_seconds(lambda turn: candidate.compute(x_TH, routings[turn % ROUTINGS], weights_TK)), hit


def candidates(layer: Layer, name: str, threads: int) -> Iterator[Candidate]:
    shape = layer.bank_shape(FORMATS[name])
    yield from native_candidates(shape, threads)
    yield from onednn_candidates(shape, threads)
    yield from torch_candidates(shape)


@dataclass(frozen=True)
class Figure:
    layer: Layer
    candidate: str
    tokens: int
    seconds: float
    nbytes: float

    @property
    def operations(self) -> float:
        """A second."""
        layer = self.layer
        return 6 * self.tokens * layer.picks * layer.hidden * layer.intermediate / self.seconds

    def rows(self, machine: Machine) -> list[Row]:
        case = f"{self.layer.name}, {self.tokens} tokens, {self.candidate}"
        ceilings = {"float32 peak": machine.floats} | ({"int8 peak": machine.bytes} if "w8a8" in self.candidate else {})
        read = self.nbytes / self.seconds
        return [
            Row(case, "one layer's experts", self.seconds * 1e3, "ms"),
            Row(case, "weights read", read / 1e9, "GB/s", "read bandwidth", read / machine.read),
            *(
                Row(case, "arithmetic", self.operations / 1e9, "GF/s", name, self.operations / ceiling)
                for name, ceiling in ceilings.items()
            ),
        ]

    def cell(self, machine: Machine) -> str:
        shares = {"read": self.nbytes / self.seconds / machine.read, "float32": self.operations / machine.floats}
        nearer = max(shares, key=lambda name: shares[name])
        return f"{self.seconds * 1e3:.2f} ({shares[nearer]:.0%} {nearer})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS_SHOWN))
    parser.add_argument("--tokens", type=int, nargs="+", help="instead of each shape's own")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    machine, figures = Machine(options.threads), []
    with torch.inference_mode():
        for layer in (LAYERS[name] for name in options.shapes):
            for name in options.formats:
                for candidate in candidates(layer, name, options.threads):
                    for tokens in options.tokens or layer.tokens:
                        seconds, hit = measure(candidate, layer, tokens)
                        read = hit * candidate.nbytes / layer.experts
                        figures.append(Figure(layer, candidate.name, tokens, seconds, read))
                    machine.measure()
                print_layer(layer, figures, machine)
    rows = machine.rows() + [row for figure in figures for row in figure.rows(machine)]
    print_table("ceilings", machine.rows())
    print(write_report("kernels", rows, "python benchmarks/bench_kernels.py"))


def print_layer(layer: Layer, figures: Sequence[Figure], machine: Machine) -> None:
    """A line a candidate: milliseconds, and the ceiling that is nearer with the share of it that was reached."""
    print(f"\n{layer.title}; read {machine.read / 1e9:.1f} GB/s, float32 {machine.floats / 1e9:.0f} GF/s, ", end="")
    print(f"int8 {machine.bytes / 1e9:.0f} GF/s; ms (share of reading or of float32)\n")
    here = [figure for figure in figures if figure.layer is layer]
    columns = sorted({figure.tokens for figure in here})
    print(f"| tokens | {' | '.join(map(str, columns))} |\n|{'---|' * (len(columns) + 1)}")
    for name in dict.fromkeys(figure.candidate for figure in here):
        cells = [figure.cell(machine) for figure in here if figure.candidate == name]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
