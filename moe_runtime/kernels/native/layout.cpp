// From the canonical layout to the one that kernels stream, and back: a permutation, plus zeros where rows or columns
// are padded. Lane r of a block is its row r. Where number k of that row lies (L: 16-bit lane):
//   int8                pairs       ((k / 2) * 16 + r) * 2 + k % 2
//   int8 dynamic        fours       ((k / 4) * 16 + r) * 4 + k % 4, with 128 added
//   int4, e2m1          nibble (k % 8) / 2 of L = (k / 8) * 32 + 2 * r + k % 2: shifting a vector of L by 0, 4, 8 and
//                       12 bits gives four vectors of pairs
//   bf16                pairs, as int8; e4m3, fp16, fp32: k * 16 + r
#include <sys/mman.h>

#include <cstring>

#include "abi.h"
#include "lanes.h"

namespace {

constexpr int32_t kSpan = 128;  // where the format has no groups

int bits(int32_t values) {
  switch (values) {
    case kInt4: case kE2m1: return 4;
    case kBf16: case kFp16: return 16;
    case kFp32: return 32;
    default: return 8;
  }
}

int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// One row into or out of its lane; `Copy` moves a number one way or the other.
template <int kNumber, int kTuple, class Copy>
void each(int columns, int lane, uint8_t* block, uint8_t* row, Copy copy) {
  for (int k = 0; k < columns; ++k)
    copy(block + ((k / kTuple * kLanes + lane) * kTuple + k % kTuple) * kNumber, row + k * kNumber, kNumber);
}

template <class Copy>
void each_number(int32_t values, int columns, int lane, uint8_t* block, uint8_t* row, Copy copy) {
  switch (values) {
    case kInt8: return each<1, 2>(columns, lane, block, row, copy);
        case kBf16: return each<2, 2>(columns, lane, block, row, copy);
    case kFp16: return each<2, 1>(columns, lane, block, row, copy);
    case kFp32: return each<4, 1>(columns, lane, block, row, copy);
    default: return each<1, 1>(columns, lane, block, row, copy);
  }
}

uint32_t gather_nibbles(uint32_t bytes) {  // every other one of eight, in the low half
  bytes &= 0x0f0f0f0f;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff;
  return (bytes | bytes >> 8) & 0xffff;
}

uint32_t scatter_nibbles(uint32_t half) {
  half = (half | half << 8) & 0x00ff00ff;
  return (half | half << 4) & 0x0f0f0f0f;
}

// Eight codes are four canonical bytes and one 32-bit word of a lane. An odd last byte's upper half is kept as well.
void pack_codes(int columns, int lane, uint8_t* block, const uint8_t* row) {
  const int stored = (columns + 1) / 2;
  for (int at = 0; at < stored; at += 4, block += 4 * kLanes) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, row + at, stored - at < 4 ? stored - at : 4);
    const uint32_t word = gather_nibbles(bytes) | gather_nibbles(bytes >> 4) << 16;
    std::memcpy(block + 4 * lane, &word, 4);
  }
}

void unpack_codes(int columns, int lane, const uint8_t* block, uint8_t* row) {
  const int stored = (columns + 1) / 2;
  for (int at = 0; at < stored; at += 4, block += 4 * kLanes) {
    uint32_t word;
    std::memcpy(&word, block + 4 * lane, 4);
    const uint32_t bytes = scatter_nibbles(word & 0xffff) | scatter_nibbles(word >> 16) << 4;
    std::memcpy(row + at, &bytes, stored - at < 4 ? stored - at : 4);
  }
}

struct Place {  // of one canonical row
  int64_t block;
  int lane;
};

Place place(const MoeMatrix& m, int row) {
  const int part = row / m.rows, within = row % m.rows;
  return {int64_t{within / kLanes} * (1 + m.gated) + part, within % kLanes};
}

int64_t row_bytes(const MoeMatrix& m) { return (int64_t{m.columns} * bits(m.values) + 7) / 8; }

}  // namespace

