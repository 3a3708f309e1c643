// One call over all experts hit. The picks are sorted by expert into strips of rows, and three kinds of work items,
// numbered in this order, are taken by the threads one after another:
//   prepare   some tokens' activations
//   gate_up   a strip through some pairs of gate and up blocks, silu(gate) * up; whoever finishes a strip prepares its
//             activations for down
//   down      some row blocks of every expert's down, strip after strip in ascending order of position, added up with
//             the routed weights: no two threads write the same numbers, and a token's terms have one order
// An item waits for what it needs of earlier items, all of which somebody is already working on.
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "arena.h"
#include "kernel_table.h"
#include "pause.h"
#include "threads.h"

namespace {

constexpr int64_t kMostScratch = 64 << 20;  // per call; more tokens go in pieces
constexpr int kTokensPerItem = 8;

struct StripOfExpert {
  int expert, first, rows;  // rows of the sorted picks
};

struct Private {  // to one thread
  uint8_t* tile;
  int32_t* panels;
  float *panel_scales, *products, *sums;
};

class Job {
 public:
  Job(const MoeBank& bank, const MoeCall& call, const KernelTable& kernels, int64_t first, int tokens)
      : bank_(bank), call_(call), k_(kernels), first_(first), tokens_(tokens) {}

  bool run() {
    sort();
    plan();
    lay_out();
    if (!arena_.allocate()) return false;
    lay_out();
    for (size_t i = 0; i < strips_.size(); ++i) new (&gate_up_left_[i]) std::atomic<int>(pairs() + 1);
    run_on_threads(call_.threads, [](void* job, int number) { static_cast<Job*>(job)->work(number); }, this);
    return true;
  }

  static int64_t scratch_per_token(const MoeBank& bank, const MoeCall& call) {
    return 4 * (bank.gate_up.words + call.picks * (int64_t{bank.down.words} + bank.down.padded) + 8 * kLanes);
  }

 private:
  int pairs() const { return bank_.gate_up.blocks / 2; }
  int inner() const { return pairs() * kLanes; }
  int strip_rows() const { return k_.most_rows * kStripPanels; }

  int64_t slot(int64_t pick) const {
    const int64_t at = first_ * call_.picks + pick;
    return call_.wide_slots ? static_cast<const int64_t*>(call_.slots)[at]
                            : static_cast<const int32_t*>(call_.slots)[at];
  }

  // Rows by expert, and within an expert by token and pick.
  void sort() {
    const int64_t picks = int64_t{tokens_} * call_.picks;
    std::vector<int> next(bank_.experts + 1);
    for (int64_t pick = 0; pick < picks; ++pick)
      if (slot(pick) >= 0) ++next[slot(pick) + 1];
    for (int64_t expert = 0; expert < bank_.experts; ++expert) {
      const int rows = next[expert + 1];
      const Split strips(rows, strip_rows());
      for (int i = 0; i < strips.count; ++i)
        strips_.push_back({static_cast<int>(expert), next[expert] + strips.first(i), strips.size(i)});
      next[expert + 1] += next[expert];
    }
    rows_ = next[bank_.experts];
    token_.resize(rows_), weight_.resize(rows_);
    for (int64_t pick = 0; pick < picks; ++pick) {
      if (slot(pick) < 0) continue;
      const int row = next[slot(pick)]++;
      token_[row] = static_cast<int>(pick / call_.picks);
      weight_[row] = call_.weights[first_ * call_.picks + pick];
    }
  }

  // Items small enough to keep all threads busy to the end, and large enough to stream.
  void plan() {
    const int threads = call_.threads;
    const auto share = [](int64_t work, int items, int most) {
      const int64_t each = work / items;
      return static_cast<int>(each < 1 ? 1 : each < most ? each : most);
    };
    pairs_per_item_ = share(int64_t{pairs()} * static_cast<int64_t>(strips_.size()), 24 * threads, pairs());
    blocks_per_item_ = share(bank_.down.blocks, 12 * threads, 8);
    if (blocks_per_item_ > 1) blocks_per_item_ &= ~1;  // they are computed in twos
    prepare_items_ = (tokens_ + kTokensPerItem - 1) / kTokensPerItem;
    items_per_strip_ = (pairs() + pairs_per_item_ - 1) / pairs_per_item_;
    gate_up_items_ = items_per_strip_ * static_cast<int>(strips_.size());
    down_items_ = (bank_.down.blocks + blocks_per_item_ - 1) / blocks_per_item_;
    to_prepare_ = prepare_items_;
  }

