// Movement of rows. Sorting is one counting sort. Quantising while permuting works on each token once and writes its codes to
// the rows of all its experts; the weighted sum reads a token's rows side by side. Both sum and sort in an order that threads
// cannot change.

#ifndef PRL_PATH

#include "common.h"

#include <cmath>

#define PRL_KERNELS "permute.cpp"
#include "twice.h"

namespace prl {
namespace {

// A layout that another op than sort_rows made must not read or write beyond the rows.
void check_range(const char* op, const char* name, const int64_t* p, int64_t n, int64_t limit) {
  uint64_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t above = uint64_t(p[i] + 1);
    largest = above > largest ? above : largest;
  }
  STD_TORCH_CHECK(largest <= uint64_t(limit), op, ": ", name, " must be -1 to ", limit - 1, ", got ", int64_t(largest) - 1);
}

// Where rows are written by way of their tokens, source and position must be each other's inverse: no row is left out.
void check_inverse(const char* op, const Tensor& source, const Tensor& position) {
  const int64_t *s = in<int64_t>(source), *p = in<int64_t>(position);
  int64_t rows = source.numel(), slots = position.numel(), filled = 0, matched = 0;
  check_range(op, "position_TK", p, slots, rows);
  for (int64_t r = 0; r < rows; ++r) filled += s[r] >= 0;
  for (int64_t i = 0; i < slots; ++i) matched += p[i] >= 0 && s[p[i]] == i;
  STD_TORCH_CHECK(filled == matched, op, ": source_R and position_TK must be of one sort_rows, ", filled, " rows have a slot, ",
                  matched, " of these slots have the row");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_rows(const Tensor& ids_TK, int64_t n_experts, int64_t align) {
  int64_t slots = ids_TK.numel();
  int64_t rows = (slots + (slots < n_experts ? slots : n_experts) * (align - 1)) / align * align;
  Tensor source_R = empty({rows}, kI64), position_TK = empty({ids_TK.size(0), ids_TK.size(1)}, kI64);
  Tensor starts_E1 = empty({n_experts + 1}, kI64), counts_E = empty({n_experts}, kI64);
  const int64_t* ids = in<int64_t>(ids_TK);
  int64_t *source = out<int64_t>(source_R), *position = out<int64_t>(position_TK);
  int64_t *starts = out<int64_t>(starts_E1), *counts = out<int64_t>(counts_E);
  for (int64_t e = 0; e < n_experts; ++e) counts[e] = 0;
  for (int64_t s = 0; s < slots; ++s) {
    if (ids[s] == -1) continue;
    STD_TORCH_CHECK(uint64_t(ids[s]) < uint64_t(n_experts), "sort_rows: ids_TK must be -1 to ", n_experts - 1, ", got ", ids[s]);
    ++counts[ids[s]];
  }
  starts[0] = 0;
  for (int64_t e = 0; e < n_experts; ++e) starts[e + 1] = starts[e] + (counts[e] + align - 1) / align * align;
  std::vector<int64_t> next(starts, starts + n_experts);
  for (int64_t s = 0; s < slots; ++s) {
    position[s] = ids[s] < 0 ? -1 : next[ids[s]]++;
    if (ids[s] >= 0) source[position[s]] = s;
  }
  for (int64_t e = 0; e < n_experts; ++e)
    for (int64_t r = next[e]; r < starts[e + 1]; ++r) source[r] = -1;
  for (int64_t r = starts[n_experts]; r < rows; ++r) source[r] = -1;
  return {source_R, position_TK, starts_E1, counts_E};
}

Tensor permute(const Tensor& x_TD, const Tensor& source_R, const Tensor& position_TK) {
  int64_t rows = source_R.size(0), top_k = position_TK.size(1), size = x_TD.size(1) * (x_TD.scalar_type() == kBF16 ? 2 : 4);
  Tensor rows_RD = empty({rows, x_TD.size(1)}, x_TD.scalar_type());
  const int64_t* source = in<int64_t>(source_R);
  check_range("permute", "source_R", source, rows, position_TK.numel());
  const char* from = in<char>(x_TD);
  char* to = out<char>(rows_RD);
  parallel(rows, 65536 / (size + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      if (source[r] < 0)
        memset(to + r * size, 0, size);
      else
        memcpy(to + r * size, from + source[r] / top_k * size, size);
    }
  });
  return rows_RD;
}

template <class T>
void run_permute_quantise(const Tensor& x_TD, const Tensor& source_R, const Tensor& position_TK, bool pow2, f8* codes, float* scales,
                      f8* column_codes, float* column_scales) {
  int64_t tokens = x_TD.size(0), width = x_TD.size(1), rows = source_R.size(0), top_k = position_TK.size(1);
  const T* x = in<T>(x_TD);
  const int64_t *source = in<int64_t>(source_R), *position = in<int64_t>(position_TK);
  // Scales by token first: written straight to [B, R] each would touch a line of its own.
  std::vector<float> token_scales(tokens * (width / kBlock));
  auto by_row = PRL_CHOOSE(quantise_tokens<T>);
  parallel(tokens, 16384 / (width + 1), [&](int64_t begin, int64_t end) {
    by_row(x, width, position, top_k, pow2, codes, token_scales.data(), begin, end);
  });
  int64_t blocks = width / kBlock;
  parallel(rows / kBlock, 32768 / (kBlock * width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * kBlock; r < end * kBlock; r += 16)  // a line of each block's scales
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t i = r; i < r + 16; ++i)
          scales[b * rows + i] = source[i] < 0 ? 1.0f : token_scales[source[i] / top_k * blocks + b];
    for (int64_t r = begin * kBlock; r < end * kBlock; ++r)
      if (source[r] < 0) memset(codes + r * width, 0, width);
  });
  if (!column_codes) return;
  auto by_column = PRL_CHOOSE(quantise_gathered<T>);
  parallel(rows / kBlock, 32768 / (kBlock * width + 1), [&](int64_t begin, int64_t end) {
    by_column(x, width, source, top_k, rows, pow2, column_codes, column_scales, begin, end);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> permute_quantise(const Tensor& x_TD, const Tensor& source_R,
                                                            const Tensor& position_TK, bool columns, bool pow2) {
  int64_t rows = source_R.size(0), width = x_TD.size(1), kept = columns ? width : 0, along = columns ? rows : 0;
  check_inverse("permute_quantise", source_R, position_TK);
  Tensor codes = empty({rows, width}, kF8), scales = empty({width / kBlock, rows}, kF32);
  Tensor column_codes = empty({kept, along}, kF8), column_scales = empty({along / kBlock, kept}, kF32);
  auto run = x_TD.scalar_type() == kBF16 ? run_permute_quantise<bf16> : run_permute_quantise<float>;
  run(x_TD, source_R, position_TK, pow2, out<f8>(codes), out<float>(scales), columns ? out<f8>(column_codes) : nullptr,
      out<float>(column_scales));
  return {codes, scales, column_codes, column_scales};
}

template <class T>
void run_combine(const Tensor& rows_RD, const float* weights, const Tensor& position_TK, const Tensor& out_TD) {
  int64_t width = rows_RD.size(1), top_k = position_TK.size(1);
  auto kernel = PRL_CHOOSE(combine<T>);
  const T* rows = in<T>(rows_RD);
  const int64_t* position = in<int64_t>(position_TK);
  T* to = out<T>(out_TD);
  parallel(position_TK.size(0), 16384 / (width * top_k + 1), [&](int64_t begin, int64_t end) {
    kernel(rows, weights, position, top_k, width, to, begin, end);
  });
}

Tensor combine(const Tensor& rows_RD, const std::optional<Tensor>& weights_TK, const Tensor&, const Tensor& position_TK) {
  check_range("combine", "position_TK", in<int64_t>(position_TK), position_TK.numel(), rows_RD.size(0));
  Tensor out_TD = empty({position_TK.size(0), rows_RD.size(1)}, rows_RD.scalar_type());
  auto run = rows_RD.scalar_type() == kBF16 ? run_combine<bf16> : run_combine<float>;
  run(rows_RD, in<float>(weights_TK), position_TK, out_TD);
  return out_TD;
}

template <class T>
void run_combine_backward(const Tensor& d_out_TD, const Tensor& rows_RD, const Tensor& weights_TK, const Tensor& source_R,
                      const Tensor& position_TK, const Tensor& d_rows_RD, const Tensor& d_weights_TK) {
  int64_t width = rows_RD.size(1), top_k = position_TK.size(1), n = rows_RD.size(0);
  auto kernel = PRL_CHOOSE(combine_backward<T>);
  const T *d_out = in<T>(d_out_TD), *rows = in<T>(rows_RD);
  const float* weights = in<float>(weights_TK);
  const int64_t *source = in<int64_t>(source_R), *position = in<int64_t>(position_TK);
  T* d_rows = out<T>(d_rows_RD);
  float* d_weights = out<float>(d_weights_TK);
  parallel(position_TK.size(0), 16384 / (width * top_k + 1), [&](int64_t begin, int64_t end) {
    kernel(d_out, rows, weights, position, top_k, width, d_rows, d_weights, begin, end);
  });
  parallel(n, 65536 / (width + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      if (source[r] < 0) memset(d_rows + r * width, 0, width * sizeof(T));
  });
}

std::tuple<Tensor, Tensor> combine_backward(const Tensor& d_out_TD, const Tensor& rows_RD, const Tensor& weights_TK,
                                            const Tensor& source_R, const Tensor& position_TK) {
  check_inverse("combine_backward", source_R, position_TK);
  Tensor d_rows_RD = empty({rows_RD.size(0), rows_RD.size(1)}, rows_RD.scalar_type());
  Tensor d_weights_TK = empty({position_TK.size(0), position_TK.size(1)}, kF32);
  auto run = rows_RD.scalar_type() == kBF16 ? run_combine_backward<bf16> : run_combine_backward<float>;
  run(d_out_TD, rows_RD, weights_TK, source_R, position_TK, d_rows_RD, d_weights_TK);
  return {d_rows_RD, d_weights_TK};
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("sort_rows(Tensor ids_TK, int n_experts, int align) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("permute(Tensor x_TD, Tensor source_R, Tensor position_TK) -> Tensor");
  m.def(
      "permute_quantise(Tensor x_TD, Tensor source_R, Tensor position_TK, bool columns, bool pow2)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("combine(Tensor rows_RD, Tensor? weights_TK, Tensor source_R, Tensor position_TK) -> Tensor");
  m.def(
      "combine_backward(Tensor d_out_TD, Tensor rows_RD, Tensor weights_TK, Tensor source_R, Tensor position_TK)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("sort_rows", TORCH_BOX(&prl::sort_rows));
  m.impl("permute", TORCH_BOX(&prl::permute));
  m.impl("permute_quantise", TORCH_BOX(&prl::permute_quantise));
  m.impl("combine", TORCH_BOX(&prl::combine));
  m.impl("combine_backward", TORCH_BOX(&prl::combine_backward));
}

#else

#include "fp8.h"

// Tokens [begin, end): codes to the rows of each, scales to [T, B].
template <class T>
static void quantise_tokens(const T* x, int64_t width, const int64_t* position, int64_t top_k, bool pow2, f8* codes,
                            float* token_scales, int64_t begin, int64_t end) {
  std::vector<f8> row(width);
  token_scales += begin * (width / kBlock);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t j = 0; j < width; j += kBlock) *token_scales++ = quantise_row(x + t * width + j, pow2, &row[j]);
    for (int64_t k = 0; k < top_k; ++k)
      if (position[t * top_k + k] >= 0) memcpy(codes + position[t * top_k + k] * width, row.data(), width);
  }
}

// Blocks [begin, end) of 128 rows, by column.
template <class T>
static void quantise_gathered(const T* x, int64_t width, const int64_t* source, int64_t top_k, int64_t rows, bool pow2,
                              f8* codes, float* scales, int64_t begin, int64_t end) {
  alignas(64) static const T zeros[kBlock] = {};
  for (int64_t c = begin; c < end; ++c) {
    const T *from[kBlock], *tile[kBlock];
    for (int r = 0; r < kBlock; ++r) {
      int64_t s = source[c * kBlock + r];
      from[r] = s < 0 ? nullptr : x + s / top_k * width;
    }
    for (int64_t j = 0; j < width; j += kBlock) {
      for (int r = 0; r < kBlock; ++r) tile[r] = from[r] ? from[r] + j : zeros;
      quantise_tile(tile, pow2, {nullptr, 0, nullptr, codes + j * rows + c * kBlock, rows, scales + c * width + j, kBlock});
    }
  }
}

constexpr int kStep = 4;  // vectors summed at a time

template <int kVectors, class T>
PRL_INLINE void combine_part(const T* const* from, const float* weights, int64_t n, int64_t at, int64_t left, T* to) {
  vf total[kVectors] = {};
  for (int64_t k = 0; k < n; ++k)
    for (int v = 0; v < kVectors; ++v) {
      const T* p = from[k] + at + v * kLanes;
      total[v] = total[v] + (kVectors == 1 ? load(p, left) : load(p)) * weights[k];
    }
  for (int v = 0; v < kVectors; ++v) kVectors == 1 ? store(to + at, total[v], left) : store(to + at + v * kLanes, total[v]);
}

// Weights may be null: all 1.
template <class T>
static void combine(const T* rows, const float* weights, const int64_t* position, int64_t top_k, int64_t width, T* to,
                    int64_t begin, int64_t end) {
  std::vector<const T*> from(top_k);
  std::vector<float> weight(top_k);
  for (int64_t t = begin; t < end; ++t) {
    int64_t n = 0, i = 0;
    for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
      if (position[s] < 0) continue;
      from[n] = rows + position[s] * width;
      weight[n++] = weights ? weights[s] : 1.0f;
    }
    for (; i + kStep * kLanes <= width; i += kStep * kLanes)
      combine_part<kStep>(from.data(), weight.data(), n, i, 0, to + t * width);
    for (; i < width; i += kLanes) combine_part<1>(from.data(), weight.data(), n, i, width - i, to + t * width);
  }
}

template <class T>
static void combine_backward(const T* d_out, const T* rows, const float* weights, const int64_t* position, int64_t top_k,
                             int64_t width, T* d_rows, float* d_weights, int64_t begin, int64_t end) {
  for (int64_t s = begin * top_k; s < end * top_k; ++s) {
    if (position[s] < 0) {
      d_weights[s] = 0;
      continue;
    }
    const T *d = d_out + s / top_k * width, *row = rows + position[s] * width;
    T* d_row = d_rows + position[s] * width;
    Sum sum;
    for (int64_t i = 0; i < width; i += 16)
      for (int v = 0; v < 16 / kLanes; ++v) {
        int64_t at = i + v * kLanes, left = width - at;
        if (left <= 0) break;
        vf slope = load(d + at, left);
        sum.part[v] = sum.part[v] + slope * load(row + at, left);
        store(d_row + at, slope * weights[s], left);
      }
    d_weights[s] = sum.total();
  }
}

#endif