MOE_API int32_t moe_plan(MoeMatrix* matrix) {
  MoeMatrix& m = *matrix;
  const bool sane = m.rows > 0 && m.columns > 0 && m.columns <= 65536 && m.group_rows > 0 && m.group >= 0 &&
                    m.group % 8 == 0 && m.group <= kSpan && m.values >= kInt8 && m.values <= kFp32;
  if (!sane) return 1;
  m.blocks = (m.rows + kLanes - 1) / kLanes * (1 + m.gated);
  m.groups = m.scales == kNone ? 0 : m.group ? (m.columns + m.group - 1) / m.group : 1;
  m.span = m.group ? m.group : kSpan;
  m.spans = (m.columns + m.span - 1) / m.span;
  const bool dynamic = m.values == kInt8Dynamic, whole = m.values < kE4m3;
  const int per_word = dynamic ? 4 : whole ? 2 : 1, unit = per_word == 1 ? 8 : per_word * kUnit;
  m.words = (m.columns + unit - 1) / unit * unit / per_word;
  m.padded = m.words * per_word;
  m.word_scales = dynamic ? 2 : whole ? m.spans : 0;
  m.block_bytes = int64_t{m.padded} * kLanes * bits(m.values) / 8;
  const int64_t scales = int64_t{m.blocks} * m.groups * kLanes;
  m.scales_at = align(m.blocks * m.block_bytes);
  m.zeros_at = align(m.scales_at + scales * number_bytes(m.scales));
  m.bytes = align(m.zeros_at + (m.zero_points ? scales : 0));
  return 0;
}

MOE_API void moe_pack(const MoeMatrix* matrix, uint8_t* record, const uint8_t* values, const uint8_t* scales,
                      const uint8_t* zeros) {
  const MoeMatrix& m = *matrix;
  const int size = number_bytes(m.scales);
  auto in = [](uint8_t* block, const uint8_t* row, int bytes) { std::memcpy(block, row, bytes); };
  auto in_biased = [](uint8_t* block, const uint8_t* row, int) { *block = *row ^ 0x80; };
  std::memset(record, 0, m.bytes);
  for (int row = 0; row < m.rows * (1 + m.gated); ++row) {
    const auto [block, lane] = place(m, row);
    uint8_t* to = record + block * m.block_bytes;
    const uint8_t* from = values + row * row_bytes(m);
    if (bits(m.values) == 4) pack_codes(m.columns, lane, to, from);
    else if (m.values == kInt8Dynamic) each<1, 4>(m.columns, lane, to, const_cast<uint8_t*>(from), in_biased);
    else each_number(m.values, m.columns, lane, to, const_cast<uint8_t*>(from), in);
    for (int group = 0; group < m.groups; ++group) {
      const int64_t at = (block * m.groups + group) * kLanes + lane;
      std::memcpy(record + m.scales_at + at * size, scales + (int64_t{row / m.group_rows} * m.groups + group) * size,
                  size);
      if (m.zero_points) record[m.zeros_at + at] = zeros[int64_t{row} * m.groups + group];
    }
  }
}

MOE_API void moe_unpack(const MoeMatrix* matrix, const uint8_t* record, uint8_t* values, uint8_t* scales,
                        uint8_t* zeros) {
  const MoeMatrix& m = *matrix;
  const int size = number_bytes(m.scales);
  auto out = [](const uint8_t* block, uint8_t* row, int bytes) { std::memcpy(row, block, bytes); };
  auto out_biased = [](const uint8_t* block, uint8_t* row, int) { *row = *block ^ 0x80; };
  for (int row = 0; row < m.rows * (1 + m.gated); ++row) {
    const auto [block, lane] = place(m, row);
    const uint8_t* from = record + block * m.block_bytes;
    uint8_t* to = values + row * row_bytes(m);
    if (bits(m.values) == 4) unpack_codes(m.columns, lane, from, to);
    else if (m.values == kInt8Dynamic) each<1, 4>(m.columns, lane, const_cast<uint8_t*>(from), to, out_biased);
    else each_number(m.values, m.columns, lane, const_cast<uint8_t*>(from), to, out);
    for (int group = 0; group < m.groups; ++group) {
      const int64_t at = (block * m.groups + group) * kLanes + lane;
      std::memcpy(scales + (int64_t{row / m.group_rows} * m.groups + group) * size, record + m.scales_at + at * size,
                  size);
      if (m.zero_points) zeros[int64_t{row} * m.groups + group] = record[m.zeros_at + at];
    }
  }
}

// Streaming a weight touches a new page every 4 KB otherwise, which halves the bandwidth of a virtual machine.
MOE_API void moe_huge_pages(void* start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(start, bytes, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

MOE_API int32_t moe_abi() { return 1; }
