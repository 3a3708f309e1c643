// What Python calls, by ctypes: plain structs and functions, no Python or torch headers.
// library.py mirrors the structs field by field; moe_abi() guards against a library of another version.
#pragma once
#include <cstdint>

#define MOE_API extern "C" __attribute__((visibility("default")))

enum Values : int32_t { kInt8, kInt8Dynamic, kInt4, kE2m1, kE4m3, kBf16, kFp16, kFp32 };
enum Numbers : int32_t { kNone, kFloat32, kFloat16, kBfloat16, kE8m0 };
enum Status : int32_t { kOk, kNoMemory, kBadSlot, kEmptySlot };

// A weight as the kernels stream it: blocks of 16 rows, each row of which is a lane. Python gives the first part and
// moe_plan derives the second. A record is block after block, a block is stretch after stretch of columns, and a
// stretch has a head, scales and then zero points of its groups, and its values: all is read in one direction.
struct MoeMatrix {
  int32_t values, scales;      // Values, Numbers
  int32_t rows, columns;       // outputs (of gate alone, where gated) and inputs
  int32_t group_rows, group;   // rows and columns that share a scale; group 0: the whole row
  int32_t zero_points, gated;  // gated: gate rows, then as many up rows; their blocks alternate in the record

  int32_t blocks, padded;      // 16-row blocks, gate's and up's together; columns, to a multiple of 8 or 16
  int32_t groups;              // scales of a row
  int32_t span, spans;         // columns that are summed up before anything is scaled, and how many of them a row has
  int32_t words, word_scales;  // 32-bit words and scales of a row of prepared activations
  int32_t stretch_log;         // of the spans in a stretch, which has 128 columns where there are groups, else all
  int64_t span_bytes, head_bytes, stretch_bytes, block_bytes, bytes;  // of a span's values, ..., of a record
};

struct MoeBank {
  MoeMatrix gate_up, down;
  const uint8_t* gate_up_records;  // one after another; an expert's are `bytes` of the matrix apart
  const uint8_t* down_records;
  const uint8_t* stored;  // per position: 1 where an expert is
  int64_t experts;
};

struct MoeCall {
  const void* x;      // [tokens, columns of gate_up], contiguous
  const void* slots;  // [tokens, picks], int32 or int64
  const float* weights;
  void* y;  // [tokens, rows of down] in x's type
  int64_t tokens;
  int32_t picks, x_type, wide_slots, threads, isa, unused;
  int64_t bad_slot;  // out: what kBadSlot and kEmptySlot are about
};

struct MoeLinear {
  MoeMatrix matrix;
  const uint8_t* record;
  const float* bias;  // [rows] or null
};

struct MoeLinearCall {
  const void* x;
  void* y;
  int64_t tokens;
  int32_t x_type, threads, isa;
};

// A step's attention over a paged KV cache. A slice is some tokens of one request, from position `starts` on; its blocks
// are tables[table_begins...]. Every position up to a token's own is read, or the last `window` of them (0: all).
struct MoeAttention {
  const void* q;       // [T, heads, dim], contiguous, float32 or bfloat16, as are the others
  const void* keys;    // [kv_heads, blocks, block_size, dim]
  const void* values;  // the same
  void* out;           // [T, heads, dim]
  const int32_t *first_rows, *starts, *tokens, *table_begins, *tables;
  int64_t blocks;
  int32_t slices, heads, kv_heads, dim, block_size, window, bfloat16, threads;
  float scale;
};

MOE_API int32_t moe_abi();
MOE_API int32_t moe_isa(const char* name);       // number of an instruction set that this machine has, or -1
MOE_API int32_t moe_plan(MoeMatrix* matrix, int32_t isa);  // 0, or 1 where the given part makes no sense
MOE_API void moe_pack(const MoeMatrix* matrix, uint8_t* record, const uint8_t* values, const uint8_t* scales,
                      const uint8_t* zeros);
MOE_API void moe_unpack(const MoeMatrix* matrix, const uint8_t* record, uint8_t* values, uint8_t* scales,
                        uint8_t* zeros);
MOE_API void moe_huge_pages(void* start, int64_t bytes);
MOE_API int32_t moe_experts(const MoeBank* bank, MoeCall* call);
MOE_API int32_t moe_linear(const MoeLinear* linear, const MoeLinearCall* call);
// Operations a second (a multiply and an add are two) of one kind on so many threads at once, or bytes read.
MOE_API double moe_peak(int32_t isa, const char* kind, int32_t threads, int64_t repeats);
MOE_API double moe_read_bandwidth(const uint8_t* start, int64_t bytes, int32_t threads, int32_t isa);
// 1 where there are too many heads per KV head, or the head dimension is too large.
MOE_API int32_t moe_attention(const MoeAttention* call);
