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

// n rows as few panels of at most `most` rows, as even as they can be.
struct Split {
  int count, base, extra;
  Split(int n, int most) : count((n + most - 1) / most), base(count ? n / count : 0), extra(count ? n % count : 0) {}
  int size(int i) const { return base + (i < extra); }
  int first(int i) const { return i * base + (i < extra ? i : extra); }
};
