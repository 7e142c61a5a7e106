// The router after its GEMM. Of a row's scores, as integers in the cache, only those above a bound that at least K reach are
// looked at again, and these are few enough to compare each with each: no branch depends on the scores. A row that replays
// recorded experts skips all of that and reads only the scores that it needs.

#ifndef PRL_PATH

#include "common.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace prl {

// The arguments of `route`; pointers are null where they are None.
struct Route {
  const float* scores;
  const float* bias;
  const void* recorded;
  ScalarType recorded_type;
  const bool* routed;
  const bool* padding;
  int64_t experts, top_k, groups, top_groups;
  bool normalise;
  float scale;
  int64_t* ids;
  float* weights;
};

// `n` recorded ids from the i-th on.
inline void read_ids(const void* from, ScalarType type, int64_t i, int64_t n, int64_t* to) {
  auto copy = [&](auto* ids) {
    for (int64_t k = 0; k < n; ++k) to[k] = int64_t(ids[i + k]);
  };
  switch (type) {
    case ScalarType::Byte:
      return copy(static_cast<const uint8_t*>(from));
    case ScalarType::UInt16:
      return copy(static_cast<const uint16_t*>(from));
    case ScalarType::Short:
      return copy(static_cast<const int16_t*>(from));
    case ScalarType::Int:
      return copy(static_cast<const int32_t*>(from));
    default:
      return copy(static_cast<const int64_t*>(from));
  }
}

enum class Ids { kGood, kOutside, kTwice };

// Judges rows of ids. `seen` has an entry per expert: the last row that had it.
class Judge {
 public:
  explicit Judge(int64_t experts) : seen_(experts, -1) {}

  Ids operator()(const int64_t* ids, int64_t n) {
    ++row_;
    bool twice = false;
    for (int64_t k = 0; k < n; ++k) {
      if (uint64_t(ids[k]) >= seen_.size()) return Ids::kOutside;
      twice |= seen_[ids[k]] == row_;
      seen_[ids[k]] = row_;
    }
    return twice ? Ids::kTwice : Ids::kGood;
  }

 private:
  std::vector<int64_t> seen_;
  int64_t row_ = -1;
};

}  // namespace prl

#define PRL_KERNELS "router.cpp"
#include "twice.h"

