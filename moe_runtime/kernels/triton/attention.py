"""Attention over a paged KV cache with an online softmax: scores exist only a tile at a time.

Decode splits a row's cache into pieces of a fixed length, so that one long row keeps many multiprocessors busy, and a
second kernel adds the pieces up in order. A chunk's tile holds several of its tokens with all query heads of one kv
head. Tiles lie at fixed positions of the cache, so a row's result depends on its own cache and on nothing beside it.

Legend: T tokens, A query heads, G kv heads, D head dimension, N blocks, B tokens a block, S sequences, W width of the
block table; Q rows of a tile (tokens by query heads of a kv head), C cache positions of a tile, P pieces of a row.
"""

import triton
import triton.language as tl

from moe_runtime.kernels.triton.decode import decode


@triton.jit(do_not_specialize=["pieces"])
def decode_pieces(
    sum_ptr: tl.tensor, most_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, q_ptr: tl.tensor,
    k_ptr: tl.tensor, v_ptr: tl.tensor, k_scale_ptr: tl.tensor, v_scale_ptr: tl.tensor, table_ptr: tl.tensor,
    length_ptr: tl.tensor, scale: tl.tensor, window: tl.tensor, pieces: tl.tensor, stride_q: tl.tensor,
    stride_g: tl.tensor, stride_row: tl.tensor, stride_table: tl.tensor, heads: tl.tensor,
    RATIO: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    VALUES: tl.constexpr, SCALED: tl.constexpr, WINDOWED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    WHOLE: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """One row, kv head and piece: the weighted sum of values, the largest score and the sum of weights.

    scale: of scores, in powers of two. WHOLE: every row has one piece, whose result is finished here.
    """
    row, group, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + row)
    oldest = tl.maximum(length - window, 0) if WINDOWED else 0
    first, end = piece * PIECE, tl.minimum(piece * PIECE + PIECE, length)
    if (first < end) & (end > oldest):
        query = tl.arange(0, QUERIES)
        head = group * RATIO + query
        d = tl.arange(0, PADDED)
        q_at = row.to(tl.int64) * stride_q + head[:, None] * DIM + d[None, :]
        q_QD = tl.load(q_ptr + q_at, mask=(query < RATIO)[:, None] & (d < DIM)[None, :], other=0.0).to(DOT)
        if SCALED:
            scale *= tl.load(k_scale_ptr + group)
        position_Q = tl.full((QUERIES,), 0, tl.int32) + (length - 1)
        sum_QD, most_Q, weight_Q = _attend(
            q_QD, k_ptr + group.to(tl.int64) * stride_g, v_ptr + group.to(tl.int64) * stride_g,
            table_ptr + row * stride_table, scale,
            position_Q, window, tl.maximum(first, oldest // TILE * TILE), end, oldest, stride_row,
            DIM, PADDED, PAGE, VALUES, WINDOWED, DOT, PRECISION, TILE,
        )  # fmt: skip
        if SCALED:
            sum_QD *= tl.load(v_scale_ptr + group)
        here = query < RATIO
        if WHOLE:
            out_at = (row.to(tl.int64) * heads + head)[:, None] * DIM + d[None, :]
            out = sum_QD / weight_Q[:, None]
            tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=here[:, None] & (d < DIM)[None, :])
        else:
            at = (row.to(tl.int64) * heads + head) * pieces + piece
            tl.store(sum_ptr + at[:, None] * DIM + d[None, :], sum_QD, mask=here[:, None] & (d < DIM)[None, :])
            tl.store(most_ptr + at, most_Q, mask=here)
            tl.store(weight_ptr + at, weight_Q, mask=here)


