"""Picks sorted by expert, without asking the device for a single number.

Two kernels: the first counts each chunk's picks by expert, the second turns counts into places. There are no atomics,
so the order is always the same: by expert, and within an expert by token. Buffers have the size of the worst case, and
what is really used stays on the device.

Legend: T tokens, K picks of a token, P = T * K picks, R = P rows (picks by expert; those that are elsewhere have none),
N experts, C chunks of picks, B blocks: a run of rows of one expert is cut into blocks of at most block_m rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.triton.launch import Call, power_of_two

_CHUNK = 256
_BLOCKS = 32


@dataclass(frozen=True)
class SortedPicks:
    """All int32. A block's rows are the block_m from first_B that are below last_B; expert_B is -1 from used_2[0] on.

    pick_R: the pick (token * K + k) of each of the first used_2[1] rows. row_P: the row of each pick, -1 if elsewhere.
    """

    pick_R: Tensor
    row_P: Tensor
    expert_B: Tensor
    first_B: Tensor
    last_B: Tensor
    used_2: Tensor
    block_m: int


def sort_picks(slots_TK: Tensor, experts: int, block_m: int) -> SortedPicks:
    """Sort picks by expert: slots_TK holds 0..experts-1, anything else being a pick that is elsewhere."""
    picks, device = slots_TK.numel(), slots_TK.device
    chunks, blocks = -(-picks // _CHUNK), most_blocks(picks, experts, block_m)

    def ints(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    counts_CN = ints(chunks * experts)
    result = SortedPicks(ints(picks), ints(picks), ints(blocks), ints(blocks), ints(blocks), ints(2), block_m)
    for call in sort_calls(slots_TK, experts, counts_CN, result):
        call()
    return result


def sort_calls(slots_TK: Tensor, experts: int, counts_CN: Tensor, result: SortedPicks) -> tuple[Call, Call]:
    """Both kernels, in order."""
    slots_P, picks = slots_TK.reshape(-1), slots_TK.numel()
    chunks, blocks = -(-picks // _CHUNK), len(result.expert_B)
    constants = {"CHUNK": _CHUNK, "EXPERTS": power_of_two(experts)}
    warps = 4 if experts <= 128 else 8
    count = Call(_count, (chunks,), (slots_P, counts_CN, picks, experts), constants, warps)
    parts = (result.pick_R, result.row_P, result.expert_B, result.first_B, result.last_B, result.used_2)
    args = (slots_P, counts_CN, *parts, picks, experts, chunks, blocks)
    grid = max(chunks, -(-blocks // _BLOCKS))
    place = Call(_place, (grid,), args, {**constants, "BLOCK_M": result.block_m, "BLOCKS": _BLOCKS}, warps)
    return count, place


def most_blocks(picks: int, experts: int, block_m: int) -> int:
    """How many blocks any distribution of picks over experts can need."""
    return min(picks, min(picks, experts) + picks // block_m)


@triton.jit
def _slots_of(slots_ptr: tl.tensor, pick: tl.tensor, picks: tl.tensor, experts: tl.tensor) -> tl.tensor:
    """Slots as int32, -1 for whatever is not an expert here."""
    slot = tl.load(slots_ptr + pick, mask=pick < picks, other=-1).to(tl.int32)
    return tl.where((slot >= 0) & (slot < experts), slot, -1)


@triton.jit(do_not_specialize=["picks"])
def _count(
    slots_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    picks: tl.tensor,
    experts: tl.tensor,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    # In strips, so that the comparison of all with all fits the registers.
    for strip in range(0, CHUNK, 32):
        slot = _slots_of(slots_ptr, chunk * CHUNK + strip + tl.arange(0, 32), picks, experts)
        counts += tl.sum((slot[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + chunk * experts + expert, counts, mask=expert < experts)


@triton.jit(do_not_specialize=["picks", "chunks", "blocks"])
def _place(
    slots_ptr: tl.tensor, counts_ptr: tl.tensor, pick_ptr: tl.tensor, row_ptr: tl.tensor, expert_ptr: tl.tensor,
    first_ptr: tl.tensor, last_ptr: tl.tensor, used_ptr: tl.tensor, picks: tl.tensor, experts: tl.tensor,
    chunks: tl.tensor, blocks: tl.tensor,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Each program places one chunk's picks and describes BLOCKS blocks; all of them add up the counts."""
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for chunk in range(chunks):
        counts = tl.load(counts_ptr + chunk * experts + expert, mask=expert < experts, other=0)
        total += counts
        before += tl.where(chunk < program, counts, 0)
    last_row = tl.cumsum(total, axis=0)
    first_row = last_row - total
    needed = (total + BLOCK_M - 1) // BLOCK_M
    last_block = tl.cumsum(needed, axis=0)

    block = program * BLOCKS + tl.arange(0, BLOCKS)
    used = tl.sum(needed, axis=0)
    # A block belongs to the first expert whose blocks end behind it.
    owner = tl.sum((last_block[None, :] <= block[:, None]).to(tl.int32), axis=1)
    mine = (owner[:, None] == expert[None, :]).to(tl.int32)
    start = tl.sum(mine * first_row[None, :], axis=1)
    number = block - tl.sum(mine * (last_block - needed)[None, :], axis=1)
    inside = block < blocks
    tl.store(expert_ptr + block, tl.where(block < used, owner, -1), mask=inside)
    tl.store(first_ptr + block, start + number * BLOCK_M, mask=inside)
    tl.store(last_ptr + block, tl.sum(mine * last_row[None, :], axis=1), mask=inside)
    if program == 0:
        tl.store(used_ptr, used)
        tl.store(used_ptr + 1, tl.sum(total, axis=0))

    # The rank of a pick among equal ones of its chunk, in strips again.
    base = first_row + before
    for strip in range(0, CHUNK, 32):
        pick = program * CHUNK + strip + tl.arange(0, 32)
        slot = _slots_of(slots_ptr, pick, picks, experts)
        same = (slot[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.sum(same * (tl.cumsum(same, axis=0) - 1 + base[None, :]), axis=1)
        tl.store(row_ptr + pick, tl.where(slot >= 0, rank, -1), mask=pick < picks)
        tl.store(pick_ptr + rank, pick, mask=slot >= 0)
        base += tl.sum(same, axis=0)
