// What one instruction set offers. experts.cpp and linear.cpp divide the work; these functions do it.
#pragma once
#include "abi.h"
#include "lanes.h"

// Prepared activations of some rows that go over a weight together. Panel p holds Split(rows, panel_rows()).size(p)
// rows, four words of each at a time: [word / 4][row][word % 4], and scales [scale][row]; one pointer walks over all.
struct Strip {
  const int32_t* words;  // a 32-bit word: a pair of int16, four int8 or a float
  const float* scales;
  int rows;
};

struct KernelTable {
  const char* name;
  int most_rows;    // of a panel
  bool bf16_pairs;  // multiplies bf16 by bf16, so that activations are prepared as such
  int64_t scratch_bytes;

  // How many rows the panels of a strip of so many rows hold at most.
  int (*panel_rows)(const MoeMatrix& matrix, int rows);

  // Products of `blocks` (1 or 2) row blocks from `block` with a strip's rows, scaled: out[block][row][lane].
  // A row's result does not depend on the other rows: whole numbers add up exactly, floats in the order of columns.
  void (*dot)(const MoeMatrix& matrix, const uint8_t* record, int block, int blocks, const Strip& strip, void* scratch,
              float* out);
  // One row of x as words and scales of the matrix.
  void (*prepare)(const MoeMatrix& matrix, const void* x, int32_t x_type, int32_t* words, float* scales);
  // Rows of words into one panel.
  void (*pack_panel)(const int32_t* const* rows, int count, int words, int32_t* panel);
  void (*silu_mul)(const float* gate, const float* up, int n, float* out);
  void (*add_scaled)(const float* x, float scale, int n, float* y);  // y += scale * x
  void (*store)(const float* x, int n, int32_t y_type, void* y);
  // One thread's share of a measurement: operations done, to be divided by the time.
  double (*peak_float)(int64_t repeats);
  double (*peak_pairs)(int64_t repeats);
  double (*peak_bytes)(int64_t repeats);
  int64_t (*read)(const uint8_t* start, int64_t bytes);
};

const KernelTable* avx512bf16_kernels();  // null where this build or machine has none
const KernelTable* avx512_kernels();
const KernelTable* avx2_kernels();
const KernelTable* portable_kernels();
const KernelTable* kernels_of(int32_t isa);

constexpr int kStripPanels = 8;  // of most_rows, at most

inline int64_t number_offset(int32_t type, int64_t n) { return n * number_bytes(type); }
