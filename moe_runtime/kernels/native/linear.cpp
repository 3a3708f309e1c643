// One linear layer: first the rows of x are prepared, panel by panel, then the threads take row blocks of the weight.
#include <atomic>
#include <new>

#include "arena.h"
#include "kernel_table.h"
#include "pause.h"
#include "threads.h"

namespace {

constexpr int64_t kMostScratch = 64 << 20;

struct Private {
  uint8_t* tile;
  float* products;
  int32_t* words;
  float* scales;
};

class Job {
 public:
  Job(const MoeLinear& linear, const MoeLinearCall& call, const KernelTable& kernels, int64_t first, int rows)
      : linear_(linear), m_(linear.matrix), call_(call), k_(kernels), first_(first), rows_(rows),
        strips_(rows, kernels.most_rows * kStripPanels) {}

  bool run() {
    const int64_t each = int64_t{m_.blocks} * strips_.count / (16 * call_.threads);
    blocks_per_item_ = static_cast<int>(each < 2 ? each < 1 ? 1 : 2 : each < m_.blocks ? each & ~1 : m_.blocks);
    items_per_strip_ = (m_.blocks + blocks_per_item_ - 1) / blocks_per_item_;
    for (int s = 0; s < strips_.count; ++s) prepare_items_ += panels(s).count;
    to_prepare_ = prepare_items_;
    lay_out();
    if (!arena_.allocate()) return false;
    lay_out();
    run_on_threads(call_.threads, [](void* job, int number) { static_cast<Job*>(job)->work(number); }, this);
    return true;
  }

 private:
  void lay_out() {
    arena_.take(words_, int64_t{rows_} * m_.words);
    arena_.take(scales_, int64_t{rows_} * m_.word_scales);
    arena_.take(private_, call_.threads);
    for (int i = 0; i < call_.threads; ++i) {
      Private mine;
      arena_.take(mine.tile, k_.scratch_bytes);
      arena_.take(mine.products, int64_t{2} * k_.most_rows * kStripPanels * kLanes);
      arena_.take(mine.words, int64_t{k_.most_rows} * m_.words);
      arena_.take(mine.scales, int64_t{k_.most_rows} * m_.word_scales);
      if (private_) private_[i] = mine;
    }
  }

  void work(int number) {
    for (;;) {
      int item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item < prepare_items_) {
        prepare(item, private_[number]);
      } else if ((item -= prepare_items_) < items_per_strip_ * strips_.count) {
        wait_for_zero(to_prepare_);
        multiply(item / items_per_strip_, item % items_per_strip_ * blocks_per_item_, private_[number]);
      } else {
        return;
      }
    }
  }

  Split panels(int strip) const { return {strips_.size(strip), k_.panel_rows(m_, strips_.size(strip))}; }

  const uint8_t* x(int64_t row) const {
    return static_cast<const uint8_t*>(call_.x) + number_offset(call_.x_type, (first_ + row) * m_.columns);
  }

  void prepare(int panel, const Private& mine) {
    int strip = 0;
    for (int here; panel >= (here = panels(strip).count); ++strip) panel -= here;
    const int size = panels(strip).size(panel);
    const int64_t first = strips_.first(strip) + panels(strip).first(panel);
    const int32_t* rows[kLanes];
    for (int r = 0; r < size; ++r) {
      int32_t* words = mine.words + int64_t{r} * m_.words;
      float* scales = mine.scales + int64_t{r} * m_.word_scales;
      k_.prepare(m_, x(first + r), call_.x_type, words, scales);
      rows[r] = words;
      for (int s = 0; s < m_.word_scales; ++s) scales_[first * m_.word_scales + s * size + r] = scales[s];
    }
    k_.pack_panel(rows, size, m_.words, words_ + first * m_.words);
    to_prepare_.fetch_sub(1, std::memory_order_acq_rel);
  }

  void multiply(int index, int block, const Private& mine) {
    const int64_t first = strips_.first(index);
    const Strip strip = {words_ + first * m_.words, scales_ + first * m_.word_scales, strips_.size(index)};
    const int end = block + blocks_per_item_ < m_.blocks ? block + blocks_per_item_ : m_.blocks;
    for (; block < end; block += 2) {
      const int two = end - block < 2 ? 1 : 2;
      k_.dot(m_, linear_.record, block, two, strip, mine.tile, mine.products);
      for (int b = 0; b < two; ++b) finish(first, block + b, strip.rows, mine.products + b * strip.rows * kLanes);
    }
  }

  void finish(int64_t first, int block, int rows, float* products) {
    const int column = block * kLanes, columns = m_.rows - column < kLanes ? m_.rows - column : kLanes;
    for (int r = 0; r < rows; ++r, products += kLanes) {
      if (linear_.bias) k_.add_scaled(linear_.bias + column, 1, columns, products);
      const int64_t at = (first_ + first + r) * m_.rows + column;
      k_.store(products, columns, call_.x_type, static_cast<uint8_t*>(call_.y) + number_offset(call_.x_type, at));
    }
  }

  const MoeLinear& linear_;
  const MoeMatrix& m_;
  const MoeLinearCall& call_;
  const KernelTable& k_;
  const int64_t first_;
  const int rows_;
  const Split strips_;
  int blocks_per_item_ = 0, items_per_strip_ = 0, prepare_items_ = 0;
  Arena arena_;
  int32_t* words_ = nullptr;
  float* scales_ = nullptr;
  Private* private_ = nullptr;
  std::atomic<int> next_{0}, to_prepare_{0};
};

}  // namespace

MOE_API int32_t moe_linear(const MoeLinear* linear, const MoeLinearCall* given) {
  MoeLinearCall call = *given;
  call.threads = call.threads < 1 ? 1 : call.threads < kMostThreads ? call.threads : kMostThreads;
  const int64_t room = kMostScratch / (4 * (linear->matrix.words + linear->matrix.word_scales));
  const int64_t piece = room < 64 ? 64 : room;
  for (int64_t first = 0; first < call.tokens; first += piece) {
    const int64_t rows = call.tokens - first < piece ? call.tokens - first : piece;
    if (!Job(*linear, call, *kernels_of(call.isa), first, static_cast<int>(rows)).run()) return kNoMemory;
  }
  return kOk;
}
