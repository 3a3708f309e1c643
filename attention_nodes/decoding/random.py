"""Counter-based random numbers: a draw depends on (request seed, position, token id) and on nothing else.

So a request draws the same numbers alone or in any batch, on any node, after preemption and when resumed elsewhere.
The mixing function is SplitMix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
2014).

Legend: P sampled rows, C candidates.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# With 53 bits the largest uniform, half a step below 1, would round to 1 and its Gumbel draw to infinity.
_BITS = 52


def stream_key(seed: int) -> int:
    """The unsigned 64-bit key of all draws with this seed, which may be any integer that fits 64 bits."""
    return int(_mix(np.array([seed & _MASK], np.uint64))[0])


def draw_keys(streams_P: NDArray[np.uint64], positions_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """The key of one draw per row, int64 [P]; position is the index of the token being drawn."""
    return _mix(streams_P + positions_P.astype(np.uint64) * np.uint64(_GOLDEN)).view(np.int64)


def draw_key(seed: int, position: int) -> int:
    """One row of draw_keys."""
    return int(draw_keys(np.array([stream_key(seed)], np.uint64), np.array([position]))[0])


def gumbel(keys_C: Tensor, token_ids_C: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, for (key, id) pairs of int64, which are broadcast against each other."""
    x = keys_C + (token_ids_C + 1) * _signed(_GOLDEN)
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    x ^= _shift_right(x, 31)
    uniform_C = (_shift_right(x, 64 - _BITS).double() + 0.5) * 2.0**-_BITS
    return -torch.log(-torch.log(uniform_C))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own is arithmetic on int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
