// Attention whose bits depend on a query and the keys it sees, and on nothing else: neither on padding, nor on the other queries,
// nor on how many keys come after, nor on whether its keys are told by a mask or by index.
//
// A score is a sum along the width, as in any product of the GEMM engine. From there on everything is one key after the other:
// the largest score first, then p = exp(score − largest), and Σ p and Σ p · value from the first key to the last. A key that is
// not seen has p = 0, which changes no sum, so it may as well not be there.
// Rows (a query and one of the heads that share a key head) lie beside each other in a vector, keys below each other: no step
// crosses lanes. The products take keys as rows, where they lie, and the queries' rows as the packed columns.

#ifndef PRL_PATH

#include "gemm.h"

#include <limits>

namespace prl {

struct Panel {
  const bool* mask;  // [queries, keys] of the rows; null where each row sees every key
  int64_t mask_row, keys;
  int64_t first_row, rows, heads;  // row r is of query (first_row + r) / heads; `rows` of a panel's `width`
  int64_t width;
  float scale;
};

}  // namespace prl

#define PRL_KERNELS "attention.cpp"
#include "twice.h"

namespace prl {
namespace {

struct Heads {
  const char* data;
  int64_t row;  // bytes from key to key
};

// The rows of `kept`, side by side.
Heads gathered(const Heads& from, const std::vector<int64_t>& kept, int64_t bytes, Scratch& scratch) {
  char* to = scratch.get<char>(int64_t(kept.size()) * bytes);
  for (size_t i = 0; i < kept.size(); ++i) std::memcpy(to + i * bytes, from.data + kept[i] * from.row, bytes);
  return {to, bytes};
}

template <class T>
Tensor attend(const Tensor& q_BQHX, const Tensor& keys_BSGX, const std::optional<Tensor>& values_BSGC, int64_t c, const Tensor& seen,
              double scale) {
  const int64_t batch = q_BQHX.size(0), queries = q_BQHX.size(1), all_heads = q_BQHX.size(2), x = q_BQHX.size(3);
  const int64_t n = keys_BSGX.size(1), groups = keys_BSGX.size(2), heads = all_heads / groups, of_seen = seen.size(2);
  const bool sparse = seen.scalar_type() == ScalarType::Int;
  constexpr Kind kind = sizeof(T) == 2 ? Kind::bf16 : Kind::f32;
  constexpr int64_t element = sizeof(T);
  const int64_t value_width = values_BSGC ? c : x, units = units_of(kind, x);
  Tensor out_BQHC = empty({batch, queries, all_heads, c}, q_BQHX.scalar_type());
  const T *q = in<T>(q_BQHX), *keys = in<T>(keys_BSGX), *values = values_BSGC ? in<T>(values_BSGC) : keys;
  T* to = out<T>(out_BQHC);
  auto exponentials = PRL_CHOOSE(softmax);
  auto sums = PRL_CHOOSE(sum_values<T>);
  for (int64_t i = 0; sparse && i < seen.numel(); ++i)
    STD_TORCH_CHECK(in<int32_t>(seen)[i] < n, "attention: seen must be below ", n, ", got ", in<int32_t>(seen)[i]);
  // Pieces are panels of rows; by index each query has keys of its own, and so a piece of its own.
  const int64_t rows = queries * heads, span = sparse ? heads : rows, pieces = (span + kColumns - 1) / kColumns;
  const int64_t spans = batch * groups * (rows / (span + !span));
  const int64_t cost = std::min(kColumns, span) * (sparse ? of_seen : n) * (x + c);
  parallel(spans * pieces, int64_t(1e6 / double(cost + 1)), [&](int64_t begin, int64_t end) {
    static thread_local Scratch q_scratch, panel_scratch, score_scratch, key_scratch, value_scratch, unused;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t piece = item % pieces, of_batch = item / pieces, b = of_batch / (spans / batch);
      const int64_t in_batch = of_batch % (spans / batch), g = in_batch % groups, first_query = in_batch / groups;
      const int64_t first = first_query * heads + piece * kColumns, stop = std::min(first_query * heads + span, first + kColumns);
      T* packed = q_scratch.get<T>((stop - first) * x);
      for (int64_t r = first; r < stop; ++r) {
        const T* row = q + ((b * queries + r / heads) * all_heads + g * heads + r % heads) * x;
        std::memcpy(packed + (r - first) * x, row, x * element);
      }
      Panel s = {nullptr, of_seen, n, first, stop - first, heads, panel_width(stop - first), float(scale)};
      Heads key = {reinterpret_cast<const char*>(keys + (b * n * groups + g) * x), groups * x * element};
      Heads value = {reinterpret_cast<const char*>(values + (b * n * groups + g) * value_width), groups * value_width * element};
      if (sparse) {
        const int32_t* index = in<int32_t>(seen) + (b * queries + first_query) * of_seen;
        std::vector<int64_t> kept;
        for (int64_t i = 0; i < of_seen; ++i)
          if (index[i] >= 0) kept.push_back(index[i]);
        s.keys = int64_t(kept.size());
        key = gathered(key, kept, x * element, key_scratch);
        value = values_BSGC ? gathered(value, kept, c * element, value_scratch) : key;
      } else {
        s.mask = in<bool>(seen) + b * queries * of_seen;
        int64_t used = 0;  // keys after the last that is seen would add nothing
        for (int64_t query = first / heads; query <= (stop - 1) / heads; ++query) {
          int64_t last = n;
          while (last > used && !s.mask[query * of_seen + last - 1]) --last;
          used = std::max(used, last);
        }
        s.keys = used;
      }
      float* panel = panel_scratch.get<float>(units * kColumns);
      pack_rows(kind, sizeof(T) == 2 ? kBF16 : kF32, panel, packed, x, stop - first, x, unused);
      float* scores = score_scratch.get<float>(s.keys * s.width);
      multiply(kind, {key.data, key.row, 4, panel, units, 0, s.width, scores, s.width, Store::f32}, s.keys);
      alignas(64) float total[kColumns];
      exponentials(s, scores, total);
      T* result[kColumns];
      for (int64_t r = first; r < stop; ++r)
        result[r - first] = to + ((b * queries + r / heads) * all_heads + g * heads + r % heads) * c;
      sums(s, scores, total, reinterpret_cast<const T*>(value.data), value.row / element, c, result);
    }
  });
  return out_BQHC;
}

Tensor attention(const Tensor& q_BQHX, const Tensor& keys_BSGX, const std::optional<Tensor>& values_BSGC, int64_t value_width,
                 const Tensor& seen, double scale) {
  auto run = q_BQHX.scalar_type() == kBF16 ? attend<bf16> : attend<float>;
  return run(q_BQHX, keys_BSGX, values_BSGC, value_width, seen, scale);
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def(
      "attention(Tensor q_BQHX, Tensor keys_BSGX, Tensor? values_BSGC, int value_width, Tensor seen, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) { m.impl("attention", TORCH_BOX(&prl::attention)); }

#else

// `scores` [keys, width] to p, `total` [width] to Σ p.
static void softmax(const Panel& s, float* scores, float* total) {
  if (s.mask) {
    for (int64_t r = 0; r < s.rows;) {
      const int64_t query = (s.first_row + r) / s.heads;
      const int64_t stop = (query + 1) * s.heads - s.first_row < s.rows ? (query + 1) * s.heads - s.first_row : s.rows;
      const bool* seen = s.mask + query * s.mask_row;
      for (int64_t k = 0; k < s.keys; ++k)
        if (!seen[k])
          for (int64_t i = r; i < stop; ++i) scores[k * s.width + i] = -__builtin_inff();
      r = stop;
    }
  }
  for (int64_t r = 0; r < s.width; r += kLanes) {
    vf top = splat(-__builtin_inff()), sum = {};
    for (int64_t k = 0; k < s.keys; ++k) {
      vf z = load(scores + k * s.width + r) * s.scale;
      top = z > top ? z : top;
    }
    for (int64_t k = 0; k < s.keys; ++k) {
      float* at = scores + k * s.width + r;
      vf p = exp(load(at) * s.scale - top);
      store(at, p);
      sum = sum + p;
    }
    store(total + r, sum);
  }
}

#if PRL_WIDTH == 64
constexpr int kSumRows = 6, kSumVectors = 4;
#else
constexpr int kSumRows = 4, kSumVectors = 2;
#endif

// Up to kSumVectors vectors of the result of kRows rows.
template <int kRows, int kVectors, class T>
PRL_INLINE void sum_part(const Panel& s, const float* p, const float* total, const T* values, int64_t value_row, int64_t n,
                         T* const* to) {
  vf acc[kRows][kVectors] = {};
  const bool full = n >= kVectors * kLanes;
  for (int64_t k = 0; k < s.keys; ++k, p += s.width, values += value_row) {
    vf v[kVectors];
    for (int j = 0; j < kVectors; ++j) v[j] = full ? load(values + j * kLanes) : load(values + j * kLanes, n - j * kLanes);
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kVectors; ++j) acc[i][j] = acc[i][j] + v[j] * p[i];
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) store(to[i] + j * kLanes, acc[i][j] / total[i], n - j * kLanes);
}

template <int kRows, class T>
PRL_INLINE void sum_rows(const Panel& s, const float* p, const float* total, const T* values, int64_t value_row, int64_t c,
                         T* const* to) {
  int64_t done = 0;
  T* at[kRows];
  for (; done < c; done += kSumVectors * kLanes) {
    for (int i = 0; i < kRows; ++i) at[i] = to[i] + done;
    if (c - done > (kSumVectors - 1) * kLanes)
      sum_part<kRows, kSumVectors>(s, p, total, values + done, value_row, c - done, at);
    else
      break;
  }
  for (; done < c; done += kLanes) {
    for (int i = 0; i < kRows; ++i) at[i] = to[i] + done;
    sum_part<kRows, 1>(s, p, total, values + done, value_row, c - done, at);
  }
}

// to[r] [c] = Σ p · value / total, over the keys in their order.
template <class T>
static void sum_values(const Panel& s, const float* p, const float* total, const T* values, int64_t value_row, int64_t c,
                       T* const* to) {
  int64_t r = 0;
  for (; r + kSumRows <= s.rows; r += kSumRows) sum_rows<kSumRows>(s, p + r, total + r, values, value_row, c, to + r);
  for (; r < s.rows; ++r) sum_rows<1>(s, p + r, total + r, values, value_row, c, to + r);
}

#endif
