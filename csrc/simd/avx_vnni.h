// AVX2's words, compiled with AVX-VNNI: multiply_add is then one instruction.
#pragma once

#include "simd/avx2.h"
