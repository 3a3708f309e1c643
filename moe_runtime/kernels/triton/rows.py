"""Kernels over whole rows: rounding them to int8, and adding up a token's picks.

Legend: T tokens, K picks of a token, R rows (picks by expert), D columns.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def round_rows(
    codes_ptr: tl.tensor, scale_ptr: tl.tensor, x_ptr: tl.tensor, used_ptr: tl.tensor, rows: tl.tensor, D: tl.tensor,
    stride_x: tl.tensor, stride_codes: tl.tensor,
    COUNTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Each row in int8 with one scale, its largest magnitude over 127. COUNTED: used_ptr[1] says how many there are."""
    row = tl.program_id(0).to(tl.int64)
    if row < (tl.load(used_ptr + 1) if COUNTED else rows):
        most = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_x + column, mask=column < D, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.abs(x))
        scale = tl.max(most, axis=0) / 127.0
        tl.store(scale_ptr + row, scale)
        # A row of zeros has scale 0 and codes 0.
        inverse = tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride_x + column, mask=column < D, other=0.0).to(tl.float32)
            # Adding 1.5 * 2^23 leaves no bits below the point: rounded to nearest, ties to even.
            code = (x * inverse + 12582912.0) - 12582912.0
            tl.store(codes_ptr + row * stride_codes + column, code.to(tl.int8), mask=column < D)


@triton.jit
def add_picks(
    out_ptr: tl.tensor, rows_ptr: tl.tensor, row_ptr: tl.tensor, D: tl.tensor, K: tl.tensor, stride_rows: tl.tensor,
    stride_out: tl.tensor,
    PICKS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """out[t] = the sum of the rows of token t's picks, in ascending order of row, which is that of slots."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pick = tl.arange(0, PICKS)
    elsewhere: tl.constexpr = 0x7FFFFFFF
    row = tl.load(row_ptr + token * K + pick, mask=pick < K, other=-1)
    row = tl.where(row >= 0, row, elsewhere)
    total = tl.zeros((BLOCK,), tl.float32)
    last = -1
    for _ in range(K):
        last = tl.min(tl.where(row > last, row, elsewhere), axis=0)
        here = (last < elsewhere) & (column < D)
        total += tl.load(rows_ptr + last.to(tl.int64) * stride_rows + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + column, total.to(out_ptr.dtype.element_ty), mask=column < D)
