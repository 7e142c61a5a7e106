// What every CPU kernel shares: the stable ABI's names in short, tensors made and read, threads, and the choice of path.
//
// Each op has a portable path and, where it pays, one of AVX-512 with BF16; `avx512()` chooses at run time, so that one build
// serves every processor. Functions of the second are marked PRL_AVX512 and stand between `#ifdef PRL_X86`. Lambdas and
// templates of the standard library do not inherit the mark: keep them out of such functions.
// The build has -ffp-contract=off: a multiplication and an addition become one only where the code says fma.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PRL_X86 1
#include <immintrin.h>
#define PRL_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma,bmi,bmi2")))
#define PRL_AVX512_INLINE PRL_AVX512 inline __attribute__((always_inline))
#endif

namespace prl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr ScalarType kBF16 = ScalarType::BFloat16;
constexpr ScalarType kF32 = ScalarType::Float;
constexpr ScalarType kF8 = ScalarType::Float8_e4m3fn;
constexpr ScalarType kI64 = ScalarType::Long;
constexpr int64_t kBlock = 128;

// Whether the processor has AVX-512 with BF16 and `force_portable` has not turned it off.
bool avx512();

// A bfloat16 as its 16 bits, and an FP8 code as its 8.
using bf16 = uint16_t;
using f8 = uint8_t;

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float to_float(bf16 x) { return bits_to_float(uint32_t(x) << 16); }
inline float to_float(float x) { return x; }

// Round to nearest even, as torch does; NaN becomes torch's 0x7FC0.
inline bf16 to_bf16(float x) {
  uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline bf16 from_float<bf16>(float x) { return to_bf16(x); }

// Pointers to contiguous data; the caller knows the type (the op's public function has checked it).
template <class T>
const T* in(const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); }
template <class T>
const T* in(const std::optional<Tensor>& t) { return t ? in<T>(*t) : nullptr; }
template <class T>
T* out(const Tensor& t) { return static_cast<T*>(t.mutable_data_ptr()); }

// Uninitialised, on the CPU: what is returned must be written in full. Past the dispatcher, which takes a microsecond.
inline Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  int64_t strides[4], stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i] > 1 ? sizes.begin()[i] : 1) strides[i] = stride;
  int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      int64_t(sizes.size()), sizes.begin(), strides, type, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

// f(begin, end) over [0, n) on torch's threads, at least `grain` of n each. What is computed must not depend on the split.
template <class F>
void parallel(int64_t n, int64_t grain, const F& f) {
  if (n > 0) torch::stable::parallel_for(0, n, grain > 0 ? grain : 1, f);
}

}  // namespace prl
