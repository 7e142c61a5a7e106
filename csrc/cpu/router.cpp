// The router after its GEMM. A row's scores are few: they are sorted as integers in the cache, the best found K times over in a
// tournament of two rounds, sixteen at a time. Whoever replays recorded experts skips that and reads only the scores they need.

#ifndef PRL_PATH

#include "common.h"

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
  for (int64_t e = 0; e < experts; ++e) rows[e] = real[e] = 0;
  for (int64_t i = 0; i < tokens * top_k; ++i) ++rows[r.ids[i]];
  for (int64_t e = 0; e < experts; ++e) real[e] = rows[e];
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
    for (int64_t e = 0; e < experts; ++e) top = x[e] > top ? x[e] : top;
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

// Integers in the order of the scores, as sorting has it: zeros equal, NaN above all. INT32_MIN is below every score.
PRL_INLINE vi keys_of(vf x) {
  vi bits = (vi)(x + 0.0f);
  return x == x ? bits ^ ((bits >> 31) & 0x7fffffff) : vi{} + INT32_MAX;
}

PRL_INLINE float score_of(int32_t key) { return bits_to_float(key ^ ((key >> 31) & 0x7fffffff)); }

// Sixteen keys in registers.
struct Sixteen {
  vi part[16 / kLanes];

  PRL_INLINE_MEMBER explicit Sixteen(const int32_t* keys) {
    for (int v = 0; v < 16 / kLanes; ++v) part[v] = load(keys + v * kLanes);
  }

  PRL_INLINE_MEMBER int32_t top() const {
    vi m = part[0];
    for (int v = 1; v < 16 / kLanes; ++v) m = max(m, part[v]);
    return max_of(m);
  }

  // The place of the first that equals `key`; there is one.
  PRL_INLINE_MEMBER int find(int32_t key) const {
#if PRL_WIDTH == 64
    return __builtin_ctz(_mm512_cmpeq_epi32_mask((__m512i)part[0], _mm512_set1_epi32(key)));
#else
    int i = 0;
    while (part[i / kLanes][i % kLanes] != key) ++i;
    return i;
#endif
  }

  // Here and in `keys`, whole vectors at a time: the next to read them need not wait.
  PRL_INLINE_MEMBER void set(int place, int32_t key, int32_t* keys) {
    static const int32_t places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int v = 0; v < 16 / kLanes; ++v) {
      part[v] = load(places + v * kLanes) == place ? vi{} + key : part[v];
      store(keys + v * kLanes, part[v]);
    }
  }
};

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
  int64_t blocks = (r.experts + 15) / 16, rounds = (blocks + 15) / 16;
  std::vector<int32_t> keys(rounds * 256, INT32_MIN), tops(rounds * 16), best(r.groups);
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
      for (int64_t e = r.experts; e < blocks * 16; ++e) keys[e] = INT32_MIN;
      if (r.top_groups < r.groups) limit_groups(keys.data(), r, best);
      for (int64_t b = 0; b < rounds * 16; ++b) tops[b] = Sixteen(&keys[b * 16]).top();
      for (int64_t k = 0; k < r.top_k; ++k) {
        int64_t round = 0;
        int32_t top = INT32_MIN;
        for (int64_t i = 0; i < rounds; ++i)
          if (int32_t other = Sixteen(&tops[i * 16]).top(); other > top) top = other, round = i;
        Sixteen some(&tops[round * 16]);
        int64_t b = round * 16 + some.find(top);
        Sixteen block(&keys[b * 16]);
        int lane = block.find(top);
        ids[k] = b * 16 + lane;
        block.set(lane, INT32_MIN, &keys[b * 16]);
        some.set(int(b % 16), block.top(), &tops[round * 16]);
      }
    }
    float* weights = r.weights + t * r.top_k;
    float total = 0;
    for (int64_t k = 0; k < r.top_k; ++k) total += weights[k] = scores[ids[k]];
    total += 1e-20f;
    for (int64_t k = 0; k < r.top_k; ++k) weights[k] = (r.normalise ? weights[k] / total : weights[k]) * r.scale;
  }
}

#endif
