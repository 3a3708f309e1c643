"""The requests behind a batch's logits, their prepared parameters, and the numbers of all of them as one table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention_nodes.decoding.masks import TokenMask
from attention_nodes.decoding.state import ROW, DecodingState
from attention_nodes.scheduling.request import Request


@dataclass(frozen=True)
class SampledRows:
    """One entry per row of logits; table has dtype ROW."""

    requests: Sequence[Request]
    states: Sequence[DecodingState]
    table: NDArray[np.void]

    @classmethod
    def of(cls, requests: Sequence[Request], vocab: int) -> "SampledRows":
        states = [request.decoding_state(vocab) for request in requests]
        return cls(requests, states, np.frombuffer(b"".join([state.row for state in states]), ROW))

    def column(self, name: str, device: torch.device) -> Tensor:
        """One field of the table, [P]."""
        return torch.from_numpy(self.table[name].copy()).to(device)

    def masks(self) -> list[tuple[int, list[TokenMask]]]:
        """The masks of each row that has any."""
        found = []
        for row, (state, request) in enumerate(zip(self.states, self.requests, strict=True)):
            if masks := [mask for mask in (state.allowed, request.mask) if mask is not None]:
                found.append((row, masks))
        return found

    def restricted(self, row: int) -> bool:
        """Whether the request excludes tokens, so that none may be left."""
        state = self.states[row]
        return state.bans is not None or state.allowed is not None or self.requests[row].mask is not None
