// The quantisers. They are bound by memory, so each reads its input once: a row's block stays in registers between its largest
// magnitude and its codes, a tile of 128x128 in the cache between the rows' codes and the columns'.

#ifndef PRL_PATH

#include "common.h"

#include <cmath>

#define PRL_KERNELS "quantise.cpp"
#include "twice.h"

namespace prl {
namespace {

template <class T>
void rows(const Tensor& x, bool pow2, const Tensor& codes, const Tensor& scales) {
  int64_t m = x.size(0), k = x.size(1);
  auto kernel = PRL_CHOOSE(quantise_rows<T>);
  const T* from = in<T>(x);
  f8* to = out<f8>(codes);
  float* scale = out<float>(scales);
  parallel(m, 32768 / (k + 1), [&](int64_t begin, int64_t end) { kernel(from, m, k, pow2, to, scale, begin, end); });
}

std::tuple<Tensor, Tensor> quantise_rows(const Tensor& x, bool pow2) {
  int64_t m = x.size(0), k = x.size(1);
  Tensor codes = empty({m, k}, kF8), scales = empty({k / kBlock, m}, kF32);
  x.scalar_type() == kBF16 ? rows<bf16>(x, pow2, codes, scales) : rows<float>(x, pow2, codes, scales);
  return {codes, scales};
}

template <class T>
void tiles(const Tensor& x, bool pow2, f8* row_codes, float* row_scales, f8* column_codes, float* column_scales) {
  int64_t m = x.size(0), k = x.size(1), across = (k + kBlock - 1) / kBlock;
  auto kernel = PRL_CHOOSE(quantise_tiles<T>);
  const T* from = in<T>(x);
  parallel(m / kBlock * across, 2, [&](int64_t begin, int64_t end) {
    kernel(from, m, k, pow2, row_codes, row_scales, column_codes, column_scales, begin, end);
  });
}

std::tuple<Tensor, Tensor> quantise_columns(const Tensor& x, bool pow2) {
  int64_t m = x.size(0), k = x.size(1);
  Tensor codes = empty({k, m}, kF8), scales = empty({m / kBlock, k}, kF32);
  auto run = x.scalar_type() == kBF16 ? tiles<bf16> : tiles<float>;
  run(x, pow2, nullptr, nullptr, out<f8>(codes), out<float>(scales));
  return {codes, scales};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantise_both(const Tensor& x, bool pow2) {
  int64_t m = x.size(0), k = x.size(1);
  Tensor codes = empty({m, k}, kF8), scales = empty({k / kBlock, m}, kF32);
  Tensor column_codes = empty({k, m}, kF8), column_scales = empty({m / kBlock, k}, kF32);
  auto run = x.scalar_type() == kBF16 ? tiles<bf16> : tiles<float>;
  run(x, pow2, out<f8>(codes), out<float>(scales), out<f8>(column_codes), out<float>(column_scales));
  return {codes, scales, column_codes, column_scales};
}

template <class T>
void blocks(const Tensor& w, bool pow2, const Tensor& codes, const Tensor& scales) {
  int64_t n = w.size(0) * w.size(1), k = w.size(2);
  auto kernel = PRL_CHOOSE(quantise_blocks<T>);
  const T* from = in<T>(w);
  f8* to = out<f8>(codes);
  float* scale = out<float>(scales);
  parallel(n / kBlock * (k / kBlock), 2, [&](int64_t begin, int64_t end) { kernel(from, k, pow2, to, scale, begin, end); });
}

std::tuple<Tensor, Tensor> quantise_blocks(const Tensor& w, bool pow2) {
  int64_t e = w.size(0), n = w.size(1), k = w.size(2);
  Tensor codes = empty({e, n, k}, kF8), scales = empty({e, n / kBlock, k / kBlock}, kF32);
  w.scalar_type() == kBF16 ? blocks<bf16>(w, pow2, codes, scales) : blocks<float>(w, pow2, codes, scales);
  return {codes, scales};
}

Tensor transpose_codes(const Tensor& codes) {
  int64_t e = codes.size(0), n = codes.size(1), k = codes.size(2);
  Tensor turned = empty({e, k, n}, kF8);
  auto kernel = PRL_CHOOSE(transpose);
  const f8* from = in<f8>(codes);
  f8* to = out<f8>(turned);
  int64_t down = (n + kBlock - 1) / kBlock;
  parallel(e * down, 65536 / (kBlock * k + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernel(from + i / down * n * k, n, k, to + i / down * n * k, i % down * kBlock);
  });
  return turned;
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("quantise_rows(Tensor x_MK, bool pow2) -> (Tensor, Tensor)");
  m.def("quantise_columns(Tensor x_MK, bool pow2) -> (Tensor, Tensor)");
  m.def("quantise_both(Tensor x_MK, bool pow2) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("quantise_blocks(Tensor w_ENK, bool pow2) -> (Tensor, Tensor)");
  m.def("transpose_codes(Tensor codes_ENK) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("quantise_rows", TORCH_BOX(&prl::quantise_rows));
  m.impl("quantise_columns", TORCH_BOX(&prl::quantise_columns));
  m.impl("quantise_both", TORCH_BOX(&prl::quantise_both));
  m.impl("quantise_blocks", TORCH_BOX(&prl::quantise_blocks));
  m.impl("transpose_codes", TORCH_BOX(&prl::transpose_codes));
}

#else

#include "fp8.h"

template <class T>
static void quantise_rows(const T* x, int64_t m, int64_t k, bool pow2, f8* codes, float* scales, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i)
    for (int64_t j = 0; j < k / kBlock; ++j)
      scales[j * m + i] = quantise_row(x + i * k + j * kBlock, pow2, codes + i * k + j * kBlock);
}

// Tiles [begin, end) of those of [M, K], row by row of tiles. K need not be a multiple of 128 without rows' codes.
template <class T>
static void quantise_tiles(const T* x, int64_t m, int64_t k, bool pow2, f8* row_codes, float* row_scales, f8* column_codes,
                           float* column_scales, int64_t begin, int64_t end) {
  int64_t across = (k + kBlock - 1) / kBlock;
  const T* rows[kBlock];
  std::vector<T> padded;
  for (int64_t i = begin; i < end; ++i) {
    int64_t down = i / across * kBlock, right = i % across * kBlock;
    int width = int(k - right < kBlock ? k - right : kBlock);
    for (int r = 0; r < kBlock; ++r) rows[r] = x + (down + r) * k + right;
    if (width < kBlock) {
      padded.assign(kBlock * kBlock, T(0));
      for (int r = 0; r < kBlock; ++r) {
        memcpy(&padded[r * kBlock], rows[r], width * sizeof(T));
        rows[r] = &padded[r * kBlock];
      }
    }
    quantise_tile(rows, pow2,
                  {row_codes ? row_codes + down * k + right : nullptr, k,
                   row_codes ? row_scales + right / kBlock * m + down : nullptr, column_codes + right * m + down, m,
                   column_scales + down / kBlock * k + right, width});
  }
}

template <class T>
static void quantise_blocks(const T* w, int64_t k, bool pow2, f8* codes, float* scales, int64_t begin, int64_t end) {
  int64_t across = k / kBlock;
  for (int64_t i = begin; i < end; ++i) {
    int64_t offset = i / across * kBlock * k + i % across * kBlock;
    vi top = {};
    for (int r = 0; r < kBlock; ++r)
      for (int j = 0; j < kParts; ++j) top = max(top, magnitude(load(w + offset + r * k + j * kLanes)));
    float scale = scales[i] = scales_of(vi{} + max_of(top), pow2)[0], inverse = 1.0f / scale;
    for (int r = 0; r < kBlock; ++r) {
      f8* to = codes + offset + r * k;
      if (scale != scale) {
        memset(to, 0x7f, kBlock);
        continue;
      }
      for (int j = 0; j < kParts; ++j) store_codes(to + j * kLanes, encode(load(w + offset + r * k + j * kLanes) * inverse));
    }
  }
}

// Rows [row, row + 128) of [N, K], as far as there are any, become columns of [K, N]: through a tile, so that lines stay whole.
static void transpose(const f8* from, int64_t n, int64_t k, f8* to, int64_t row) {
  alignas(64) f8 tile[kBlock][kBlock], turned[kBlock][kBlock];
  int64_t height = n - row < kBlock ? n - row : kBlock;
  for (int64_t right = 0; right < k; right += kBlock) {
    int64_t width = k - right < kBlock ? k - right : kBlock;
    for (int64_t r = 0; r < height; ++r) memcpy(tile[r], from + (row + r) * k + right, width);
    for (int r = 0; r < height; r += 16)
      for (int c = 0; c < width; c += PRL_WIDTH) transpose_16(tile[r] + c, kBlock, turned[c] + r, kBlock);
    for (int64_t c = 0; c < width; ++c) memcpy(to + (right + c) * n + row, turned[c], height);
  }
}

#endif
