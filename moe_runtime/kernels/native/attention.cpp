// Attention over a paged KV cache, read in place, tile by tile with an online softmax (FlashAttention, Dao et al. 2022):
// the score matrix never exists.
//
// A task is one KV head with some query rows of one slice: for decode, a piece of the context (split-K, so that one long
// request keeps every core busy); for a chunk of a prompt, a few of its tokens. Tiles and pieces are cut at fixed
// positions of the context, and a row's arithmetic depends on nothing but its own positions: no neighbour changes it.
//
// Legend: T tokens, A query heads, G kv heads, R = A / G, D head dimension, N blocks, B tokens a block.

#pragma GCC optimize("fp-contract=fast")  // sums of products, each row by itself

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "abi.h"
#include "threads.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define MULTIVERSIONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MULTIVERSIONED
#endif
#define INLINE inline __attribute__((always_inline))
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // before version 12 gcc knows this one alone
#define PICK(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

namespace {

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64)));
constexpr int kLanes = 16;
constexpr int kTile = 16;         // tokens of the context whose scores are computed at once
constexpr int kPiece = 1024;      // tokens of the context that one decode task reads
constexpr int kMaxDim = 256;
constexpr int kMaxRows = 64;      // query rows (tokens times heads) of one task
constexpr int kRowFloats = 8192;  // of queries, and of sums: what half of a first-level cache holds
constexpr float kLowest = -1e30f; // finite, so that a tile without a visible token gives no NaN

