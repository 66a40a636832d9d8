// A call would pass vectors through memory.
#pragma once

#define TIGHTKV_INLINE __attribute__((always_inline)) inline
