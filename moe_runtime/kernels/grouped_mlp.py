"""The experts' MLP for unquantized weights: each token through its experts, on the CPU or any torch device.

Legend: T tokens, K picks of a token, H hidden, N experts in a bank, I intermediate, R rows (the picks that are here,
sorted by expert), C inputs and D outputs of a product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.linear import linear, pack
from moe_runtime.kernels.workers import Workers

# Reading an expert's weights takes about as long as computing this many rows with them.
_ROWS_OF_A_READ = 16


@dataclass(frozen=True)
class ExpertBank:
    """Same-sized experts of one layer: gate rows then up rows [N, 2I, H], and down [N, H, I].

    Either stacked tensors, or after `packed` one packed tensor per expert.
    """

    gate_up_N2IH: Tensor | tuple[Tensor, ...]
    down_NHI: Tensor | tuple[Tensor, ...]

    def __post_init__(self) -> None:
        rows, hidden = self.gate_up_N2IH[0].shape
        found, expected = (len(self.down_NHI), *self.down_NHI[0].shape), (len(self.gate_up_N2IH), hidden, rows // 2)
        if found != expected:
            raise ValueError(f"down has shape {list(found)}: gate_up asks for {list(expected)}")

    def packed(self) -> "ExpertBank":
        """The same experts in the layout that is fastest on this device; the stacked tensors can then be let go."""
        return ExpertBank(
            tuple(pack(self.gate_up_N2IH[expert]) for expert in range(len(self.gate_up_N2IH))),
            tuple(pack(self.down_NHI[expert]) for expert in range(len(self.down_NHI))),
        )

    @property
    def nbytes(self) -> int:
        return sum(_bytes(stack) for stack in (self.gate_up_N2IH, self.down_NHI))


def _bytes(stack: Tensor | Sequence[Tensor]) -> int:
    return len(stack) * stack[0].numel() * stack[0].element_size()


def grouped_mlp(
    x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, bank: ExpertBank, workers: Workers | None = None
) -> Tensor:
    """Sum over k of weights[t, k] * down(silu(gate(x)) * up(x)) by expert slots[t, k] of the bank, [T, H] in x's dtype.

    slots_TK: integers, indices into the bank, -1 for a pick that is not here. A token's terms are added in ascending
    order of expert, whatever else is in the batch; with a packed bank each term is also the same in any batch.
    """
    return run(x_TH, slots_TK, weights_TK, bank.gate_up_N2IH, bank.down_NHI, workers)


def run(
    x_TH: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    gate_up_N2IH: Tensor | Sequence[Tensor],
    down_NHI: Tensor | Sequence[Tensor],
    workers: Workers | None,
) -> Tensor:
    """`grouped_mlp` of experts that are not in a bank of this module."""
    order_R, counts_N = _rows_by_expert(slots_TK, len(gate_up_N2IH))
    token_R = order_R // slots_TK.shape[1]
    y_TH = torch.zeros_like(x_TH)
    if not len(token_R):
        return y_TH
    shares = _shares(counts_N, workers.threads if workers else 1)
    x_RH, out_RH = x_TH[token_R], torch.empty(len(token_R), x_TH.shape[1], dtype=x_TH.dtype, device=x_TH.device)
    tasks = [partial(_run_experts, x_RH, counts_N, gate_up_N2IH, down_NHI, share, out_RH) for share in shares]
    if workers:
        workers.run(tasks)
    else:
        tasks[0]()
    out_RH *= weights_TK.flatten()[order_R, None].to(out_RH.dtype)
    return y_TH.index_add_(0, token_R, out_RH)


def _rows_by_expert(slots_TK: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """(positions in flattened slots_TK by expert, tokens in order; each expert's number of them), -1 left out."""
    flat = slots_TK.flatten().long() + 1
    absent, *counts_N = torch.bincount(flat, minlength=experts + 1).tolist()
    assert len(counts_N) == experts, f"slot {len(counts_N) - 1} of a bank of {experts}"
    return flat.argsort(stable=True)[absent:], counts_N


def _shares(counts_N: list[int], threads: int) -> list[range]:
    """Runs of experts of about equal cost, at most one a thread: an expert costs its weights' bytes and its rows."""
    cost_N = [count + _ROWS_OF_A_READ if count else 0 for count in counts_N]
    shares: list[range] = []
    total, first, spent = sum(cost_N), 0, 0
    for expert, cost in enumerate(cost_N):
        spent += cost
        if spent * threads >= total * (len(shares) + 1) and len(shares) < threads - 1:
            shares.append(range(first, expert + 1))
            first = expert + 1
    shares.append(range(first, len(counts_N)))
    return [share for share in shares if any(counts_N[expert] for expert in share)]


def _run_experts(
    x_RH: Tensor,
    counts_N: list[int],
    gate_up_N2IH: Tensor | Sequence[Tensor],
    down_NHI: Tensor | Sequence[Tensor],
    experts: range,
    out_RH: Tensor,
) -> None:
    """The rows of a run of experts, unweighted, into out_RH."""
    first = sum(counts_N[: experts.start])
    present = [expert for expert in experts if counts_N[expert]]
    sizes_B = [counts_N[expert] for expert in present]
    x_RH = x_RH[first : first + sum(sizes_B)]
    hidden = [linear(x_BH, gate_up_N2IH[e]) for e, x_BH in zip(present, x_RH.split(sizes_B), strict=True)]
    gate_RI, up_RI = torch.cat(hidden).chunk(2, dim=-1)
    acts = F.silu(gate_RI).mul_(up_RI).split(sizes_B)
    torch.cat(
        [linear(a_BI, down_NHI[e]) for e, a_BI in zip(present, acts, strict=True)],
        out=out_RH[first : first + sum(sizes_B)],
    )


def grouped_mlp_reference(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, bank: ExpertBank) -> Tensor:
    """grouped_mlp one token and one pick at a time, for tests."""
    y_TH = torch.zeros_like(x_TH)
    for token, slots_K in enumerate(slots_TK.tolist()):
        for pick, slot in enumerate(slots_K):
            if slot >= 0:
                gate_I, up_I = (_plain(bank.gate_up_N2IH[slot]) @ x_TH[token]).chunk(2)
                out_H = _plain(bank.down_NHI[slot]) @ (F.silu(gate_I) * up_I)
                y_TH[token] += out_H * weights_TK[token, pick].to(out_H.dtype)
    return y_TH


def _plain(weight: Tensor) -> Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight
