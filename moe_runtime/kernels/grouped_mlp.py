"""The experts' MLP for unquantized weights: each token through its experts, on the CPU or any torch device.

Legend: T tokens, K picks of a token, H hidden, N experts in a bank, I intermediate, R rows (picks that are here),
sorted by expert.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ExpertBank:
    """Same-sized experts of one layer, stacked and contiguous: gate rows then up rows, and down."""

    gate_up_N2IH: Tensor
    down_NHI: Tensor

    def __post_init__(self) -> None:
        experts, rows, hidden = self.gate_up_N2IH.shape
        if self.down_NHI.shape != (experts, hidden, rows // 2):
            raise ValueError(
                f"gate_up has shape {list(self.gate_up_N2IH.shape)}, so down must have {[experts, hidden, rows // 2]}, "
                f"not {list(self.down_NHI.shape)}"
            )

    @property
    def nbytes(self) -> int:
        return self.gate_up_N2IH.nbytes + self.down_NHI.nbytes


def grouped_mlp(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, bank: ExpertBank) -> Tensor:
    """Sum over k of weights[t, k] * down(silu(gate(x)) * up(x)) by expert slots[t, k] of the bank, [T, H] in x's dtype.

    slots_TK: integers, indices into the bank, -1 for a pick that is not here. A token's terms are added in ascending
    order of expert, whatever else is in the batch.
    """
    order_R, counts = _rows_by_expert(slots_TK, len(bank.gate_up_N2IH))
    token_R = order_R // slots_TK.shape[1]
    gate_up_R2I = _per_expert(x_TH[token_R], counts, bank.gate_up_N2IH)
    gate_RI, up_RI = gate_up_R2I.chunk(2, dim=-1)
    out_RH = _per_expert(F.silu(gate_RI) * up_RI, counts, bank.down_NHI)
    out_RH *= weights_TK.flatten()[order_R, None].to(out_RH.dtype)
    return torch.zeros_like(x_TH).index_add_(0, token_R, out_RH)


def _rows_by_expert(slots_TK: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """(flat positions in slots_TK sorted by expert, tokens in order; rows of each expert), without the picks of -1."""
    flat = slots_TK.flatten().long() + 1
    absent, *counts = torch.bincount(flat, minlength=experts + 1).tolist()
    assert len(counts) == experts, f"slot {len(counts) - 1} of a bank of {experts}"
    return flat.argsort(stable=True)[absent:], counts


def _per_expert(x_RC: Tensor, counts: list[int], weights_NDC: Tensor) -> Tensor:
    out_RD = x_RC.new_empty(len(x_RC), weights_NDC.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            torch.mm(x_RC[rows], weights_NDC[expert].T, out=out_RD[rows])
            start += count
    return out_RD


def grouped_mlp_reference(x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor, bank: ExpertBank) -> Tensor:
    """grouped_mlp one token and one pick at a time, for tests."""
    y_TH = torch.zeros_like(x_TH)
    for token, slots_K in enumerate(slots_TK.tolist()):
        for pick, slot in enumerate(slots_K):
            if slot >= 0:
                gate_I, up_I = (bank.gate_up_N2IH[slot] @ x_TH[token]).chunk(2)
                out_H = bank.down_NHI[slot] @ (F.silu(gate_I) * up_I)
                y_TH[token] += out_H * weights_TK[token, pick].to(out_H.dtype)
    return y_TH