@triton.jit(do_not_specialize=["pieces"])
def join_pieces(
    out_ptr: tl.tensor, sum_ptr: tl.tensor, most_ptr: tl.tensor, weight_ptr: tl.tensor, length_ptr: tl.tensor,
    window: tl.tensor, pieces: tl.tensor, heads: tl.tensor,
    DIM: tl.constexpr, PADDED: tl.constexpr, WINDOWED: tl.constexpr, PIECE: tl.constexpr,
) -> None:  # fmt: skip
    """One row and head: its pieces, in order, weighted by their largest scores."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr + row)
    oldest = tl.maximum(length - window, 0) if WINDOWED else 0
    d = tl.arange(0, PADDED)
    at = (row.to(tl.int64) * heads + head) * pieces
    total, most, weight = tl.zeros((PADDED,), tl.float32), float("-inf"), 0.0
    for piece in range(oldest // PIECE, tl.cdiv(length, PIECE)):
        piece_most = tl.load(most_ptr + at + piece)
        new_most = tl.maximum(most, piece_most)
        old, new = tl.exp2(most - new_most), tl.exp2(piece_most - new_most)
        total = total * old + tl.load(sum_ptr + (at + piece) * DIM + d, mask=d < DIM, other=0.0) * new
        weight = weight * old + tl.load(weight_ptr + at + piece) * new
        most = new_most
    out_at = (row.to(tl.int64) * heads + head) * DIM + d
    tl.store(out_ptr + out_at, (total / weight).to(out_ptr.dtype.element_ty), mask=d < DIM)


@triton.jit
def attend_chunks(
    out_ptr: tl.tensor, q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor, table_ptr: tl.tensor, length_ptr: tl.tensor, count_ptr: tl.tensor, first_ptr: tl.tensor,
    scale: tl.tensor, window: tl.tensor, stride_q: tl.tensor, stride_g: tl.tensor, stride_row: tl.tensor,
    stride_table: tl.tensor, heads: tl.tensor,
    RATIO: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    VALUES: tl.constexpr, SCALED: tl.constexpr, WINDOWED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    TOKENS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """TOKENS tokens of one chunk, with the QUERIES >= RATIO query heads of one kv head each."""
    sequence, group = tl.program_id(1), tl.program_id(2)
    count = tl.load(count_ptr + sequence)
    # Late tokens see most, so they start first.
    first = (tl.cdiv(count, TOKENS) - 1 - tl.program_id(0)) * TOKENS
    if first >= 0:
        length = tl.load(length_ptr + sequence)
        place = tl.arange(0, TOKENS * QUERIES)
        token, query = first + place // QUERIES, place % QUERIES
        here = (token < count) & (query < RATIO)
        head = group * RATIO + query
        row = tl.load(first_ptr + sequence) + token
        d = tl.arange(0, PADDED)
        inside = here[:, None] & (d < DIM)[None, :]
        q_at = row.to(tl.int64)[:, None] * stride_q + head[:, None] * DIM + d[None, :]
        q_QD = tl.load(q_ptr + q_at, mask=inside, other=0.0).to(DOT)
        if SCALED:
            scale *= tl.load(k_scale_ptr + group)
        position_Q = length - count + token
        oldest = tl.maximum(length - count + first - window + 1, 0) if WINDOWED else 0
        end = tl.minimum(length - count + first + TOKENS, length)
        sum_QD, _, weight_Q = _attend(
            q_QD, k_ptr + group.to(tl.int64) * stride_g, v_ptr + group.to(tl.int64) * stride_g,
            table_ptr + sequence * stride_table, scale,
            position_Q, window, oldest // TILE * TILE, end, oldest, stride_row,
            DIM, PADDED, PAGE, VALUES, WINDOWED, DOT, PRECISION, TILE,
        )  # fmt: skip
        if SCALED:
            sum_QD *= tl.load(v_scale_ptr + group)
        out = sum_QD / tl.where(here, weight_Q, 1.0)[:, None]
        out_at = (row.to(tl.int64)[:, None] * heads + head[:, None]) * DIM + d[None, :]
        tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    q_QD: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, table_ptr: tl.tensor, scale: tl.tensor, position_Q: tl.tensor,
    window: tl.tensor, first: tl.tensor, end: tl.tensor, oldest: tl.tensor, stride_row: tl.tensor,
    DIM: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, VALUES: tl.constexpr, WINDOWED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Cache positions first .. end - 1 in tiles: (sum of weighted values [Q, D], largest score, sum of weights [Q])."""
    rows: tl.constexpr = q_QD.shape[0]
    sum_QD = tl.zeros((rows, PADDED), tl.float32)
    most_Q = tl.full((rows,), float("-inf"), tl.float32)
    weight_Q = tl.zeros((rows,), tl.float32)
    for start in range(first, end, TILE):
        at_C = start + tl.arange(0, TILE)
        written_C = (at_C < end) & (at_C >= oldest)
        block_C = tl.load(table_ptr + at_C // PAGE, mask=written_C, other=0)
        line_C = (block_C.to(tl.int64) * PAGE + at_C % PAGE) * stride_row
        k_CD = _cached(k_ptr, line_C, written_C, DIM, PADDED, VALUES, DOT)
        scores_QC = tl.dot(q_QD, k_CD.trans(1, 0), input_precision=PRECISION) * scale
        seen_QC = written_C[None, :] & (at_C[None, :] <= position_Q[:, None])
        if WINDOWED:
            seen_QC = seen_QC & (at_C[None, :] > position_Q[:, None] - window)
        scores_QC = tl.where(seen_QC, scores_QC, float("-inf"))
        new_most_Q = tl.maximum(most_Q, tl.max(scores_QC, axis=1))
        # A row that has seen nothing yet keeps -inf, from which nothing can be subtracted.
        base_Q = tl.where(new_most_Q == float("-inf"), 0.0, new_most_Q)
        probability_QC = tl.exp2(scores_QC - base_Q[:, None])
        shrink_Q = tl.exp2(most_Q - base_Q)
        weight_Q = weight_Q * shrink_Q + tl.sum(probability_QC, axis=1)
        v_CD = _cached(v_ptr, line_C, written_C, DIM, PADDED, VALUES, DOT)
        sum_QD = tl.dot(probability_QC.to(DOT), v_CD, sum_QD * shrink_Q[:, None], input_precision=PRECISION)
        most_Q = new_most_Q
    return sum_QD, most_Q, weight_Q


@triton.jit
def _cached(
    pool_ptr: tl.tensor, line_C: tl.tensor, written_C: tl.tensor,
    DIM: tl.constexpr, PADDED: tl.constexpr, VALUES: tl.constexpr, DOT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Keys or values of a tile, [C, D]; nothing that a former owner of a block left there gets in."""
    per_unit: tl.constexpr = 1 if VALUES == "float" else 2
    unit = tl.arange(0, PADDED // per_unit)
    mask = written_C[:, None] if DIM == PADDED else written_C[:, None] & (unit * per_unit < DIM)[None, :]
    units_CU = tl.load(pool_ptr + line_C[:, None] + unit[None, :], mask=mask, other=0)
    if VALUES == "float":
        return units_CU.to(DOT)
    else:
        return decode(units_CU, VALUES, DOT)