  void lay_out() {
    const MoeMatrix &gate_up = bank_.gate_up, &down = bank_.down;
    arena_.take(gate_up_left_, static_cast<int64_t>(strips_.size()));
    arena_.take(x_words_, int64_t{tokens_} * gate_up.words);
    arena_.take(x_scales_, int64_t{tokens_} * gate_up.word_scales);
    arena_.take(acts_, int64_t{rows_} * inner());
    arena_.take(act_words_, int64_t{rows_} * down.words);
    arena_.take(act_scales_, int64_t{rows_} * down.word_scales);
    const int words = gate_up.words > down.words ? gate_up.words : down.words;
    const int scales = gate_up.word_scales > down.word_scales ? gate_up.word_scales : down.word_scales;
    arena_.take(private_, call_.threads);
    for (int i = 0; i < call_.threads; ++i) {
      Private mine;
      arena_.take(mine.tile, k_.scratch_bytes);
      arena_.take(mine.panels, int64_t{strip_rows()} * words);
      arena_.take(mine.panel_scales, int64_t{strip_rows()} * scales);
      arena_.take(mine.products, int64_t{2} * strip_rows() * kLanes);
      arena_.take(mine.sums, int64_t{tokens_} * blocks_per_item_ * kLanes);
      if (private_) private_[i] = mine;
    }
  }

  void work(int number) {
    const Private& mine = private_[number];
    for (;;) {
      int item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item < prepare_items_) {
        prepare(item);
      } else if ((item -= prepare_items_) < gate_up_items_) {
        wait_for_zero(to_prepare_);
        gate_up(item / items_per_strip_, item % items_per_strip_ * pairs_per_item_, mine);
      } else if ((item -= gate_up_items_) < down_items_) {
        down(item * blocks_per_item_, mine);
      } else {
        return;
      }
    }
  }

  void prepare(int item) {
    const MoeMatrix& m = bank_.gate_up;
    const auto* x = static_cast<const uint8_t*>(call_.x) + number_offset(call_.x_type, first_ * m.columns);
    for (int64_t t = int64_t{item} * kTokensPerItem; t < tokens_ && t < (item + 1) * kTokensPerItem; ++t)
      k_.prepare(m, x + number_offset(call_.x_type, t * m.columns), call_.x_type, x_words_ + t * m.words,
                 x_scales_ + t * m.word_scales);
    to_prepare_.fetch_sub(1, std::memory_order_acq_rel);
  }

  // Rows in panels, as dot takes them; rows[i] and scales[i] are whatever the caller finds for row i of the strip.
  template <class Words, class Scales>
  void pack(const MoeMatrix& m, int count, Words words, Scales scales, int32_t* panels, float* panel_scales) const {
    const Split split(count, k_.panel_rows(m, count));
    for (int p = 0; p < split.count; ++p) {
      const int first = split.first(p), size = split.size(p);
      const int32_t* rows[kLanes];
      for (int r = 0; r < size; ++r) rows[r] = words(first + r);
      k_.pack_panel(rows, size, m.words, panels + int64_t{first} * m.words);
      for (int r = 0; r < size; ++r) {
        const float* from = scales(first + r);
        for (int s = 0; s < m.word_scales; ++s) panel_scales[int64_t{first} * m.word_scales + s * size + r] = from[s];
      }
    }
  }

  Strip strip_of_x(const StripOfExpert& strip, const Private& mine) const {
    const MoeMatrix& m = bank_.gate_up;
    const int* token = token_.data() + strip.first;
    const auto words = [&](int row) { return x_words_ + int64_t{token[row]} * m.words; };
    const auto scales = [&](int row) { return x_scales_ + int64_t{token[row]} * m.word_scales; };
    if (strip.rows == 1) return {words(0), scales(0), 1};
    pack(m, strip.rows, words, scales, mine.panels, mine.panel_scales);
    return {mine.panels, mine.panel_scales, strip.rows};
  }

  void gate_up(int index, int pair, const Private& mine) {
    const StripOfExpert& strip = strips_[index];
    const uint8_t* record = bank_.gate_up_records + strip.expert * bank_.gate_up.bytes;
    const Strip rows = strip_of_x(strip, mine);
    const int end = pair + pairs_per_item_ < pairs() ? pair + pairs_per_item_ : pairs(), done = end - pair;
    for (; pair < end; ++pair) {
      k_.dot(bank_.gate_up, record, 2 * pair, 2, rows, mine.tile, mine.products);
      const int size = strip.rows * kLanes;
      k_.silu_mul(mine.products, mine.products + size, size, mine.products);
      for (int r = 0; r < strip.rows; ++r)
        std::memcpy(acts_ + int64_t{strip.first + r} * inner() + pair * kLanes, mine.products + r * kLanes,
                    kLanes * sizeof(float));
    }
    if (gate_up_left_[index].fetch_sub(done, std::memory_order_acq_rel) - done == 1) finish(index, mine);
  }

