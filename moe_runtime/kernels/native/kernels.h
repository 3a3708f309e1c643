// The kernels themselves, in terms of the lanes that the including file defines: F32 and I32 hold one number of each of
// 16 rows, W16 a pair of int16 of each, W8 four int8. Included once per instruction set.
//
// Whole numbers (int8, int4, e2m1): activations are int16 with a scale for every span of columns, weights become int16
// as they are read, and a span's products add up in 32 bits. That cannot overflow: an activation is at most 32767, a
// span at most 128 columns, and a number at most 128 (int8), 15 (int4 less its zero point) or 12 (e2m1, doubled), and
// 32767 * 128 * 128 < 2^29. Floats: sums of a span in the order of columns, then the spans' sums in order. Either way
// a row's sums do not depend on how many rows share the pass.
#pragma once

// In this order, since each builds on those before it.
#include "pass.h"
#include "whole.h"
#include "floats.h"
#include "streams.h"
#include "dot.h"
#include "rows.h"
#include "peaks.h"

namespace {

// kPairs: with the instructions for bf16.
template <bool kPairs>
constexpr KernelTable table_of(const char* name) {
  return {name, kPanelRows, kPairs, kTileBlocks * kTileColumns16 / 2 * sizeof(W16), panel_rows<kPairs>, dot<kPairs>,
          prepare<kPairs>, pack_panel, silu_mul, add_scaled, store, peak_float, peak_pairs, peak_bytes, read};
}

}  // namespace
