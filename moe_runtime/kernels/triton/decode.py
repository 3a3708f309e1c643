"""From what is stored to numbers that a product takes, inside a kernel.

Converting integers is slow on GPUs, so the bits are put where they mean a number: n below 128 set into the mantissa of
a bfloat16 128.0 gives 128 + n, and subtracting gives n; float8 and float4 fields are shifted to where the wider type
has them, and a power of two makes up for the other exponent bias. Two numbers that lie side by side in memory become
two halves of one register, so that every step works on both at once. All of it is exact.

Legend: N rows of weights, U units (one byte of two four-bit numbers, or an int16 of two bytes), K = 2 * U columns.
"""

import triton
import triton.language as tl


@triton.jit
def decode(units_NU: tl.tensor, VALUES: tl.constexpr, DOT: tl.constexpr) -> tl.tensor:
    """The numbers of packed units, [N, K] in DOT. `int4z` keeps its codes 0..15, since a zero point follows."""
    if VALUES == "int4":
        return _nibbles(units_NU, DOT) - (1024.0 + 8.0 if DOT == tl.float16 else 128.0 + 8.0)
    elif VALUES == "int4z":
        return _nibbles(units_NU, DOT) - (1024.0 if DOT == tl.float16 else 128.0)
    elif VALUES == "e2m1":
        return _e2m1(units_NU, DOT)
    elif VALUES == "e4m3":
        return _e4m3(units_NU, DOT)
    else:
        return _int8(units_NU, DOT)


@triton.jit
def _nibbles(units_NU: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    """Offset + code, where the offset is 128 or in float16 1024."""
    both = _spread_nibbles(units_NU) & 0x000F000F
    return _halves(both | (0x64006400 if DOT == tl.float16 else 0x43004300), DOT)


@triton.jit
def _e2m1(units_NU: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    both = _spread_nibbles(units_NU)
    # Sign to the top, exponent and mantissa to the exponent's low end; -2147450880 is 0x80008000.
    if DOT == tl.float16:
        return _halves(((both << 12) & -2147450880) | ((both & 0x00070007) << 9), DOT) * 16384.0
    else:
        return _halves(((both << 12) & -2147450880) | ((both & 0x00070007) << 6), DOT) * (2.0**126)


@triton.jit
def _e4m3(units_NU: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    both = _spread_bytes(units_NU)
    if DOT == tl.float16:
        return _halves(((both << 8) & -2147450880) | ((both << 7) & 0x3F803F80), DOT) * 256.0
    else:
        return _halves(((both << 8) & -2147450880) | ((both << 4) & 0x07F007F0), DOT) * (2.0**120)


@triton.jit
def _int8(units_NU: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    both = _spread_bytes(units_NU)
    if DOT == tl.float16:
        # Flipping the sign bit adds 128: 1024 + 128 + n.
        return _halves((both & 0x00FF00FF) ^ 0x64806480, DOT) - 1152.0
    else:
        # bfloat16 has room for seven bits: 128 + low bits, less 128, or 256 where the sign bit stands for -128.
        both = (both & 0x00FF00FF) | 0x43004300
        return _halves(both & 0x437F437F, DOT) - _halves(both & 0x43804380, DOT)


@triton.jit
def _spread_nibbles(bytes_NU: tl.tensor) -> tl.tensor:
    """The low nibble at bit 0, the high one at bit 16, with other bits between."""
    wide = bytes_NU.to(tl.int32)
    return wide | (wide << 12)


@triton.jit
def _spread_bytes(units_NU: tl.tensor) -> tl.tensor:
    """The low byte at bit 0, the high one at bit 16, with other bits between."""
    wide = units_NU.to(tl.uint16, bitcast=True).to(tl.int32)
    return wide | (wide << 8)


@triton.jit
def _halves(both_NU: tl.tensor, DOT: tl.constexpr) -> tl.tensor:
    """Bit patterns in the low and high half of an int32 as columns 2 u and 2 u + 1 [N, K]; float32 reads bfloat16."""
    if DOT == tl.float32:
        low = (both_NU << 16).to(tl.float32, bitcast=True)
        high = (both_NU & -65536).to(tl.float32, bitcast=True)
        return tl.join(low, high).reshape(both_NU.shape[0], 2 * both_NU.shape[1])
    else:
        halves = tl.join(both_NU.to(tl.int16), (both_NU >> 16).to(tl.int16))
        return halves.reshape(both_NU.shape[0], 2 * both_NU.shape[1]).to(DOT, bitcast=True)


@triton.jit
def decode_scales(scales: tl.tensor, E8M0: tl.constexpr) -> tl.tensor:
    """Scales as float32; e8m0 exponents become powers of two, and its code 255 NaN."""
    if E8M0:
        # Code 0 would be a subnormal: half of the least normal number.
        power = tl.where(scales == 0, 0x00400000, scales.to(tl.int32) << 23)
        return tl.where(scales == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    else:
        return scales.to(tl.float32)
