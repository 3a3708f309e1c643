// From the canonical layout to the one that kernels stream, and back: a permutation, plus zeros where rows, columns or
// heads are padded. Within a span, a row's bytes go in pieces of 1, 2 or 4; piece i of lane r, which is row r of its
// block, comes to (16 * i + r) * size, so that a vector holds the same columns of sixteen rows. What a piece is:
//   int8           two columns
//   int8 dynamic   four columns, each with 128 added
//   int4, e2m1     eight columns: the even ones' codes, then the odd ones', so that shifting each half by 0, 4, 8 and
//                  12 bits gives two columns a time
//   bf16           two columns; e4m3, fp16, fp32: one
#include <sys/mman.h>

#include <cstring>

#include "abi.h"
#include "kernel_table.h"
#include "lanes.h"

namespace {

constexpr int32_t kSpan = 128;      // where the format has no groups
constexpr int32_t kOneStretch = 30;  // a logarithm that no number of spans reaches

int bits(int32_t values) {
  switch (values) {
    case kInt4: case kE2m1: return 4;
    case kBf16: case kFp16: return 16;
    case kFp32: return 32;
    default: return 8;
  }
}

int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int piece_bytes(int32_t values) {
  switch (values) {
    case kE4m3: return 1;
    case kInt8: case kFp16: return 2;
    default: return 4;
  }
}

uint32_t flip(uint32_t bytes) { return bytes ^ 0x80808080; }

uint32_t gather_nibbles(uint32_t bytes) {  // every other one of eight, in the low half
  bytes &= 0x0f0f0f0f;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff;
  return (bytes | bytes >> 8) & 0xffff;
}
uint32_t scatter_nibbles(uint32_t half) {
  half = (half | half << 8) & 0x00ff00ff;
  return (half | half << 4) & 0x0f0f0f0f;
}
uint32_t part_codes(uint32_t bytes) { return gather_nibbles(bytes) | gather_nibbles(bytes >> 4) << 16; }
uint32_t join_codes(uint32_t word) { return scatter_nibbles(word & 0xffff) | scatter_nibbles(word >> 16) << 4; }

// One row into its lane, or out of it.
template <int kBytes>
void scatter(const uint8_t* row, int64_t bytes, uint8_t* lane) {
  int64_t at = 0;
  for (; at + kBytes <= bytes; at += kBytes) std::memcpy(lane + at * kLanes, row + at, kBytes);
  if (at < bytes) std::memcpy(lane + at * kLanes, row + at, bytes - at);
}
template <int kBytes>
void gather(const uint8_t* lane, int64_t bytes, uint8_t* row) {
  int64_t at = 0;
  for (; at + kBytes <= bytes; at += kBytes) std::memcpy(row + at, lane + at * kLanes, kBytes);
  if (at < bytes) std::memcpy(row + at, lane + at * kLanes, bytes - at);
}

// Pieces of four bytes that change on the way. What lies behind an odd last code is kept as well.
template <uint32_t (*kChange)(uint32_t)>
void scatter_changed(const uint8_t* row, int64_t bytes, uint8_t* lane) {
  const auto move = [&](int64_t at, int64_t size) {
    uint32_t piece = 0;
    std::memcpy(&piece, row + at, size);
    piece = kChange(piece);
    std::memcpy(lane + at * kLanes, &piece, 4);
  };
  int64_t at = 0;
  for (; at + 4 <= bytes; at += 4) move(at, 4);
  if (at < bytes) move(at, bytes - at);
}
template <uint32_t (*kChange)(uint32_t)>
void gather_changed(const uint8_t* lane, int64_t bytes, uint8_t* row) {
  const auto move = [&](int64_t at, int64_t size) {
    uint32_t piece;
    std::memcpy(&piece, lane + at * kLanes, 4);
    piece = kChange(piece);
    std::memcpy(row + at, &piece, size);
  };
  int64_t at = 0;
  for (; at + 4 <= bytes; at += 4) move(at, 4);
  if (at < bytes) move(at, bytes - at);
}

void row_in(int32_t values, const uint8_t* row, int64_t bytes, uint8_t* lane) {
  switch (values) {
    case kInt8Dynamic: return scatter_changed<flip>(row, bytes, lane);
    case kInt4: case kE2m1: return scatter_changed<part_codes>(row, bytes, lane);
    case kE4m3: return scatter<1>(row, bytes, lane);
    case kInt8: case kFp16: return scatter<2>(row, bytes, lane);
    default: return scatter<4>(row, bytes, lane);
  }
}
void row_out(int32_t values, const uint8_t* lane, int64_t bytes, uint8_t* row) {
  switch (values) {
    case kInt8Dynamic: return gather_changed<flip>(lane, bytes, row);
    case kInt4: case kE2m1: return gather_changed<join_codes>(lane, bytes, row);
    case kE4m3: return gather<1>(lane, bytes, row);
    case kInt8: case kFp16: return gather<2>(lane, bytes, row);
    default: return gather<4>(lane, bytes, row);
  }
}

}  // namespace

