// Memory that a thread keeps from call to call: fresh pages would cost more than the work.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace tightkv {

class Scratch {
 public:
  // At least so many floats, whose values are any; what was had before is gone.
  float* get(int64_t floats) {
    if (floats > size_) {
      memory_.reset(static_cast<float*>(
          ::operator new[](static_cast<size_t>(floats) * sizeof(float), kAlignment)));
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, kAlignment); }
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t size_ = 0;
};

}  // namespace tightkv
