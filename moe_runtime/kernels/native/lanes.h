// Constants and small helpers that every translation unit shares.
#pragma once
#include "abi.h"

constexpr int kLanes = 16;  // rows of a block, whatever the width of the machine's vectors
constexpr int kUnit = 4;    // words of prepared activations that stay together

inline int number_bytes(int32_t numbers) {
  switch (numbers) {
    case kNone: return 0;
    case kFloat32: return 4;
    case kE8m0: return 1;
    default: return 2;
  }
}

// Offsets in a block: of the head that has a span's scale, and of the span's values.
inline int64_t head_at(const MoeMatrix& m, int span) { return (span >> m.stretch_log) * m.stretch_bytes; }
inline int64_t values_at(const MoeMatrix& m, int span) {
  return head_at(m, span) + m.head_bytes + (span & ((1 << m.stretch_log) - 1)) * m.span_bytes;
}
// Which of a head's scales is a span's, and how many it has.
inline int place_in_head(const MoeMatrix& m, int span) { return m.group ? span & ((1 << m.stretch_log) - 1) : 0; }
inline int groups_of_head(const MoeMatrix& m) { return m.group ? 1 << m.stretch_log : 1; }

// n rows as few panels of at most `most` rows, as even as they can be.
struct Split {
  int count, base, extra;
  Split(int n, int most) : count((n + most - 1) / most), base(count ? n / count : 0), extra(count ? n % count : 0) {}
  int size(int i) const { return base + (i < extra); }
  int first(int i) const { return i * base + (i < extra ? i : extra); }
};