MOE_API int32_t moe_plan(MoeMatrix* matrix, int32_t isa) {
  MoeMatrix& m = *matrix;
  const bool grouped = m.group > 0 && m.group % 8 == 0 && kSpan % m.group == 0;
  const bool sized = m.rows > 0 && m.columns > 0 && m.columns <= 65536 && m.group_rows > 0;
  if (!sized || !(grouped || m.group == 0) || m.values < kInt8 || m.values > kFp32) return 1;
  m.blocks = (m.rows + kLanes - 1) / kLanes * (1 + m.gated);
  m.groups = m.scales == kNone ? 0 : m.group ? (m.columns + m.group - 1) / m.group : 1;
  m.span = m.group ? m.group : kSpan;
  m.spans = (m.columns + m.span - 1) / m.span;
  const bool dynamic = m.values == kInt8Dynamic, whole = m.values < kE4m3;
  const bool pairs = whole || (m.values == kBf16 && kernels_of(isa)->bf16_pairs);
  const int per_word = dynamic ? 4 : pairs ? 2 : 1, unit = per_word == 1 ? 8 : per_word * kUnit;
  m.words = (m.columns + unit - 1) / unit * unit / per_word;
  m.padded = m.words * per_word;
  m.word_scales = dynamic ? 2 : m.values == kInt4 ? 2 * m.spans : whole ? m.spans : 0;
  m.stretch_log = m.group ? __builtin_ctz(kSpan / m.group) : kOneStretch;
  m.span_bytes = int64_t{m.span} * kLanes * bits(m.values) / 8;
  m.head_bytes = m.groups ? align(int64_t{groups_of_head(m)} * kLanes * (number_bytes(m.scales) + m.zero_points)) : 0;
  m.stretch_bytes = m.head_bytes + kSpan / m.span * m.span_bytes;
  const int64_t last_columns = m.padded - (m.spans - 1) * m.span;
  m.block_bytes = align(values_at(m, m.spans - 1) + last_columns * kLanes * bits(m.values) / 8);
  m.bytes = m.blocks * m.block_bytes;
  return 0;
}

namespace {

// For every row and span, values(canonical offset, record offset, bytes), and where it begins a group
// scale(canonical index, record offset of the head, index in the head).
template <class Scale, class Values>
void each_span(const MoeMatrix& m, Scale scale, Values values) {
  const int64_t row_bytes = (int64_t{m.columns} * bits(m.values) + 7) / 8, of_span = m.span * bits(m.values) / 8;
  for (int row = 0; row < m.rows * (1 + m.gated); ++row) {
    const int part = row / m.rows, within = row % m.rows, lane = within % kLanes;
    const int64_t block = (int64_t{within / kLanes} * (1 + m.gated) + part) * m.block_bytes;
    for (int span = 0; span < m.spans; ++span) {
      const int64_t at = span * of_span, bytes = row_bytes - at < of_span ? row_bytes - at : of_span;
      values(row * row_bytes + at, block + values_at(m, span) + lane * piece_bytes(m.values), bytes);
      if (span >= m.groups) continue;
      const int64_t group = int64_t{row / m.group_rows} * m.groups + span;
      scale(group, block + head_at(m, span), place_in_head(m, span) * kLanes + lane);
    }
  }
}

}  // namespace

MOE_API void moe_pack(const MoeMatrix* matrix, uint8_t* record, const uint8_t* values, const uint8_t* scales,
                      const uint8_t* zeros) {
  const MoeMatrix& m = *matrix;
  const int size = number_bytes(m.scales), zeros_at = groups_of_head(m) * kLanes * size;
  std::memset(record, 0, m.bytes);
  each_span(
      m,
      [&](int64_t from, int64_t head, int place) {
        std::memcpy(record + head + place * size, scales + from * size, size);
        if (m.zero_points) record[head + zeros_at + place] = zeros[from];
      },
      [&](int64_t from, int64_t lane, int64_t bytes) { row_in(m.values, values + from, bytes, record + lane); });
}

MOE_API void moe_unpack(const MoeMatrix* matrix, const uint8_t* record, uint8_t* values, uint8_t* scales,
                        uint8_t* zeros) {
  const MoeMatrix& m = *matrix;
  const int size = number_bytes(m.scales), zeros_at = groups_of_head(m) * kLanes * size;
  each_span(
      m,
      [&](int64_t to, int64_t head, int place) {
        std::memcpy(scales + to * size, record + head + place * size, size);
        if (m.zero_points) zeros[to] = record[head + zeros_at + place];
      },
      [&](int64_t to, int64_t lane, int64_t bytes) { row_out(m.values, record + lane, bytes, values + to); });
}

// Streaming a weight touches a new page every 4 KB otherwise, which halves the bandwidth of a virtual machine.
MOE_API void moe_huge_pages(void* start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  madvise(start, bytes, MADV_HUGEPAGE);
#else
  (void)start, (void)bytes;
#endif
}

MOE_API int32_t moe_abi() { return 3; }