namespace prl {
namespace {

Tensor router_scores(const Tensor& logits_TE, std::string scoring) {
  int64_t tokens = logits_TE.size(0), experts = logits_TE.size(1);
  Tensor scores_TE = empty({tokens, experts}, kF32);
  const float* logits = in<float>(logits_TE);
  float* scores = out<float>(scores_TE);
  auto kernel = scoring == "sigmoid" ? PRL_CHOOSE(sigmoid_rows) : PRL_CHOOSE(softmax_rows);
  parallel(tokens, 8192 / (experts + 1), [&](int64_t begin, int64_t end) { kernel(logits, experts, scores, begin, end); });
  return scores_TE;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> route(
    const Tensor& scores_TE, const std::optional<Tensor>& bias_E, const std::optional<Tensor>& recorded_TK,
    const std::optional<Tensor>& routed_T, const std::optional<Tensor>& padding_T, int64_t top_k, int64_t n_group,
    int64_t topk_group, bool normalise, double scale) {
  int64_t tokens = scores_TE.size(0), experts = scores_TE.size(1);
  Tensor ids_TK = empty({tokens, top_k}, kI64), weights_TK = empty({tokens, top_k}, kF32);
  Tensor rows_E = empty({experts}, kI64), true_E = empty({experts}, kI64), invalid = empty({2}, kI64);
  Route r = {in<float>(scores_TE), in<float>(bias_E), recorded_TK ? recorded_TK->const_data_ptr() : nullptr,
             recorded_TK ? recorded_TK->scalar_type() : kI64, in<bool>(routed_T), in<bool>(padding_T), experts, top_k, n_group,
             topk_group, normalise, float(scale), out<int64_t>(ids_TK), out<float>(weights_TK)};
  if (r.padding)  // dealt in the order of the rows, so here
    for (int64_t t = 0, nth = 0; t < tokens; ++t)
      if (r.padding[t])
        for (int64_t k = 0; k < top_k; ++k) r.ids[t * top_k + k] = nth++ % experts;
  std::atomic<int64_t> outside = 0, twice = 0;
  auto kernel = PRL_CHOOSE(route_rows);
  parallel(tokens, 8192 / (experts + 1), [&](int64_t begin, int64_t end) {
    int64_t found[2] = {};
    kernel(r, begin, end, found);
    outside += found[0];
    twice += found[1];
  });
  int64_t *rows = out<int64_t>(rows_E), *real = out<int64_t>(true_E), *counts = out<int64_t>(invalid);
  // In four parts, since an addition must wait for the last one to the same place.
  std::vector<int64_t> parts(4 * experts);
  for (int64_t i = 0; i < tokens * top_k; ++i) ++parts[r.ids[i] * 4 + i % 4];
  for (int64_t e = 0; e < experts; ++e) rows[e] = real[e] = parts[e * 4] + parts[e * 4 + 1] + parts[e * 4 + 2] + parts[e * 4 + 3];
  if (r.padding)
    for (int64_t i = 0; i < tokens * top_k; ++i) real[r.ids[i]] -= r.padding[i / top_k];
  counts[0] = outside;
  counts[1] = twice;
  return {ids_TK, weights_TK, rows_E, true_E, invalid};
}

Tensor route_backward(const Tensor& d_weights_TK, const Tensor& scores_TE, const Tensor& ids_TK, bool normalise, double scale) {
  int64_t tokens = scores_TE.size(0), experts = scores_TE.size(1), top_k = ids_TK.size(1);
  Tensor d_scores_TE = empty({tokens, experts}, kF32);
  const float *d_weights = in<float>(d_weights_TK), *scores = in<float>(scores_TE);
  const int64_t* ids = in<int64_t>(ids_TK);
  float* to = out<float>(d_scores_TE);
  for (int64_t i = 0; i < tokens * top_k; ++i)
    STD_TORCH_CHECK(uint64_t(ids[i]) < uint64_t(experts), "route_backward: ids_TK must be 0 to ", experts - 1, ", got ", ids[i]);
  parallel(tokens, 32768 / (experts + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t* id = ids + t * top_k;
      const float *d = d_weights + t * top_k, *score = scores + t * experts;
      float *row = to + t * experts, total = 0, slope = 0, factor = float(scale);
      memset(row, 0, experts * sizeof(float));
      for (int64_t k = 0; k < top_k; ++k) total += score[id[k]];
      total += 1e-20f;
      for (int64_t k = 0; k < top_k; ++k) slope += d[k] * factor * (score[id[k]] / total);
      for (int64_t k = 0; k < top_k; ++k) row[id[k]] += normalise ? (d[k] * factor - slope) / total : d[k] * factor;
    }
  });
  return d_scores_TE;
}

Tensor inspect_routes(const Tensor& routes_TLK, const std::optional<Tensor>& routed_T, int64_t n_experts) {
  int64_t tokens = routes_TLK.size(0), layers = routes_TLK.size(1), top_k = routes_TLK.size(2);
  Tensor result = empty({3}, kI64);
  const void* ids = routes_TLK.const_data_ptr();
  ScalarType type = routes_TLK.scalar_type();
  const bool* routed = in<bool>(routed_T);
  std::atomic<int64_t> outside = 0, twice = 0, first = tokens * layers;
  parallel(tokens, 16384 / (layers * top_k + 1), [&](int64_t begin, int64_t end) {
    Judge judge(n_experts);
    std::vector<int64_t> row(top_k);
    int64_t found[2] = {}, mine = tokens * layers;
    for (int64_t t = begin; t < end; ++t) {
      if (routed && !routed[t]) continue;
      for (int64_t i = t * layers; i < (t + 1) * layers; ++i) {
        read_ids(ids, type, i * top_k, top_k, row.data());
        Ids verdict = judge(row.data(), top_k);
        if (verdict == Ids::kGood) continue;
        ++found[verdict == Ids::kTwice];
        if (i < mine) mine = i;
      }
    }
    outside += found[0];
    twice += found[1];
    int64_t least = first;
    while (mine < least && !first.compare_exchange_weak(least, mine)) {
    }
  });
  int64_t* to = out<int64_t>(result);
  to[0] = outside;
  to[1] = twice;
  to[2] = first < tokens * layers ? first.load() : -1;
  return result;
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("router_scores(Tensor logits_TE, str scoring) -> Tensor");
  m.def(
      "route(Tensor scores_TE, Tensor? bias_E, Tensor? recorded_TK, Tensor? routed_T, Tensor? padding_T, int top_k, int n_group,"
      " int topk_group, bool normalise, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("route_backward(Tensor d_weights_TK, Tensor scores_TE, Tensor ids_TK, bool normalise, float scale) -> Tensor");
  m.def("inspect_routes(Tensor routes_TLK, Tensor? routed_T, int n_experts) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("router_scores", TORCH_BOX(&prl::router_scores));
  m.impl("route", TORCH_BOX(&prl::route));
  m.impl("route_backward", TORCH_BOX(&prl::route_backward));
  m.impl("inspect_routes", TORCH_BOX(&prl::inspect_routes));
}

#else

static void sigmoid_rows(const float* logits, int64_t experts, float* scores, int64_t begin, int64_t end) {
  for (int64_t i = begin * experts; i < end * experts; i += kLanes)
    store(scores + i, sigmoid(load(logits + i, end * experts - i)), end * experts - i);
}

// Softmax: exponentials in the order of the lanes of `Sum`.
static void softmax_rows(const float* logits, int64_t experts, float* scores, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    const float* x = logits + t * experts;
    float *y = scores + t * experts, top = -INFINITY;
    vf tops = splat(top);
    for (int64_t i = 0; i < experts; i += kLanes) {
      vf v = load(x + i, experts - i, -INFINITY);
      tops = v > tops ? v : tops;
    }
    for (int i = 0; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
    Sum sum;
    for (int64_t i = 0; i < experts; i += kLanes) {
      vf e = exp(load(x + i, experts - i, -INFINITY) - top);
      vf& part = sum.part[i / kLanes % (16 / kLanes)];
      part = part + e;
      store(y + i, e, experts - i);
    }
    float total = sum.total();
    for (int64_t i = 0; i < experts; i += kLanes) store(y + i, load(y + i, experts - i) / total, experts - i);
  }
}

// Integers in the order of the scores, as sorting has it: zeros equal, NaN above all. kNone is below every score.
constexpr int32_t kNone = INT32_MIN + 1;

PRL_INLINE vi keys_of(vf x) {
  vi bits = (vi)(x + 0.0f);
  return x == x ? bits ^ ((bits >> 31) & 0x7fffffff) : vi{} + INT32_MAX;
}

PRL_INLINE float score_of(int32_t key) { return bits_to_float(key ^ ((key >> 31) & 0x7fffffff)); }

// The places in `keys`, a multiple of sixteen, of those that are at least `bound`, in order; how many there are.
PRL_INLINE int64_t collect(const int32_t* keys, int64_t n, int32_t bound, int32_t* places) {
  int64_t count = 0;
#if PRL_WIDTH == 64
  __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 found = _mm512_cmpge_epi32_mask((__m512i)load(keys + i), _mm512_set1_epi32(bound));
    _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(found, place));
    count += __builtin_popcount(found);
    place = _mm512_add_epi32(place, _mm512_set1_epi32(16));
  }
#else
  for (int64_t i = 0; i < n; ++i) {
    places[count] = int32_t(i);
    count += keys[i] >= bound;
  }
#endif
  return count;
}

// How many of sixteen keys are at least each of them.
PRL_INLINE void count_at_least(const int32_t* keys, vi* counts) {
  for (int v = 0; v < 16 / kLanes; ++v) {
    counts[v] = vi{};
    for (int j = 0; j < 16; ++j) counts[v] -= keys[j] >= load(keys + v * kLanes);
  }
}

// The place of each of n <= 16 keys in descending order, the first first among equals.
PRL_INLINE void rank(const int32_t* keys, int64_t n, int32_t* ranks) {
  static const int32_t kLater[32] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  for (int v = 0; v < 16 / kLanes; ++v) {
    vi mine = load(keys + v * kLanes), counts = {};
    for (int64_t j = 0; j < n; ++j) counts -= keys[j] > mine - load(kLater + 15 - j + v * kLanes);
    store(ranks + v * kLanes, counts);
  }
}

// The top_k best of `keys`, n padded to a multiple of sixteen by kNone: the lanes' largest keys tell a bound that few are
// above, so few that comparing each with each sorts them.
PRL_INLINE void choose(const int32_t* keys, int64_t n, int64_t top_k, std::vector<int32_t>& places, int64_t* ids) {
  alignas(64) int32_t found[16], ranks[16], order[16];
  int32_t bound = kNone + 1;
  if (n > 16 && top_k <= 16) {
    alignas(64) int32_t tops[16];
    vi top[16 / kLanes], counts[16 / kLanes];
    for (int v = 0; v < 16 / kLanes; ++v) {
      top[v] = load(keys + v * kLanes);
      for (int64_t i = 16; i < n; i += 16) top[v] = max(top[v], load(keys + i + v * kLanes));
      store(tops + v * kLanes, top[v]);
    }
    count_at_least(tops, counts);
    for (int v = 0; v < 16 / kLanes; ++v) {
      int32_t most = max_of(counts[v] >= int32_t(top_k) ? top[v] : vi{} + bound);
      bound = most > bound ? most : bound;
    }
  }
  if (n == 16) {
    rank(keys, 16, ranks);
    for (int i = 0; i < 16; ++i) order[ranks[i]] = i;
  } else {
    int64_t count = collect(keys, n, bound, places.data());
    if (count > 16) {
      auto better = [&](int32_t a, int32_t b) { return keys[a] > keys[b] || (keys[a] == keys[b] && a < b); };
      std::partial_sort(places.begin(), places.begin() + top_k, places.begin() + count, better);
      for (int64_t k = 0; k < top_k; ++k) ids[k] = places[k];
      return;
    }
    for (int i = 0; i < 16; ++i) found[i] = i < count ? keys[places[i]] : kNone;
    rank(found, count, ranks);
    for (int64_t i = 0; i < count; ++i) order[ranks[i]] = places[i];
  }
  for (int64_t k = 0; k < top_k; ++k) ids[k] = order[k];
}

// The groups that take part keep their keys, the others become −infinity.
static void limit_groups(int32_t* keys, const Route& r, std::vector<int32_t>& best) {
  int64_t size = r.experts / r.groups;
  for (int64_t g = 0; g < r.groups; ++g) {
    int32_t first = INT32_MIN, second = INT32_MIN;
    for (const int32_t* key = keys + g * size; key < keys + (g + 1) * size; ++key) {
      if (*key > first)
        second = first, first = *key;
      else if (*key > second)
        second = *key;
    }
    float sum = size > 1 ? score_of(first) + score_of(second) : score_of(first);
    best[g] = keys_of(splat(sum))[0];
  }
  for (int64_t g = 0; g < r.groups; ++g) {
    int64_t better = 0;
    for (int64_t other = 0; other < r.groups; ++other) better += best[other] > best[g] || (best[other] == best[g] && other < g);
    if (better < r.top_groups) continue;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) keys[e] = keys_of(splat(-INFINITY))[0];
  }
}

static void route_rows(const Route& r, int64_t begin, int64_t end, int64_t* found) {
  int64_t padded = (r.experts + 15) / 16 * 16;
  std::vector<int32_t> keys(padded, kNone), places(padded + 16), best(r.groups);
  Judge judge(r.experts);
  for (int64_t t = begin; t < end; ++t) {
    const float* scores = r.scores + t * r.experts;
    int64_t* ids = r.ids + t * r.top_k;
    bool chosen = r.padding && r.padding[t];
    if (!chosen && r.recorded && (!r.routed || r.routed[t])) {
      read_ids(r.recorded, r.recorded_type, t * r.top_k, r.top_k, ids);
      Ids verdict = judge(ids, r.top_k);
      if (verdict != Ids::kGood) ++found[verdict == Ids::kTwice];
      chosen = verdict != Ids::kOutside;
    }
    if (!chosen) {
      for (int64_t i = 0; i < r.experts; i += kLanes) {
        int64_t left = r.experts - i;
        vf x = load(scores + i, left);
        store(&keys[i], keys_of(r.bias ? x + load(r.bias + i, left) : x));
      }
            for (int64_t e = r.experts; e < padded; ++e) keys[e] = kNone;
      if (r.top_groups < r.groups) limit_groups(keys.data(), r, best);
      choose(keys.data(), padded, r.top_k, places, ids);
    }
    float* weights = r.weights + t * r.top_k;
    float total = 0;
    for (int64_t k = 0; k < r.top_k; ++k) total += weights[k] = scores[ids[k]];
    total = r.normalise ? total + 1e-20f : 1.0f;
    for (int64_t k = 0; k < r.top_k; k += kLanes)
      store(weights + k, load(weights + k, r.top_k - k) / total * r.scale, r.top_k - k);
  }
}

#endif