  void finish(int index, const Private& mine) {
    const StripOfExpert& strip = strips_[index];
    const MoeMatrix& m = bank_.down;
    const auto at = [&](int row) { return mine.panels + int64_t{row} * m.words; };
    const auto scales_at = [&](int row) { return mine.panel_scales + int64_t{row} * m.word_scales; };
    for (int r = 0; r < strip.rows; ++r)
      k_.prepare(m, acts_ + int64_t{strip.first + r} * inner(), kFloat32, at(r), scales_at(r));
    pack(m, strip.rows, at, scales_at, act_words_ + int64_t{strip.first} * m.words,
         act_scales_ + int64_t{strip.first} * m.word_scales);
    gate_up_left_[index].store(0, std::memory_order_release);
  }

  void down(int block, const Private& mine) {
    const MoeMatrix& m = bank_.down;
    const int blocks = block + blocks_per_item_ < m.blocks ? blocks_per_item_ : m.blocks - block;
    const int width = blocks * kLanes;
    std::memset(mine.sums, 0, int64_t{tokens_} * width * sizeof(float));
    for (size_t index = 0; index < strips_.size(); ++index) {
      const StripOfExpert& strip = strips_[index];
      const int64_t first = strip.first;
      wait_for_zero(gate_up_left_[index]);
      const Strip rows = {act_words_ + first * m.words, act_scales_ + first * m.word_scales, strip.rows};
      for (int b = 0; b < blocks; b += 2) {
        const int two = blocks - b < 2 ? 1 : 2;
        k_.dot(m, bank_.down_records + strip.expert * m.bytes, block + b, two, rows, mine.tile, mine.products);
        for (int half = 0; half < two; ++half)
          for (int r = 0; r < strip.rows; ++r)
            k_.add_scaled(mine.products + (half * strip.rows + r) * kLanes, weight_[first + r], kLanes,
                          mine.sums + int64_t{token_[first + r]} * width + (b + half) * kLanes);
      }
    }
    const int column = block * kLanes, columns = m.rows - column < width ? m.rows - column : width;
    for (int64_t t = 0; t < tokens_; ++t)
      k_.store(mine.sums + t * width, columns, call_.x_type,
               static_cast<uint8_t*>(call_.y) + number_offset(call_.x_type, (first_ + t) * m.rows + column));
  }

  const MoeBank& bank_;
  const MoeCall& call_;
  const KernelTable& k_;
  const int64_t first_;
  const int tokens_;
  int rows_ = 0;
  std::vector<StripOfExpert> strips_;
  std::vector<int> token_;      // of each row
  std::vector<float> weight_;   // likewise
  int pairs_per_item_ = 0, blocks_per_item_ = 0, items_per_strip_ = 0;
  int prepare_items_ = 0, gate_up_items_ = 0, down_items_ = 0;

  Arena arena_;
  std::atomic<int>* gate_up_left_ = nullptr;  // per strip: pairs to do and one for the end; 0 when down may start
  int32_t *x_words_ = nullptr, *act_words_ = nullptr;
  float *x_scales_ = nullptr, *acts_ = nullptr, *act_scales_ = nullptr;
  Private* private_ = nullptr;
  std::atomic<int> next_{0}, to_prepare_{0};
};

int32_t check_slots(const MoeBank& bank, MoeCall& call) {
  for (int64_t i = 0; i < call.tokens * call.picks; ++i) {
    const int64_t slot = call.wide_slots ? static_cast<const int64_t*>(call.slots)[i]
                                         : static_cast<const int32_t*>(call.slots)[i];
    call.bad_slot = slot;
    if (slot < -1 || slot >= bank.experts) return kBadSlot;
    if (slot >= 0 && !bank.stored[slot]) return kEmptySlot;
  }
  return kOk;
}

}  // namespace

MOE_API int32_t moe_experts(const MoeBank* bank, MoeCall* call) {
  const int32_t status = check_slots(*bank, *call);
  if (status != kOk) return status;
  call->threads = call->threads < 1 ? 1 : call->threads < kMostThreads ? call->threads : kMostThreads;
  const int64_t room = kMostScratch / Job::scratch_per_token(*bank, *call), piece = room < 64 ? 64 : room;
  try {
    for (int64_t first = 0; first < call->tokens; first += piece) {
      const int64_t tokens = call->tokens - first < piece ? call->tokens - first : piece;
      if (!Job(*bank, *call, *kernels_of(call->isa), first, static_cast<int>(tokens)).run()) return kNoMemory;
    }
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  return kOk;
}
