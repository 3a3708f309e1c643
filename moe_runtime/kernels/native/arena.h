// Aligned parts of one allocation, so that a call asks for memory once.
#pragma once
#include <cstdint>
#include <cstdlib>

// Walk over all parts with `take`, `allocate`, and walk over them again: the first walk only measures.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(start_); }

  template <class T>
  void take(T*& part, int64_t count) {
    part = start_ ? reinterpret_cast<T*>(start_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
  bool allocate() {
    start_ = static_cast<uint8_t*>(std::aligned_alloc(64, used_ ? used_ : 64));
    used_ = 0;
    return start_ != nullptr;
  }

 private:
  uint8_t* start_ = nullptr;
  int64_t used_ = 0;
};
