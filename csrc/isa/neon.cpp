#include "simd/neon.h"

#include "kernels/attention.h"
#include "kernels/write.h"

namespace tightkv {
const KernelTable kNeonKernels{Simd::kName, write_tokens, attend_item, reduce_item};
}  // namespace tightkv
