#include "simd/avx512_vnni.h"

#include "kernels/attention.h"
#include "kernels/layer.h"
#include "kernels/linear.h"
#include "kernels/write.h"

namespace tightkv {
const KernelTable kAvx512VnniKernels{Simd::kName,   write_tokens,       attend_item,
                                     reduce_item,   linear_tile,        rms_norm_tokens,
                                     rotate_tokens, silu_and_mul_tokens};
}  // namespace tightkv
