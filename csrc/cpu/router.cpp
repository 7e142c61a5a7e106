// The router after its GEMM. Of a row's scores, as integers in the cache, only those above a bound that at least K reach are
// looked at again, and these are few enough to compare each with each: no branch depends on the scores. A row that replays
// recorded experts skips all of that: of its logits only those of the chosen are read, a few rows at a time, so that their
// scores fill vectors (softmax has to see the whole row).

#ifndef PRL_PATH

#include "common.h"

#include <algorithm>
#include <atomic>
#include <cmath>

namespace prl {

enum class Scoring { kSigmoid, kSoftmax, kNone };

inline Scoring scoring_of(const std::string& name) {
  return name == "sigmoid" ? Scoring::kSigmoid : name == "softmax" ? Scoring::kSoftmax : Scoring::kNone;
}

// The arguments of `route`; pointers are null where they are None.
struct Route {
  const float* logits;
  Scoring scoring;
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

// The arguments of `route_backward`.
struct RouteBackward {
  const float* d_weights;
  const float* logits;
  Scoring scoring;
  const int64_t* ids;
  int64_t experts, top_k;
  bool normalise;
  float scale;
  float* d_logits;
};

// `n` recorded ids from the i-th on; as int32_t, what does not fit is −1.
template <class To>
inline void read_ids(const void* from, ScalarType type, int64_t i, int64_t n, To* to) {
  auto copy = [&](auto* ids) {
    for (int64_t k = 0; k < n; ++k) to[k] = int64_t(ids[i + k]) == To(ids[i + k]) ? To(ids[i + k]) : To(-1);
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

constexpr int64_t kSlots = 256;  // that are worked on together, or one row's (inspect_routes: one token's)

enum class Ids { kGood, kOutside, kTwice };

// Judges rows of ids. `seen` has an entry per expert: the last row that had it.
class Judge {
 public:
  explicit Judge(int64_t experts) : seen_(experts, -1) {}

  Ids operator()(const int32_t* ids, int64_t n) {
    ++row_;
    bool twice = false;
    for (int64_t k = 0; k < n; ++k) {
      if (uint32_t(ids[k]) >= seen_.size()) return Ids::kOutside;
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

std::tuple<Tensor, Tensor, Tensor> route(
    const Tensor& logits_TE, std::string scoring, const std::optional<Tensor>& bias_E, const std::optional<Tensor>& recorded_TK,
    const std::optional<Tensor>& routed_T, const std::optional<Tensor>& padding_T, int64_t top_k, int64_t n_group,
    int64_t topk_group, bool normalise, double scale) {
  int64_t tokens = logits_TE.size(0), experts = logits_TE.size(1);
  STD_TORCH_CHECK(0 < top_k && top_k <= experts, "route: top_k must be 1 to ", experts, ", got ", top_k);
  Tensor ids_TK = empty({tokens, top_k}, kI64), weights_TK = empty({tokens, top_k}, kF32), counts_E = empty({experts}, kI64);
  Route r = {in<float>(logits_TE), scoring_of(scoring), in<float>(bias_E),
             recorded_TK ? recorded_TK->const_data_ptr() : nullptr, recorded_TK ? recorded_TK->scalar_type() : kI64,
             in<bool>(routed_T), in<bool>(padding_T), experts, top_k, n_group, topk_group, normalise, float(scale),
             out<int64_t>(ids_TK), out<float>(weights_TK)};
  std::atomic<int64_t> outside = -1;  // the slot of an id out of range
  auto kernel = PRL_CHOOSE(route_rows);
  parallel(tokens, 8192 / (experts + 1), [&](int64_t begin, int64_t end) {
    int64_t slot = kernel(r, begin, end);
    if (slot >= 0) outside = slot;
  });
  STD_TORCH_CHECK(outside < 0, "route: recorded_TK must be 0 to ", experts - 1, " where it is replayed, got ", r.ids[outside]);
  // In four parts, since an addition must wait for the last one to the same place.
  std::vector<int64_t> parts(4 * experts);
  int64_t slots = tokens * top_k, done = 0, *part = parts.data(), *counts = out<int64_t>(counts_E);
  for (; done + 4 <= slots; done += 4)
    for (int64_t i = 0; i < 4; ++i) ++part[i * experts + r.ids[done + i]];
  for (; done < slots; ++done) ++part[r.ids[done]];
  for (int64_t e = 0; e < experts; ++e) counts[e] = part[e] + part[experts + e] + part[2 * experts + e] + part[3 * experts + e];
  if (r.padding)
    for (int64_t i = 0; i < slots; ++i) counts[r.ids[i]] -= r.padding[i / top_k];
  return {ids_TK, weights_TK, counts_E};
}

Tensor route_backward(const Tensor& d_weights_TK, const Tensor& logits_TE, std::string scoring, const Tensor& ids_TK,
                      bool normalise, double scale) {
  int64_t tokens = logits_TE.size(0), experts = logits_TE.size(1), top_k = ids_TK.size(1);
  Tensor d_logits_TE = empty({tokens, experts}, kF32);
  const int64_t* ids = in<int64_t>(ids_TK);
  for (int64_t i = 0; i < tokens * top_k; ++i)
    STD_TORCH_CHECK(uint64_t(ids[i]) < uint64_t(experts), "route_backward: ids_TK must be 0 to ", experts - 1, ", got ", ids[i]);
  RouteBackward r = {in<float>(d_weights_TK), in<float>(logits_TE), scoring_of(scoring), ids, experts, top_k, normalise,
                     float(scale), out<float>(d_logits_TE)};
  auto kernel = PRL_CHOOSE(route_backward_rows);
  parallel(tokens, 16384 / (experts + 1), [&](int64_t begin, int64_t end) { kernel(r, begin, end); });
  return d_logits_TE;
}

Tensor inspect_routes(const Tensor& routes_TLK, const std::optional<Tensor>& routed_T, int64_t n_experts) {
  int64_t tokens = routes_TLK.size(0), layers = routes_TLK.size(1), top_k = routes_TLK.size(2);
  Tensor result = empty({3}, kI64);
  const void* from = routes_TLK.const_data_ptr();
  ScalarType type = routes_TLK.scalar_type();
  const bool* routed = in<bool>(routed_T);
  std::atomic<int64_t> outside = 0, twice = 0, first = tokens * layers;
  auto doubt = PRL_CHOOSE(suspicious);
  int64_t width = layers * top_k, step = std::max<int64_t>(1, kSlots / std::max<int64_t>(1, width));
  parallel(tokens, 65536 / (width + 1), [&](int64_t begin, int64_t end) {
    Judge judge(n_experts);
    std::vector<int32_t> ids(step * width + top_k + 16), places(ids.size(), int32_t(top_k));
    for (int64_t i = 0; i < step * width; ++i) places[i] = int32_t(i % top_k);
    int64_t found[2] = {}, mine = tokens * layers;
    for (int64_t t = begin; t < end; t += step) {
      int64_t last = t + step < end ? t + step : end, n = 0;
      if (!routed) {
        n = (last - t) * width;
        read_ids(from, type, t * width, n, ids.data());
      } else {
        for (int64_t u = t; u < last; ++u)
          if (routed[u]) read_ids(from, type, u * width, width, &ids[n]), n += width;
      }
      if (!doubt(ids.data(), places.data(), n, top_k, n_experts)) continue;
      const int32_t* row = ids.data();
      for (int64_t i = t * layers; i < last * layers; ++i) {
        if (routed && !routed[i / layers]) continue;
        Ids verdict = judge(row, top_k);
        row += top_k;
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
  m.def(
      "route(Tensor logits_TE, str scoring, Tensor? bias_E, Tensor? recorded_TK, Tensor? routed_T, Tensor? padding_T, int top_k,"
      " int n_group, int topk_group, bool normalise, float scale) -> (Tensor, Tensor, Tensor)");
  m.def("route_backward(Tensor d_weights_TK, Tensor logits_TE, str scoring, Tensor ids_TK, bool normalise, float scale) -> Tensor");
  m.def("inspect_routes(Tensor routes_TLK, Tensor? routed_T, int n_experts) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("route", TORCH_BOX(&prl::route));
  m.impl("route_backward", TORCH_BOX(&prl::route_backward));
  m.impl("inspect_routes", TORCH_BOX(&prl::inspect_routes));
}

#else

static void sigmoids(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, sigmoid(load(x + i, n - i)), n - i);
}

// Exponentials are added in the order of the lanes of `Sum`.
static void softmax(const float* x, int64_t n, float* y) {
  float top = -INFINITY;
  vf tops = splat(top);
  for (int64_t i = 0; i < n; i += kLanes) {
    vf v = load(x + i, n - i, -INFINITY);
    tops = v > tops ? v : tops;
  }
  for (int i = 0; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
  Sum sum;
  for (int64_t i = 0; i < n; i += kLanes) {
    vf e = exp(load(x + i, n - i, -INFINITY) - top);
    vf& part = sum.part[i / kLanes % (16 / kLanes)];
    part = part + e;
    store(y + i, e, n - i);
  }
  float total = sum.total();
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, load(y + i, n - i) / total, n - i);
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

// The best of a row, given its logits or, with a softmax, its scores.
PRL_INLINE void choose_row(const Route& r, const float* from, std::vector<int32_t>& keys, std::vector<int32_t>& places,
                           std::vector<int32_t>& best, int64_t* ids) {
  for (int64_t i = 0; i < r.experts; i += kLanes) {
    int64_t left = r.experts - i;
    vf x = load(from + i, left);
    if (r.scoring == Scoring::kSigmoid) x = sigmoid(x);
    store(&keys[i], keys_of(r.bias ? x + load(r.bias + i, left) : x));
  }
  for (int64_t e = r.experts; e < int64_t(keys.size()); ++e) keys[e] = kNone;
  if (r.top_groups < r.groups) limit_groups(keys.data(), r, best);
  choose(keys.data(), keys.size(), r.top_k, places, ids);
}

// Whether of `n` ids, rows of top_k, one may be out of range or twice in its row; `places` has the place of each in its row.
static bool suspicious(const int32_t* ids, const int32_t* places, int64_t n, int64_t top_k, int64_t experts) {
  vi found = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    vi mine = load(ids + i), place = load(places + i);
    found |= (vu)mine >= uint32_t(experts);
    for (int64_t d = 1; d < top_k; ++d) found |= (mine == load(ids + i + d)) & (place < int32_t(top_k - d));
  }
  return max_of(-found) > 0;
}

// What stands in each of some rows at its top_k ids.
template <int kTopK>
PRL_INLINE void gather(const float* from, int64_t experts, const int64_t* ids, int64_t top_k, int64_t rows, float* to) {
  const int64_t k = kTopK ? kTopK : top_k;
  for (int64_t t = 0; t < rows; ++t, from += experts)
    for (int64_t i = 0; i < k; ++i) to[t * k + i] = from[ids[t * k + i]];
}

// The functions of rows know top_k where it is usual: 0 is any other.
#define PRL_TOP_K(f, k) ((k) == 8 ? f<8> : (k) == 4 ? f<4> : f<0>)

template <int kTopK>
static int64_t route_some_rows(const Route& r, int64_t begin, int64_t end) {
  const int64_t k = kTopK ? kTopK : r.top_k, e = r.experts, step = std::max<int64_t>(1, kSlots / k);
  std::vector<int32_t> keys((e + 15) / 16 * 16), places(keys.size() + 16), best(r.groups);
  std::vector<float> row(e), chosen(step * k + 16), totals(step * k + 16);
  const bool soft = r.scoring == Scoring::kSoftmax, replaying = r.recorded, *routed = r.routed, *padding = r.padding;
  int64_t dealt = 0;
  if (padding)
    for (int64_t t = 0; t < begin; ++t) dealt += padding[t];
  dealt = dealt * k % e;
  for (int64_t first = begin; first < end; first += step) {
    int64_t rows = std::min(step, end - first), *ids = r.ids + first * k;
    const float* logits = r.logits + first * e;
    uint64_t largest = 0;
    if (replaying) {
      read_ids(r.recorded, r.recorded_type, first * k, rows * k, ids);
      for (int64_t i = 0; i < rows * k; ++i) largest = std::max(largest, uint64_t(ids[i]));
    }
    for (int64_t t = first; t < first + rows; ++t) {
      int64_t* id = ids + (t - first) * k;
      const float* from = logits + (t - first) * e;
      if (soft) softmax(from, e, row.data()), from = row.data();
      if (padding && padding[t]) {
        for (int64_t i = 0; i < k; ++i, dealt = dealt + 1 < e ? dealt + 1 : 0) id[i] = dealt;
      } else if (!replaying || (routed && !routed[t])) {
        choose_row(r, from, keys, places, best, id);
      } else if (largest >= uint64_t(e)) {
        for (int64_t i = 0; i < k; ++i)
          if (uint64_t(id[i]) >= uint64_t(e)) return t * k + i;
      }
      if (soft) gather<kTopK>(from, e, id, k, 1, &chosen[(t - first) * k]);
    }
    if (!soft) gather<kTopK>(logits, e, ids, k, rows, chosen.data());
    if (r.scoring == Scoring::kSigmoid) sigmoids(chosen.data(), rows * k);
    for (int64_t t = 0; t < rows; ++t) {
      float total = 0;
      for (int64_t i = 0; i < k; ++i) total += chosen[t * k + i];
      total = r.normalise ? total + 1e-20f : 1.0f;
      for (int64_t i = 0; i < k; i += kLanes) store(&totals[t * k + i], splat(total));  // the next row overwrites the excess
    }
    float* weights = r.weights + first * k;
    for (int64_t i = 0, n = rows * k; i < n; i += kLanes)
      store(weights + i, load(&chosen[i]) / load(&totals[i]) * r.scale, n - i);
  }
  return -1;
}

// Rows [begin, end). Returns the first slot that replays an id out of range, or −1.
static int64_t route_rows(const Route& r, int64_t begin, int64_t end) {
  return PRL_TOP_K(route_some_rows, r.top_k)(r, begin, end);
}

template <int kTopK>
static void route_backward_some_rows(const RouteBackward& r, int64_t begin, int64_t end) {
  const int64_t k = kTopK ? kTopK : r.top_k, e = r.experts;
  const bool soft = r.scoring == Scoring::kSoftmax;
  const int64_t step = soft ? 1 : std::max<int64_t>(1, kSlots / std::max<int64_t>(1, k));
  std::vector<float> row(e), chosen(step * k + 16);
  for (int64_t first = begin; first < end; first += step) {
    int64_t rows = std::min(step, end - first);
    const int64_t* id = r.ids + first * k;
    const float *d_weights = r.d_weights + first * k, *score = chosen.data();
    const float* from = r.logits + first * e;
    float* to = r.d_logits + first * e;
    if (soft) softmax(from, e, row.data()), from = row.data();
    gather<kTopK>(from, e, id, k, rows, chosen.data());
    if (r.scoring == Scoring::kSigmoid) sigmoids(chosen.data(), rows * k);
    memset(to, 0, rows * e * sizeof(float));
    for (int64_t t = 0; t < rows; ++t, id += k, d_weights += k, score += k, to += e) {
      float total = 0, slope = 0, common = 0;
      if (r.normalise) {
        for (int64_t i = 0; i < k; ++i) total += score[i];
        for (int64_t i = 0; i < k; ++i) slope += d_weights[i] * r.scale * score[i];
        total += 1e-20f;
        slope /= total;
      } else {
        total = 1.0f;
      }
      for (int64_t i = 0; i < k; ++i) {
        float d = (d_weights[i] * r.scale - slope) / total;
        to[id[i]] += r.scoring == Scoring::kSigmoid ? d * (score[i] * (1.0f - score[i])) : d;
        common += d * score[i];
      }
      if (soft)
        for (int64_t i = 0; i < e; i += kLanes) store(to + i, load(&row[i], e - i) * (load(to + i, e - i) - common), e - i);
    }
  }
}

static void route_backward_rows(const RouteBackward& r, int64_t begin, int64_t end) {
  PRL_TOP_K(route_backward_some_rows, r.top_k)(r, begin, end);
}

#endif
