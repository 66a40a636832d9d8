#pragma once

// Everything here must end up inside one loop: a call would put registers through memory.
#define TIGHTKV_INLINE_LAMBDA __attribute__((always_inline))
#define TIGHTKV_INLINE inline TIGHTKV_INLINE_LAMBDA
