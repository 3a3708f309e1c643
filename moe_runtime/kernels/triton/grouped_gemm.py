"""The grouped product of a layer's experts, for every weight format: one kernel, specialised when it is compiled.

The weights are the left operand: out.T[N, M] = w[N, K] @ x.T[K, M]. So quantized weights, decoded in registers, are
where Hopper's tensor cores take an operand from registers, and a few tokens fill the instruction's short side.

Each program takes tiles until none are left (blocks of rows by tiles of weight rows), so the same code serves a plain
grid (as many programs as tiles at most) and a persistent one (as many as multiprocessors). The number of tiles is read
on the device. K is walked in the same steps whatever the number of rows, so a row's result depends on nothing else.

Scales: one a row of weights is applied at the end; groups of at least BLOCK_K columns scale each step's product;
smaller groups scale the weights themselves before they are multiplied.

Legend: M rows of a block, N weight rows (outputs), K columns (inputs), U units of a row (see decode.py), G groups.
"""

import triton
import triton.language as tl

from moe_runtime.kernels.triton.decode import decode, decode_scales


@triton.jit(do_not_specialize=["rows"])
def grouped_gemm(
    out_ptr: tl.tensor, x_ptr: tl.tensor, x_scale_ptr: tl.tensor, w_ptr: tl.tensor, scale_ptr: tl.tensor,
    zero_ptr: tl.tensor, bias_ptr: tl.tensor, pick_ptr: tl.tensor, pick_weight_ptr: tl.tensor, expert_ptr: tl.tensor,
    first_ptr: tl.tensor, last_ptr: tl.tensor, used_ptr: tl.tensor, rows: tl.tensor, N: tl.tensor, K: tl.tensor,
    picks_of_token: tl.tensor, stride_x: tl.tensor, stride_out: tl.tensor, stride_w: tl.tensor, stride_we: tl.tensor,
    stride_s: tl.tensor, stride_se: tl.tensor,
    SORTED: tl.constexpr, GATHER: tl.constexpr, GATE_UP: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr,
    VALUES: tl.constexpr, ROUND_X: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, E8M0: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BAND: tl.constexpr,
) -> None:  # fmt: skip
    """out[row, n] = x[row] . w[expert, n] * scales + bias[n], or silu(gate) * up, the N rows of up being below gate's.

    SORTED: rows come in blocks of one expert (sort.py), else all rows belong to expert 0. GATHER: x is indexed by the
    pick's token, else by row. WEIGHTED: times the pick's routing weight. Strides in elements; `e` is the expert's.
    BAND blocks of rows take a column of weights in turn, so that they find it in the cache.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    blocks = tl.load(used_ptr) if SORTED else tl.cdiv(rows, BLOCK_M)
    for tile in range(tl.program_id(0), blocks * tiles_n, tl.num_programs(0)):
        band = tile // (BAND * tiles_n) * BAND
        height = tl.minimum(blocks - band, BAND)
        block = band + (tile - band * tiles_n) % height
        n = (tile - band * tiles_n) // height * BLOCK_N + tl.arange(0, BLOCK_N)
        if SORTED:
            expert = tl.load(expert_ptr + block).to(tl.int64)
            row = tl.load(first_ptr + block) + tl.arange(0, BLOCK_M)
            here = row < tl.load(last_ptr + block)
            pick = tl.load(pick_ptr + row, mask=here, other=0)
        else:
            expert = tl.full((), 0, tl.int64)
            row = block * BLOCK_M + tl.arange(0, BLOCK_M)
            here = row < rows
            pick = row
        x_row = pick // picks_of_token if GATHER else row

        inside = tl.where(n < N, n, 0)
        x_ptrs = x_ptr + tl.where(here, x_row, 0).to(tl.int64) * stride_x
        w_ptrs = w_ptr + expert * stride_we + inside.to(tl.int64) * stride_w
        up_ptrs = w_ptr + expert * stride_we + (inside + N).to(tl.int64) * stride_w
        of_gate = expert * stride_se + inside // GROUP_N * stride_s
        of_up = expert * stride_se + (inside + N) // GROUP_N * stride_s
        first = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if ROUND_X else tl.float32)
        second = first
        for k in range(0, K, BLOCK_K):
            column = k + tl.arange(0, BLOCK_K)
            x_here = here[None, :] if EVEN_K else here[None, :] & (column < K)[:, None]
            x_KM = tl.load(x_ptrs[None, :] + column[:, None], mask=x_here, other=0).to(DOT)
            first = _step(
                first, x_KM, w_ptrs, scale_ptr + of_gate, zero_ptr + of_gate, k, K,
                VALUES, ROUND_X, GROUP_K, E8M0, DOT, PRECISION, EVEN_K, BLOCK_K,
            )  # fmt: skip
            if GATE_UP:
                second = _step(
                    second, x_KM, up_ptrs, scale_ptr + of_up, zero_ptr + of_up, k, K,
                    VALUES, ROUND_X, GROUP_K, E8M0, DOT, PRECISION, EVEN_K, BLOCK_K,
                )  # fmt: skip

        x_scale = tl.load(x_scale_ptr + x_row, mask=here, other=0.0) if ROUND_X else 1.0
        channels: tl.constexpr = VALUES != "float" and GROUP_K == 0
        out = _scaled(first, scale_ptr + of_gate, x_scale, channels, ROUND_X)
        if GATE_UP:
            out = out / (1.0 + tl.exp(-out)) * _scaled(second, scale_ptr + of_up, x_scale, channels, ROUND_X)
        if BIAS:
            out += tl.load(bias_ptr + inside).to(tl.float32)[:, None]
        if WEIGHTED:
            out *= tl.load(pick_weight_ptr + pick, mask=here, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + row.to(tl.int64)[None, :] * stride_out + n[:, None]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=here[None, :] & (n < N)[:, None])


@triton.jit
def _step(
    sum_NM: tl.tensor, x_KM: tl.tensor, w_ptrs: tl.tensor, scale_ptrs: tl.tensor, zero_ptrs: tl.tensor, k: tl.tensor,
    K: tl.tensor,
    VALUES: tl.constexpr, ROUND_X: tl.constexpr, GROUP_K: tl.constexpr, E8M0: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """sum + w[:, k : k + BLOCK_K] @ x, with what lies beyond K left out."""
    per_unit: tl.constexpr = 1 if VALUES == "float" or ROUND_X else 2
    unit = k // per_unit + tl.arange(0, BLOCK_K // per_unit)
    if EVEN_K:
        w_NU = tl.load(w_ptrs[:, None] + unit[None, :])
    else:
        w_NU = tl.load(w_ptrs[:, None] + unit[None, :], mask=(unit * per_unit < K)[None, :], other=0)
    if ROUND_X:
        return tl.dot(w_NU, x_KM, sum_NM, out_dtype=tl.int32)
    elif VALUES == "float":
        return tl.dot(w_NU.to(DOT), x_KM, sum_NM, input_precision=PRECISION)
    elif GROUP_K == 0:
        return tl.dot(decode(w_NU, VALUES, DOT), x_KM, sum_NM, input_precision=PRECISION)
    elif BLOCK_K <= GROUP_K:
        return _step_in_group(sum_NM, x_KM, w_NU, scale_ptrs, zero_ptrs, k // GROUP_K, VALUES, E8M0, DOT, PRECISION)
    else:
        w_NK = _scaled_weights(w_NU, scale_ptrs, zero_ptrs, k, K, VALUES, GROUP_K, E8M0, DOT, BLOCK_K)
        return tl.dot(w_NK, x_KM, sum_NM, input_precision=PRECISION)


@triton.jit
def _step_in_group(
    sum_NM: tl.tensor, x_KM: tl.tensor, w_NU: tl.tensor, scale_ptrs: tl.tensor, zero_ptrs: tl.tensor, group: tl.tensor,
    VALUES: tl.constexpr, E8M0: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The step lies in one group: the decoded numbers are multiplied as they are, and their sum is scaled."""
    w_NK = decode(w_NU, VALUES, DOT)
    if VALUES == "int4z":
        w_NK -= tl.load(zero_ptrs + group).to(DOT)[:, None]
    scale_N = decode_scales(tl.load(scale_ptrs + group), E8M0)
    return sum_NM + tl.dot(w_NK, x_KM, input_precision=PRECISION) * scale_N[:, None]


