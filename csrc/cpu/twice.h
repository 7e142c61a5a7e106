// Compiles the kernels of PRL_KERNELS, a file name, once for each path: namespace prl::portable, vectors of 16 bytes, which
// every processor of 64 bits has, and prl::wide, of 64 bytes, AVX-512. One source and no fused arithmetic give the same bits on
// both. `PRL_CHOOSE(f)` is the f of the path that serves this process.

#pragma once

#define PRL_PATH portable
#define PRL_WIDTH 16
namespace prl::portable {
#include "vector.h"
#include PRL_KERNELS
}  // namespace prl::portable
#undef PRL_PATH
#undef PRL_WIDTH

#ifdef PRL_X86
#ifdef __clang__
#pragma clang attribute push(PRL_AVX512, apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma,bmi,bmi2")
#endif
#define PRL_PATH wide
#define PRL_WIDTH 64
namespace prl::wide {
#include "vector.h"
#include PRL_KERNELS
}  // namespace prl::wide
#undef PRL_PATH
#undef PRL_WIDTH
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#define PRL_CHOOSE(f) (prl::avx512() ? prl::wide::f : prl::portable::f)
#else
#define PRL_CHOOSE(f) (prl::portable::f)
#endif
