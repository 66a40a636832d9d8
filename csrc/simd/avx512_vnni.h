// AVX-512's words, compiled with VNNI: multiply_add is then one instruction.
#pragma once

#include "simd/avx512.h"