@triton.jit
def _scaled_weights(
    w_NU: tl.tensor, scale_ptrs: tl.tensor, zero_ptrs: tl.tensor, k: tl.tensor, K: tl.tensor,
    VALUES: tl.constexpr, GROUP_K: tl.constexpr, E8M0: tl.constexpr, DOT: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The step spans groups: each weight is scaled, [N, K]."""
    group = k // GROUP_K + tl.arange(0, BLOCK_K // GROUP_K)
    exists = (group * GROUP_K < K)[None, :]
    w_NK = decode(w_NU, VALUES, DOT)
    if VALUES == "int4z":
        zero_NG = tl.load(zero_ptrs[:, None] + group[None, :], mask=exists, other=0)
        w_NK -= _spread(zero_NG.to(DOT), GROUP_K)
    scale_NG = decode_scales(tl.load(scale_ptrs[:, None] + group[None, :], mask=exists, other=0), E8M0)
    if E8M0 and DOT != tl.float16:
        # A power of two: exact in bfloat16.
        return w_NK * _spread(scale_NG.to(DOT), GROUP_K)
    else:
        return (w_NK.to(tl.float32) * _spread(scale_NG, GROUP_K)).to(DOT)


@triton.jit
def _spread(groups_NG: tl.tensor, GROUP_K: tl.constexpr) -> tl.tensor:
    """One entry a group as one a column, [N, K]."""
    rows: tl.constexpr = groups_NG.shape[0]
    groups: tl.constexpr = groups_NG.shape[1]
    return tl.broadcast_to(groups_NG[:, :, None], (rows, groups, GROUP_K)).reshape(rows, groups * GROUP_K)


@triton.jit
def _scaled(
    sum_NM: tl.tensor, scale_ptrs: tl.tensor, x_scale_M: tl.tensor, CHANNELS: tl.constexpr, ROUND_X: tl.constexpr
) -> tl.tensor:
    """A finished sum as float32, with the scales that were left to the end."""
    out_NM = sum_NM.to(tl.float32)
    if CHANNELS:
        out_NM *= tl.load(scale_ptrs).to(tl.float32)[:, None]
    if ROUND_X:
        out_NM *= x_scale_M[None, :]
    return out_NM