INLINE float widen(float x) { return x; }
INLINE float widen(uint16_t bf16) {
    const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
INLINE void narrow(float x, float* out) { *out = x; }
INLINE void narrow(float x, uint16_t* out) {  // to the nearest, ties to even; a NaN stays one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    *out = static_cast<uint16_t>(x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0 to 2 units in the last place: 2^n * p(f), the polynomial of Cephes' expf.
INLINE Vec exp_nonpositive(Vec x) {
    x = x > -87.0f ? x : Vec{} - 87.0f;
    const Vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    const Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = (p * f) * f + f + 1.0f;
    const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * (Vec)bits;
}

INLINE float largest(Vec v) {
    float half[8], quarter[4];
    for (int i = 0; i < 8; ++i) half[i] = v[i] > v[i + 8] ? v[i] : v[i + 8];
    for (int i = 0; i < 4; ++i) quarter[i] = half[i] > half[i + 4] ? half[i] : half[i + 4];
    const float a = quarter[0] > quarter[2] ? quarter[0] : quarter[2], b = quarter[1] > quarter[3] ? quarter[1] : quarter[3];
    return a > b ? a : b;
}

INLINE float sum(Vec v) {
    float half[8], quarter[4];
    for (int i = 0; i < 8; ++i) half[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; ++i) quarter[i] = half[i] + half[i + 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

struct AttentionTask {
    int slice, kv_head;
    int first, tokens;  // of the slice's tokens
    int from, to;       // of the context
    int64_t partial;    // where the rows of a piece go among the partial results, or -1: straight to the output
};

// The running softmax of some query rows: largest score, sum of weights, weighted sum of values [rows][padded D].
struct Rows {
    int count, dim, padded;
    alignas(64) float q[kMaxRows * kMaxDim];
    alignas(64) float out[kMaxRows * kMaxDim];
    float most[kMaxRows], total[kMaxRows];
    int from[kMaxRows], to[kMaxRows];  // the positions [from, to) that each row sees
};

// One tile of the context in float32: rows of keys and values, and, where many queries share it, the keys' columns.
struct Tile {
    const float* key[kTile];
    const float* value[kTile];
    alignas(64) float keys[kTile * kMaxDim];
    alignas(64) float values[kTile * kMaxDim];
    alignas(64) float columns[kMaxDim * kTile];
};

template <typename X>
INLINE const float* row_of(const X* row, float* copy, int dim, int padded) {
    for (int d = 0; d < dim; ++d) copy[d] = widen(row[d]);
    for (int d = dim; d < padded; ++d) copy[d] = 0.0f;
    return copy;
}

template <typename X>
INLINE void load_tile(const MoeAttention& call, const int32_t* table, int g, int at, int count, const Rows& rows,
                      Tile& tile) {
    const X* keys = static_cast<const X*>(call.keys) + static_cast<int64_t>(g) * call.blocks * call.block_size * call.dim;
    const X* values =
        static_cast<const X*>(call.values) + static_cast<int64_t>(g) * call.blocks * call.block_size * call.dim;
    for (int t = 0; t < count; ++t) {
        const int position = at + t;
        const int64_t slot =
            static_cast<int64_t>(table[position / call.block_size]) * call.block_size + position % call.block_size;
        const X* k = keys + slot * call.dim;
        const X* v = values + slot * call.dim;
        if (sizeof(X) == 4 && rows.dim == rows.padded) {
            tile.key[t] = reinterpret_cast<const float*>(k);
            tile.value[t] = reinterpret_cast<const float*>(v);
        } else {
            tile.key[t] = row_of(k, tile.keys + t * rows.padded, rows.dim, rows.padded);
            tile.value[t] = row_of(v, tile.values + t * rows.padded, rows.dim, rows.padded);
        }
    }
}

// Sixteen rows of sixteen numbers to columns, by swapping ever larger halves.
INLINE void transpose(Vec* m) {
    for (int i = 0; i < 16; i += 2) {
        const Vec a = m[i], b = m[i + 1];
        m[i] = PICK(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        m[i + 1] = PICK(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int k = 0; k < 16; k += 4)
        for (int i = k; i < k + 2; ++i) {
            const Vec a = m[i], b = m[i + 2];
            m[i] = PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            m[i + 2] = PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    for (int k = 0; k < 16; k += 8)
        for (int i = k; i < k + 4; ++i) {
            const Vec a = m[i], b = m[i + 4];
            m[i] = PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
            m[i + 4] = PICK(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    for (int i = 0; i < 8; ++i) {
        const Vec a = m[i], b = m[i + 8];
        m[i] = PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        m[i + 8] = PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

INLINE void transpose_keys(const Rows& rows, int count, Tile& tile) {
    for (int d = 0; d < rows.padded; d += kLanes) {
        Vec block[16];
        for (int t = 0; t < kTile; ++t) block[t] = t < count ? *reinterpret_cast<const Vec*>(tile.key[t] + d) : Vec{};
        transpose(block);
        for (int i = 0; i < 16; ++i) *reinterpret_cast<Vec*>(tile.columns + (d + i) * kTile) = block[i];
    }
}

// Scores by the keys' columns: sixteen tokens at once, no sums across a vector. For tiles that many rows share.
INLINE void scores_by_column(const Rows& rows, int row, const Tile& tile, float* scores) {
    const float* q = rows.q + row * rows.padded;
    Vec a = {}, b = {};
    int d = 0;
    for (; d + 2 <= rows.dim; d += 2) {
        a += q[d] * *reinterpret_cast<const Vec*>(tile.columns + d * kTile);
        b += q[d + 1] * *reinterpret_cast<const Vec*>(tile.columns + (d + 1) * kTile);
    }
    if (d < rows.dim) a += q[d] * *reinterpret_cast<const Vec*>(tile.columns + d * kTile);
    *reinterpret_cast<Vec*>(scores) = a + b;
}

INLINE void scores_by_row(const Rows& rows, int row, int count, const Tile& tile, float* scores) {
    const float* q = rows.q + row * rows.padded;
    for (int t = 0; t < count; ++t) {
        Vec sums = {};
        for (int d = 0; d < rows.padded; d += kLanes)
            sums += *reinterpret_cast<const Vec*>(q + d) * *reinterpret_cast<const Vec*>(tile.key[t] + d);
        scores[t] = sum(sums);
    }
}

// Take a tile's scores and values into one row's running softmax.
INLINE void accumulate(Rows& rows, int row, int at, int count, const Tile& tile, float* scores) {
    const int from = rows.from[row] - at, to = std::min(count, rows.to[row] - at);
    if (from > 0 || to < kTile)
        for (int t = 0; t < kTile; ++t) scores[t] = t >= from && t < to ? scores[t] : kLowest;
    const Vec score = *reinterpret_cast<Vec*>(scores);
    const float most = std::max(rows.most[row], largest(score));
    const Vec weight = score > kLowest ? exp_nonpositive(score - most) : Vec{};
    *reinterpret_cast<Vec*>(scores) = weight;
    const float total = sum(weight);
    const float shrink = most > rows.most[row] ? exp_nonpositive(Vec{} + (rows.most[row] - most))[0] : 1.0f;
    rows.most[row] = most;
    rows.total[row] = rows.total[row] * shrink + total;
    float* out = rows.out + row * rows.padded;
    for (int d = 0; d < rows.padded; d += 4 * kLanes) {
        const int vectors = std::min(4, (rows.padded - d) / kLanes);
        Vec sums[4];
        for (int i = 0; i < vectors; ++i) sums[i] = *reinterpret_cast<Vec*>(out + d + i * kLanes) * shrink;
        for (int t = 0; t < count; ++t)
            for (int i = 0; i < vectors; ++i)
                sums[i] += scores[t] * *reinterpret_cast<const Vec*>(tile.value[t] + d + i * kLanes);
        for (int i = 0; i < vectors; ++i) *reinterpret_cast<Vec*>(out + d + i * kLanes) = sums[i];
    }
}

template <typename X>
INLINE void start(const MoeAttention& call, const AttentionTask& task, Rows& rows) {
    const int heads_per_kv = call.heads / call.kv_heads;
    rows.dim = call.dim;
    rows.padded = (call.dim + kLanes - 1) / kLanes * kLanes;
    rows.count = task.tokens * heads_per_kv;
    for (int i = 0; i < task.tokens; ++i) {
        const int position = call.starts[task.slice] + task.first + i;
        const int64_t token = call.first_rows[task.slice] + task.first + i;
        const int end = position + 1, from = call.window > 0 ? std::max(0, end - call.window) : 0;
        for (int r = 0; r < heads_per_kv; ++r) {
            const int row = i * heads_per_kv + r;
            const X* q = static_cast<const X*>(call.q) + (token * call.heads + task.kv_head * heads_per_kv + r) * call.dim;
            float* mine = rows.q + row * rows.padded;
            for (int d = 0; d < rows.padded; ++d) mine[d] = d < call.dim ? widen(q[d]) * call.scale : 0.0f;
            std::memset(rows.out + row * rows.padded, 0, rows.padded * sizeof(float));
            rows.most[row] = kLowest;
            rows.total[row] = 0.0f;
            rows.from[row] = std::max(from, task.from);
            rows.to[row] = std::min(end, task.to);
        }
    }
}

template <typename X>
INLINE void finish(const MoeAttention& call, const AttentionTask& task, const Rows& rows, float* partials) {
    const int heads_per_kv = call.heads / call.kv_heads;
    for (int row = 0; row < rows.count; ++row) {
        const int64_t token = call.first_rows[task.slice] + task.first + row / heads_per_kv;
        const int head = task.kv_head * heads_per_kv + row % heads_per_kv;
        const float* mine = rows.out + row * rows.padded;
        if (task.partial >= 0) {
            float* to = partials + (task.partial + row) * static_cast<int64_t>(call.dim + 2);
            to[0] = rows.most[row];
            to[1] = rows.total[row];
            std::memcpy(to + 2, mine, call.dim * sizeof(float));
            continue;
        }
        X* out = static_cast<X*>(call.out) + (token * call.heads + head) * call.dim;
        for (int d = 0; d < call.dim; ++d) narrow(mine[d] / rows.total[row], out + d);
    }
}

template <typename X>
INLINE void run(const MoeAttention& call, const AttentionTask& task, float* partials) {
    static thread_local Rows rows;
    static thread_local Tile tile;
    start<X>(call, task, rows);
    const int32_t* table = call.tables + call.table_begins[task.slice];
    const bool shared = call.tokens[task.slice] > 1 || rows.count >= 6;
    const int from = *std::min_element(rows.from, rows.from + rows.count);
    const int to = *std::max_element(rows.to, rows.to + rows.count);
    alignas(64) float scores[kTile];
    for (int at = from / kTile * kTile; at < to; at += kTile) {
        const int count = std::min(kTile, to - at);  // what lies behind was never written
        load_tile<X>(call, table, task.kv_head, at, count, rows, tile);
        if (shared) transpose_keys(rows, count, tile);
        for (int row = 0; row < rows.count; ++row) {
            if (at >= rows.to[row] || at + count <= rows.from[row]) continue;
            if (shared)
                scores_by_column(rows, row, tile, scores);
            else
                scores_by_row(rows, row, count, tile, scores);
            accumulate(rows, row, at, count, tile, scores);
        }
    }
    finish<X>(call, task, rows, partials);
}

MULTIVERSIONED void run_float32(const MoeAttention& call, const AttentionTask& task, float* partials) {
    run<float>(call, task, partials);
}
MULTIVERSIONED void run_bfloat16(const MoeAttention& call, const AttentionTask& task, float* partials) {
    run<uint16_t>(call, task, partials);
}

// Where the pieces of one decode row and KV head lie among the partial results.
struct Cut {
    int slice, kv_head, pieces;
    int64_t partial;
};

struct Plan {
    std::vector<AttentionTask> tasks;
    std::vector<Cut> cuts;
    std::vector<float> partials;
};

Plan plan_of(const MoeAttention& call) {
    Plan plan;
    const int rows = call.heads / call.kv_heads, padded = (call.dim + kLanes - 1) / kLanes * kLanes;
    const int tile_tokens = std::max(1, std::min(kMaxRows, kRowFloats / padded) / rows);
    int64_t partials = 0;
    for (int s = 0; s < call.slices; ++s) {
        const int tokens = call.tokens[s], start = call.starts[s];
        if (tokens > 1) {
            // Later tokens see more: the longest tasks first.
            for (int at = (tokens - 1) / tile_tokens * tile_tokens; at >= 0; at -= tile_tokens)
                for (int g = 0; g < call.kv_heads; ++g)
                    plan.tasks.push_back({s, g, at, std::min(tile_tokens, tokens - at), 0, start + tokens, -1});
            continue;
        }
        const int from = call.window > 0 ? std::max(0, start + 1 - call.window) : 0;
        const int first = from / kPiece, pieces = start / kPiece - first + 1;
        for (int g = 0; g < call.kv_heads; ++g) {
            if (pieces > 1) plan.cuts.push_back({s, g, pieces, partials});
            for (int p = 0; p < pieces; ++p) {
                plan.tasks.push_back(
                    {s, g, 0, 1, (first + p) * kPiece, (first + p + 1) * kPiece, pieces > 1 ? partials : -1});
                if (pieces > 1) partials += rows;
            }
        }
    }
    plan.partials.resize(partials * (call.dim + 2));
    return plan;
}

// Put the pieces of one decode row together, in the order of the context.
template <typename X>
void combine(const MoeAttention& call, const float* partials, const Cut& cut) {
    const int rows = call.heads / call.kv_heads;
    const int64_t stride = call.dim + 2, token = call.first_rows[cut.slice];
    std::vector<float> sums(call.dim);
    for (int row = 0; row < rows; ++row) {
        const auto piece = [&](int p) { return partials + (cut.partial + static_cast<int64_t>(p) * rows + row) * stride; };
        float most = kLowest, total = 0.0f;
        for (int p = 0; p < cut.pieces; ++p) most = std::max(most, piece(p)[0]);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int p = 0; p < cut.pieces; ++p) {
            const float weight = std::exp(piece(p)[0] - most);
            total += piece(p)[1] * weight;
            for (int d = 0; d < call.dim; ++d) sums[d] += piece(p)[2 + d] * weight;
        }
        X* out = static_cast<X*>(call.out) + (token * call.heads + cut.kv_head * rows + row) * call.dim;
        for (int d = 0; d < call.dim; ++d) narrow(sums[d] / total, out + d);
    }
}

struct Work {
    const MoeAttention& call;
    Plan& plan;
    std::atomic<size_t> next{0};
};

void work_on(void* argument, int) {
    Work& work = *static_cast<Work*>(argument);
    for (size_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.plan.tasks.size();) {
        const auto run = work.call.bfloat16 ? run_bfloat16 : run_float32;
        run(work.call, work.plan.tasks[i], work.plan.partials.data());
    }
}

}  // namespace

int32_t moe_attention(const MoeAttention* call) {
    if (call->dim > kMaxDim || call->heads / call->kv_heads > kMaxRows) return 1;
    Plan plan = plan_of(*call);
    Work work{*call, plan};
    run_on_threads(call->threads, work_on, &work);
    for (const Cut& cut : plan.cuts)
        call->bfloat16 ? combine<uint16_t>(*call, plan.partials.data(), cut) : combine<float>(*call, plan.partials.data(), cut);
    return 0;
}
