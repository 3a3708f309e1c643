"""The contract of every expert kernel: a bank of same-sized experts of one layer, kept as its back end likes them.

Back ends: see kernels/registry.py. Experts come in and go out one at a time in the canonical form of
moe_runtime.quant, so that loading, live moves and checksums are the same for all of them, and whatever a back end
derives (repacked values, fused scales) is derived anew where an expert arrives and can never be stale.

Legend: T tokens, K picks of a token, H hidden, I intermediate.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from moe_runtime.quant.formats import Format
from moe_runtime.quant.tensor import QuantizedTensor

Weight = Tensor | QuantizedTensor


@dataclass(frozen=True)
class BankShape:
    """How many experts, how large, and in which format they are stored."""

    experts: int
    hidden: int
    intermediate: int
    format: Format

    @property
    def nbytes(self) -> int:
        """What the format itself takes for all experts."""
        gate_up = self.format.nbytes(2 * self.intermediate, self.hidden)
        return self.experts * (gate_up + self.format.nbytes(self.hidden, self.intermediate))


class ExpertBank(ABC):
    """Computes with its experts; `shape` says what they are."""

    shape: BankShape

    @abstractmethod
    def store(self, position: int, gate_up_2IH: Weight, down_HI: Weight) -> None:
        """Put one expert at a position, over what was there. Raises ValueError where shape or format do not fit."""

    @abstractmethod
    def fetch(self, position: int) -> tuple[Weight, Weight]:
        """A copy of one expert (gate_up [2I, H], down [H, I]), bit for bit what was stored."""

    @abstractmethod
    def __call__(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Sum over k of weights[t, k] * down(silu(gate(x)) * up(x)) by the expert at slots[t, k], [T, H] in x's dtype.

        slots_TK: integer positions, -1 for a pick that is not here. x may have no rows. A token's result does not
        depend on the other tokens, and its terms are added in ascending order of position.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the experts really take here."""
