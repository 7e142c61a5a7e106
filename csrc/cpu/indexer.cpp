// The indexer. Scores are a GEMM whose product is used up at once: relu, weight and the sum over heads happen in registers,
// nothing of [Q·H, S] is stored. The selection needs no sort: the k-th best score is found bit by bit, counting what is at least
// as good, and that tells which keys are taken.

#ifndef PRL_PATH

#include "common.h"

#include <cmath>

#define PRL_KERNELS "indexer.cpp"
#include "twice.h"

namespace prl {
namespace {

constexpr int64_t kSpan = 256;  // keys that stay in the cache while all queries pass

template <class T>
void scores(const Tensor& q_BQHD, const Tensor& keys_BSD, const Tensor& weights_BQH, const Tensor& scores_BQS) {
  int64_t batch = q_BQHD.size(0), queries = q_BQHD.size(1), heads = q_BQHD.size(2), width = q_BQHD.size(3);
  int64_t n = keys_BSD.size(1), spans = (n + kSpan - 1) / kSpan;
  const T *q = in<T>(q_BQHD), *keys = in<T>(keys_BSD);
  std::vector<float> weights(weights_BQH.numel());
  for (size_t i = 0; i < weights.size(); ++i)
    weights[i] = weights_BQH.scalar_type() == kBF16 ? to_float(in<bf16>(weights_BQH)[i]) : in<float>(weights_BQH)[i];
  float* to = out<float>(scores_BQS);
  auto kernel = PRL_CHOOSE(scores<T>);
  parallel(batch * spans, 65536 / (queries * heads * width * (n < kSpan ? n : kSpan) + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t b = i / spans, first = i % spans * kSpan;
      kernel(q + b * queries * heads * width, keys + (b * n + first) * width, weights.data() + b * queries * heads, queries, heads,
             width, n - first < kSpan ? n - first : kSpan, to + b * queries * n + first, n);
    }
  });
}

Tensor index_scores(const Tensor& q_BQHD, const Tensor& keys_BSD, const Tensor& weights_BQH) {
  Tensor scores_BQS = empty({q_BQHD.size(0), q_BQHD.size(1), keys_BSD.size(1)}, kF32);
  auto run = q_BQHD.scalar_type() == kBF16 ? scores<bf16> : scores<float>;
  run(q_BQHD, keys_BSD, weights_BQH, scores_BQS);
  return scores_BQS;
}

Tensor index_select(const Tensor& scores_BQS, const Tensor& mask_BQS, int64_t top_k) {
  int64_t rows = scores_BQS.size(0) * scores_BQS.size(1), n = scores_BQS.size(2);
  Tensor selected_BQS = empty({scores_BQS.size(0), scores_BQS.size(1), n}, ScalarType::Bool);
  const float* scores = in<float>(scores_BQS);
  const uint8_t* mask = static_cast<const uint8_t*>(mask_BQS.const_data_ptr());
  uint8_t* to = static_cast<uint8_t*>(selected_BQS.mutable_data_ptr());
  if (n <= top_k) {
    memcpy(to, mask, rows * n);
    return selected_BQS;
  }
  auto kernel = PRL_CHOOSE(select);
  parallel(rows, 4096 / (n + 1), [&](int64_t begin, int64_t end) { kernel(scores, mask, n, top_k, to, begin, end); });
  return selected_BQS;
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("index_scores(Tensor q_BQHD, Tensor keys_BSD, Tensor weights_BQH) -> Tensor");
  m.def("index_select(Tensor scores_BQS, Tensor mask_BQS, int top_k) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("index_scores", TORCH_BOX(&prl::index_scores));
  m.impl("index_select", TORCH_BOX(&prl::index_select));
}

#else

constexpr int kPanel = 2;  // vectors of keys beside each other
constexpr int kWide = kPanel * kLanes;

// Σ over kHeads heads of weight · relu(q · k), added to `total`, for a panel of keys [D, kWide]. Each sum runs along D.
template <int kHeads>
PRL_INLINE void add_heads(const float* q, const float* panel, const float* weights, int64_t width, vf* total) {
  vf dot[kHeads][kPanel] = {};
  for (int64_t d = 0; d < width; ++d)
    for (int v = 0; v < kPanel; ++v) {
      vf key = load(panel + d * kWide + v * kLanes);
      for (int h = 0; h < kHeads; ++h) dot[h][v] = dot[h][v] + q[h * width + d] * key;
    }
  for (int h = 0; h < kHeads; ++h)
    for (int v = 0; v < kPanel; ++v) total[v] = total[v] + (dot[h][v] < 0.0f ? vf{} : dot[h][v]) * weights[h];
}

// n keys, all queries; `to` has rows of `stride`.
template <class T>
static void scores(const T* q, const T* keys, const float* weights, int64_t queries, int64_t heads, int64_t width, int64_t n,
                   float* to, int64_t stride) {
  int64_t panels = (n + kWide - 1) / kWide;
  std::vector<float> packed(panels * width * kWide), row(heads * width);
  for (int64_t s = 0; s < n; ++s)
    for (int64_t d = 0; d < width; ++d) packed[(s / kWide * width + d) * kWide + s % kWide] = to_float(keys[s * width + d]);
  for (int64_t i = 0; i < queries; ++i) {
    for (int64_t d = 0; d < heads * width; ++d) row[d] = to_float(q[i * heads * width + d]);
    for (int64_t p = 0; p < panels; ++p) {
      const float *panel = &packed[p * width * kWide], *weight = weights + i * heads;
      vf total[kPanel] = {};
      int64_t h = 0;
      for (; h + 4 <= heads; h += 4) add_heads<4>(&row[h * width], panel, weight + h, width, total);
      for (; h < heads; ++h) add_heads<1>(&row[h * width], panel, weight + h, width, total);
      for (int v = 0; v < kPanel; ++v) {
        int64_t at = p * kWide + v * kLanes;
        if (at < n) store(to + i * stride + at, total[v], n - at);
      }
    }
  }
}

// Unsigned integers in the order of the scores, zeros equal; 0, below all, for NaN.
PRL_INLINE vu keys_of(vf x) {
  vu bits = (vu)(x + 0.0f);
  return (bits ^ ((vu)((vi)bits >> 31) | 0x80000000)) & (vu)(x == x);
}

PRL_INLINE int64_t sum_of(vu counts) {
  int64_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += counts[i];
  return total;
}

static int64_t count_from(uint32_t bound, const int32_t* keys, int64_t vectors) {
  vu count = {};
  for (int64_t i = 0; i < vectors; ++i) count -= (vu)((vu)load(keys + i * kLanes) >= bound);
  return sum_of(count);
}

static void select(const float* scores, const uint8_t* mask, int64_t n, int64_t top_k, uint8_t* to, int64_t begin, int64_t end) {
  std::vector<int32_t> keys((n + kLanes - 1) / kLanes * kLanes);  // as keys_of, 0 outside the mask
  for (int64_t r = begin; r < end; ++r) {
    const float* score = scores + r * n;
    const uint8_t* allowed = mask + r * n;
    uint8_t* chosen = to + r * n;
    int64_t used = n;  // causal masks end early
    while (used > 0 && !allowed[used - 1]) --used;
    int64_t vectors = (used + kLanes - 1) / kLanes;
    vu some = {}, all = vu{} - 1, count = {}, nans = {};
    for (int64_t i = 0; i < vectors; ++i) {
      int64_t left = used - i * kLanes;
      vb m = {};
      left < kLanes ? memcpy(&m, allowed + i * kLanes, left) : memcpy(&m, allowed + i * kLanes, sizeof m);
      vu in = -widen(m), key = keys_of(load(score + i * kLanes, left)) & in;
      store(&keys[i * kLanes], (vi)key);
      some |= key;
      all &= key | (vu)(key == 0);
      count -= (vu)(key != 0);
      nans += in & 1 & (vu)(key == 0);
    }
    // A NaN takes a place and is not chosen: as in the order of torch's topk, where it is largest and equals nothing.
    int64_t rank = top_k - sum_of(nans), from = sum_of(count), room = n;
    uint32_t bound = 1;  // chosen: what is above it, and the first `room` that equal it
    if (rank <= 0) {
      bound = ~0u;
    } else if (from > rank) {
      uint32_t low = ~0u, high = 0;
      for (int i = 0; i < kLanes; ++i) low &= all[i], high |= some[i];
      int bits = low == high ? 0 : 32 - __builtin_clz(low ^ high);
      bound = bits == 32 ? 0 : high >> bits << bits;
      for (int b = bits - 1; b >= 0 && from > rank; --b) {
        int64_t at_least = count_from(bound | 1u << b, keys.data(), vectors);
        if (at_least >= rank) bound |= 1u << b, from = at_least;
      }
      if (from > rank) room = top_k - count_from(bound + 1, keys.data(), vectors);
    }
    for (int64_t i = 0; i < vectors; ++i) {
      vu key = (vu)load(&keys[i * kLanes]);
      vb taken = narrow_8((vu)(key >= (room < n ? bound + 1 : bound)) & 1);
      int64_t left = used - i * kLanes;
      left < kLanes ? memcpy(chosen + i * kLanes, &taken, left) : memcpy(chosen + i * kLanes, &taken, sizeof taken);
    }
    memset(chosen + used, 0, n - used);
    if (room < n)
      for (int64_t i = 0; i < used && room > 0; ++i)
        if (uint32_t(keys[i]) == bound) chosen[i] = 1, --room;
  }
}

#endif
