// The fused LM head: logprob and entropy of labels, and both gradients, without ever holding all logits.
//
// A panel of 64 words meets up to 512 tokens at a time. Forward, its logits stay in the first-level cache for one update of the
// running maximum m, sum s = Σ exp(z − m) and moment t = Σ exp(z − m)(z − m), kept for 16 columns apart so that no step crosses
// lanes; the entropy log s − t / s then has no cancellation of large logits. Backward computes the logits again and turns them
// into slopes, for 512 words at a time, which both gradients' products read.
// With bfloat16 operands the slopes are rounded to bfloat16 for these products, but for the label's, by far the largest: what
// it loses is added apart.

#include "gemm.h"

#include <cmath>
#include <limits>

namespace prl {
namespace {

constexpr int64_t kIgnore = -100;
constexpr int64_t kTokens = 512;
constexpr int64_t kSlab = 1024;  // words whose sums one thread makes, forward
constexpr int64_t kWords = 512;  // words whose slopes exist at once, backward
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kVanishes = -104;  // exp of it is 0, and stays so times itself

struct State {
  alignas(64) float m[kLanes], s[kLanes], t[kLanes];
};

struct Sums {
  float m, s, t;
};

// Of one token; its logits over its temperature are z.
struct Token {
  float temperature, total, entropy, d_logprob, d_entropy;
  int64_t label;  // within the panel; elsewhere negative or too large
};

struct Softmax {
  void (*advance)(const float* logits, int64_t columns, float temperature, State& state);
  Sums (*finish)(const State& state);
  void (*slopes)(const float* logits, int64_t columns, const Token& token, float* slopes);  // 64, zeros after `columns`
};

Sums finish_portable(const State& state) {
  Sums sums = {kLowest, 0, 0};
  for (float m : state.m) sums.m = m > sums.m || std::isnan(m) ? m : sums.m;
  for (int l = 0; l < kLanes; ++l) {
    const float d = std::max(state.m[l] - sums.m, kVanishes), e = std::exp(d);
    sums.s += state.s[l] * e;
    sums.t += (state.t[l] + d * state.s[l]) * e;
  }
  return sums;
}

void advance_portable(const float* logits, int64_t columns, float temperature, State& state) {
  for (int64_t j = 0; j < columns; ++j) {
    const int l = int(j % kLanes);
    const float z = logits[j] / temperature;
    if (!(z <= state.m[l])) {
      const float d = std::max(state.m[l] - z, kVanishes), e = std::exp(d);
      state.t[l] = (state.t[l] + d * state.s[l]) * e;
      state.s[l] *= e;
      state.m[l] = z;
    }
    const float d = std::isnan(z) ? z : std::max(z - state.m[l], kVanishes), e = std::exp(d);
    state.s[l] += e;
    state.t[l] += e * d;
  }
}

void slopes_portable(const float* logits, int64_t columns, const Token& token, float* slopes) {
  for (int64_t j = 0; j < kColumns; ++j) {
    slopes[j] = 0;
    if (j >= columns) continue;
    const float log_p = std::max(logits[j] / token.temperature - token.total, kVanishes);
    float slope = -(log_p + token.entropy) * token.d_entropy - token.d_logprob;
    slope *= std::exp(log_p);
    if (j == token.label) slope += token.d_logprob;
    slopes[j] = slope / token.temperature;
  }
}

constexpr Softmax portable = {advance_portable, finish_portable, slopes_portable};

#ifdef PRL_X86

// Within 1.5 units in the last place; 2^n e^r with |r| <= ln 2 / 2 and the polynomial of Cephes' expf (S. Moshier).
PRL_AVX512_INLINE __m512 exp(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
  return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1)), n);
}

// The larger, and the second if it is NaN.
PRL_AVX512_INLINE __m512 at_least(float floor, __m512 x) { return _mm512_max_ps(_mm512_set1_ps(floor), x); }

// x / by, as exact as a division, which is many times as long. `inverse` is 1 / by.
PRL_AVX512_INLINE __m512 divide(__m512 x, __m512 by, __m512 inverse) {
  const __m512 q = _mm512_mul_ps(x, inverse);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(q, by, x), inverse, q);
}

PRL_AVX512_INLINE __mmask16 lanes(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

PRL_AVX512 void advance_avx512(const float* logits, int64_t columns, float temperature, State& state) {
  __m512 z[4], m = _mm512_load_ps(state.m), s = _mm512_load_ps(state.s), t = _mm512_load_ps(state.t);
  const __m512 before = m, by = _mm512_set1_ps(temperature), inverse = _mm512_set1_ps(1 / temperature);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    z[j] = divide(_mm512_load_ps(logits + j * kLanes), by, inverse);
    m = _mm512_mask_max_ps(m, lanes(columns - j * kLanes), m, z[j]);
  }
  if (_mm512_cmp_ps_mask(m, before, _CMP_NEQ_UQ)) {
    const __m512 d = at_least(kVanishes, _mm512_sub_ps(before, m)), e = exp(d);
    t = _mm512_mul_ps(_mm512_fmadd_ps(d, s, t), e);
    s = _mm512_mul_ps(s, e);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __mmask16 mask = lanes(columns - j * kLanes);
    const __m512 d = at_least(kVanishes, _mm512_sub_ps(z[j], m)), e = exp(d);
    s = _mm512_mask_add_ps(s, mask, s, e);
    t = _mm512_mask3_fmadd_ps(e, d, t, mask);
  }
  _mm512_store_ps(state.m, m);
  _mm512_store_ps(state.s, s);
  _mm512_store_ps(state.t, t);
}

PRL_AVX512 Sums finish_avx512(const State& state) {
  const __m512 m = _mm512_load_ps(state.m), s = _mm512_load_ps(state.s), t = _mm512_load_ps(state.t);
  const float top = _mm512_reduce_max_ps(m);
  const __m512 d = at_least(kVanishes, _mm512_sub_ps(m, _mm512_set1_ps(top))), e = exp(d);
  return {top, _mm512_reduce_add_ps(_mm512_mul_ps(s, e)), _mm512_reduce_add_ps(_mm512_mul_ps(_mm512_fmadd_ps(d, s, t), e))};
}

PRL_AVX512 void slopes_avx512(const float* logits, int64_t columns, const Token& token, float* slopes) {
  const __m512 by = _mm512_set1_ps(token.temperature), inverse = _mm512_set1_ps(1 / token.temperature);
  const __m512 total = _mm512_set1_ps(token.total);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __mmask16 mask = lanes(columns - j * kLanes);
    const __mmask16 label = token.label >= j * kLanes && token.label < (j + 1) * kLanes ? 1u << (token.label % kLanes) : 0;
    const __m512 z = divide(_mm512_load_ps(logits + j * kLanes), by, inverse);
    const __m512 log_p = at_least(kVanishes, _mm512_sub_ps(z, total)), p = exp(log_p);
    __m512 slope = _mm512_add_ps(log_p, _mm512_set1_ps(token.entropy));
    slope = _mm512_fmadd_ps(slope, _mm512_set1_ps(token.d_entropy), _mm512_set1_ps(token.d_logprob));
    slope = _mm512_mul_ps(p, slope);
    slope = _mm512_sub_ps(_mm512_maskz_mov_ps(label, _mm512_set1_ps(token.d_logprob)), slope);
    _mm512_store_ps(slopes + j * kLanes, _mm512_maskz_mov_ps(mask, divide(slope, by, inverse)));
  }
}

constexpr Softmax wide = {advance_avx512, finish_avx512, slopes_avx512};
const Softmax& softmax() { return avx512() ? wide : portable; }

#else
const Softmax& softmax() { return portable; }
#endif

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f(piece, first row, rows) for `pieces` pieces of work on `rows` rows; the rows are cut only where threads would be idle.
template <class F>
void for_pieces(int64_t pieces, int64_t rows, const F& f) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t cuts = pieces >= threads ? 1 : std::min(ceil_div(threads, pieces + !pieces), ceil_div(rows, 4 * kRows));
  const int64_t height = ceil_div(ceil_div(rows, cuts + !cuts), kRows) * kRows;
  parallel(pieces * cuts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % cuts * height;
      if (first < rows) f(item / cuts, first, std::min(height, rows - first));
    }
  });
}

// The products of one call: hidden states of the tokens that have a label, and the weight.
struct Head {
  const Tensor &hidden, &weight;
  int64_t d = hidden.size(1), v = weight.size(0);
  ScalarType hidden_dtype = hidden.scalar_type(), weight_dtype = weight.scalar_type();
  Kind kind = hidden_dtype == kBF16 && weight_dtype == kBF16 ? Kind::bf16 : Kind::f32;
  int64_t units = units_of(kind, d);

  const char* word(int64_t i) const { return in<char>(weight) + i * d * size_of(weight_dtype); }

  // f(row, logits) for `rows` rows and the words of one panel; f reads 64 floats.
  template <class F>
  void logits(Rows a, int64_t rows, int64_t first, int64_t columns, const F& f) const {
    static thread_local Scratch panel_scratch, weight_scratch;
    alignas(64) float z[kRows * kColumns] = {};
    float* b = panel_scratch.get<float>(units * kColumns);
    pack_rows(kind, weight_dtype, b, word(first), d, columns, d, weight_scratch);
    for (int64_t i = 0; i < rows; i += kRows) {
      const int64_t n = std::min(kRows, rows - i);
      kernels().tile[int(kind)]({a.at(i), a.row, 4, b, units, n, columns, z, kColumns, Store::f32});
      for (int64_t j = 0; j < n; ++j) f(i + j, z + j * kColumns);
    }
  }
};

std::vector<int64_t> labelled(const Tensor& labels_T) {
  std::vector<int64_t> rows;
  const int64_t* labels = in<int64_t>(labels_T);
  for (int64_t t = 0; t < labels_T.numel(); ++t)
    if (labels[t] != kIgnore) rows.push_back(t);
  return rows;
}

Tensor zeros(std::initializer_list<int64_t> sizes, ScalarType dtype) {
  Tensor t = empty(sizes, dtype);
  std::memset(out<char>(t), 0, t.numel() * size_of(dtype));
  return t;
}

void begin(State* states, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    std::fill_n(states[i].m, kLanes, kLowest);
    std::fill_n(states[i].s, 2 * kLanes, 0.0f);
  }
}

// The sums of all slabs, `stride` apart, put together in their order.
Sums join(const Sums* parts, int64_t slabs, int64_t stride) {
  Sums all = parts[0];
  for (int64_t slab = 1; slab < slabs; ++slab) {
    const Sums& part = parts[slab * stride];
    const float m = part.m > all.m || std::isnan(part.m) ? part.m : all.m;
    const float d = std::max(all.m - m, kVanishes), e = std::exp(d);
    const float part_d = std::max(part.m - m, kVanishes), part_e = std::exp(part_d);
    all = {m, all.s * e + part.s * part_e, (all.t + d * all.s) * e + (part.t + part_d * part.s) * part_e};
  }
  return all;
}

// `z` is the label's logit over the temperature.
float logprob_of(float z, const Sums& all) { return (z - all.m) - std::log(all.s); }

std::tuple<Tensor, Tensor, Tensor> logprobs(
    const Tensor& hidden_TD, const Tensor& weight_VD, const Tensor& labels_T, const Tensor& temperature_T, int64_t chunk) {
  const Head head{hidden_TD, weight_VD};
  const int64_t tokens = hidden_TD.size(0), slabs = ceil_div(head.v, kSlab);
  Tensor logprob_T = zeros({tokens}, kF32), entropy_T = zeros({tokens}, kF32), total_T = zeros({tokens}, kF32);
  const std::vector<int64_t> index = labelled(labels_T);
  const int64_t *labels = in<int64_t>(labels_T), kept = int64_t(index.size());
  const float* temperature = in<float>(temperature_T);
  float *logprob = out<float>(logprob_T), *entropy = out<float>(entropy_T), *total = out<float>(total_T);
  static thread_local Scratch row_scratch;
  std::vector<Sums> parts(slabs * std::min({kTokens, chunk, kept}));
  for (int64_t done = 0; done < kept; done += kTokens < chunk ? kTokens : chunk) {
    const int64_t n = std::min({kTokens, chunk, kept - done}), *at = index.data() + done;
    const Rows a = rows_of(head.kind, head.hidden_dtype, in<char>(hidden_TD), at, n, head.d, row_scratch);
    for_pieces(slabs, n, [&](int64_t slab, int64_t first_row, int64_t rows) {
      static thread_local Scratch state_scratch;
      State* states = state_scratch.get<State>(rows);
      begin(states, rows);
      const int64_t stop = std::min(head.v, (slab + 1) * kSlab);
      for (int64_t first = slab * kSlab; first < stop; first += kColumns) {
        const int64_t columns = std::min(kColumns, stop - first);
        head.logits({a.at(first_row), a.row}, rows, first, columns, [&](int64_t i, const float* z) {
          const int64_t t = at[first_row + i];
          softmax().advance(z, columns, temperature[t], states[i]);
          if (labels[t] >= first && labels[t] < first + columns) logprob[t] = z[labels[t] - first] / temperature[t];
        });
      }
      for (int64_t i = 0; i < rows; ++i) parts[slab * n + first_row + i] = softmax().finish(states[i]);
    });
    for (int64_t i = 0; i < n; ++i) {
      const Sums all = join(&parts[i], slabs, n);
      const int64_t t = at[i];
      logprob[t] = logprob_of(logprob[t], all);
      entropy[t] = std::log(all.s) - all.t / all.s;
      total[t] = all.m + std::log(all.s);
    }
  }
  return {logprob_T, entropy_T, total_T};
}

// What `logprobs` says of the logits that `logits` returns, bit for bit: the same steps in the same order.
Tensor label_logprobs(const Tensor& logits_TV, const Tensor& labels_T, const Tensor& temperature_T) {
  const int64_t tokens = logits_TV.size(0), v = logits_TV.size(1), slabs = ceil_div(v, kSlab);
  Tensor logprob_T = empty({tokens}, kF32);
  const float *logits = in<float>(logits_TV), *temperature = in<float>(temperature_T);
  const int64_t* labels = in<int64_t>(labels_T);
  float* logprob = out<float>(logprob_T);
  parallel(tokens, 1 + (int64_t(1) << 14) / v, [&](int64_t first_token, int64_t end) {
    std::vector<Sums> parts(slabs);
    alignas(64) float z[kColumns] = {};
    for (int64_t t = first_token; t < end; ++t) {
      const float* row = logits + t * v;
      for (int64_t slab = 0; slab < slabs; ++slab) {
        State state;
        begin(&state, 1);
        const int64_t stop = std::min(v, (slab + 1) * kSlab);
        for (int64_t first = slab * kSlab; first < stop; first += kColumns) {
          const int64_t columns = std::min(kColumns, stop - first);
          std::copy_n(row + first, columns, z);
          softmax().advance(z, columns, temperature[t], state);
        }
        parts[slab] = softmax().finish(state);
      }
      logprob[t] = logprob_of(row[labels[t]] / temperature[t], join(parts.data(), slabs, 1));
    }
  });
  return logprob_T;
}

// to += x · row of `dtype`.
void add_row(float* to, float x, const void* row, ScalarType dtype, int64_t n) {
  if (dtype == kBF16) {
    for (int64_t i = 0; i < n; ++i) to[i] += x * to_float(static_cast<const bf16*>(row)[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] += x * static_cast<const float*>(row)[i];
  }
}

std::tuple<Tensor, Tensor> logprobs_backward(
    const std::optional<Tensor>& d_logprob_T,
    const std::optional<Tensor>& d_entropy_T,
    const Tensor& hidden_TD,
    const Tensor& weight_VD,
    const Tensor& labels_T,
    const Tensor& temperature_T,
    const Tensor& entropy_T,
    const Tensor& total_T,
    int64_t chunk,
    bool want_hidden,
    bool want_weight) {
  const Head head{hidden_TD, weight_VD};
  const int64_t d = head.d, v = head.v, panels = ceil_div(d, kColumns);
  const Kind kind = head.kind;
  const ScalarType dtype = kind == Kind::bf16 ? kBF16 : kF32;  // of the slopes and of both operands once read
  const int64_t element = size_of(dtype);
  Tensor d_hidden_TD = want_hidden ? zeros({hidden_TD.size(0), d}, head.hidden_dtype) : empty({0, 0}, head.hidden_dtype);
  const std::vector<int64_t> index = labelled(labels_T);
  Tensor d_weight_VD = !want_weight ? empty({0, 0}, kF32) : index.empty() ? zeros({v, d}, kF32) : empty({v, d}, kF32);
  float* d_weight = out<float>(d_weight_VD);
  const int64_t *labels = in<int64_t>(labels_T), kept = int64_t(index.size());
  const float *temperature = in<float>(temperature_T), *entropy = in<float>(entropy_T), *total = in<float>(total_T);
  const float *d_logprob = in<float>(d_logprob_T), *d_entropy = in<float>(d_entropy_T);
  static thread_local Scratch row_scratch, panel_scratch, slope_scratch, sum_scratch;
  for (int64_t done = 0; done < kept; done += kTokens < chunk ? kTokens : chunk) {
    const int64_t n = std::min({kTokens, chunk, kept - done}), *at = index.data() + done, units = units_of(kind, n);
    const Rows a = rows_of(kind, head.hidden_dtype, in<char>(hidden_TD), at, n, d, row_scratch);
    std::vector<float> rest(n);  // of the label's slope
    char* slopes = slope_scratch.get<char>(n * kWords * element);
    float* sums = want_hidden ? sum_scratch.get<float>(n * d) : nullptr;
    float* hidden = want_weight ? panel_scratch.get<float>(panels * units * kColumns) : nullptr;
    if (want_weight) {
      for_pieces(panels, 1, [&](int64_t p, int64_t, int64_t) {
        static thread_local Scratch unused;
        const int64_t columns = std::min(kColumns, d - p * kColumns);
        pack_columns(kind, dtype, hidden + p * units * kColumns, a.data + p * kColumns * element, a.row / element, columns, n, unused);
      });
    }
    for (int64_t word = 0; word < v; word += kWords) {
      const int64_t words = std::min(kWords, v - word);
      for_pieces(ceil_div(words, kColumns), n, [&](int64_t p, int64_t first_row, int64_t rows) {
        const int64_t first = word + p * kColumns, columns = std::min(kColumns, v - first);
        head.logits({a.at(first_row), a.row}, rows, first, columns, [&](int64_t i, const float* z) {
          alignas(64) float slope[kColumns];
          i += first_row;
          const int64_t t = at[i], label = labels[t] - first;
          const float lp = d_logprob ? d_logprob[t] : 0, h = d_entropy ? d_entropy[t] : 0;
          softmax().slopes(z, columns, {temperature[t], total[t], entropy[t], lp, h, label}, slope);
          char* to = slopes + (i * kWords + p * kColumns) * element;
          if (kind == Kind::f32) {
            std::memcpy(to, slope, sizeof slope);
          } else {
            kernels().narrow(reinterpret_cast<bf16*>(to), slope, kColumns);
            if (label >= 0 && label < columns) rest[i] = slope[label] - to_float(reinterpret_cast<bf16*>(to)[label]);
          }
        });
      });
      const auto labelled_here = [&](int64_t i, int64_t first, int64_t stop) {
        return kind == Kind::bf16 && labels[at[i]] >= first && labels[at[i]] < stop;
      };
      if (want_hidden) {
        for_pieces(panels, n, [&](int64_t p, int64_t first_row, int64_t rows) {
          static thread_local Scratch b_scratch, weight_scratch;
          const int64_t first = p * kColumns, columns = std::min(kColumns, d - first);
          float *b = b_scratch.get<float>(units_of(kind, words) * kColumns), *c = sums + first_row * d + first;
          const char* w = head.word(word) + first * size_of(head.weight_dtype);
          pack_columns(kind, head.weight_dtype, b, w, d, columns, words, weight_scratch);
          const char* slope = slopes + first_row * kWords * element;
          const Store store = word ? Store::add : Store::f32;
          multiply(kind, {slope, kWords * element, 4, b, units_of(kind, words), 0, columns, c, d, store}, rows);
          for (int64_t i = first_row; i < first_row + rows; ++i) {
            if (!labelled_here(i, word, word + words)) continue;
            const char* row = head.word(labels[at[i]]) + first * size_of(head.weight_dtype);
            add_row(sums + i * d + first, rest[i], row, head.weight_dtype, columns);
          }
        });
      }
      if (want_weight) {
        for_pieces(ceil_div(words, kColumns), 1, [&](int64_t p, int64_t, int64_t) {
          static thread_local Scratch a_scratch, unused;
          const int64_t first = p * kColumns, rows = std::min(kColumns, words - first);
          float* g = a_scratch.get<float>(units * kColumns);
          pack_columns(kind, dtype, g, slopes + first * element, kWords, rows, n, unused);
          outer(kind, g, rows, hidden, units, d, d_weight + (word + first) * d, done ? Store::add : Store::f32);
          for (int64_t i = 0; i < n; ++i)
            if (labelled_here(i, word + first, word + first + rows))
              add_row(d_weight + labels[at[i]] * d, rest[i], a.at(i), dtype, d);
        });
      }
    }
    if (want_hidden) {
      for (int64_t i = 0; i < n; ++i) {
        if (head.hidden_dtype == kBF16) {
          kernels().narrow(out<bf16>(d_hidden_TD) + at[i] * d, sums + i * d, d);
        } else {
          std::memcpy(out<float>(d_hidden_TD) + at[i] * d, sums + i * d, d * sizeof(float));
        }
      }
    }
  }
  return {d_hidden_TD, d_weight_VD};
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("label_logprobs(Tensor logits_TV, Tensor labels_T, Tensor temperature_T) -> Tensor");
  m.def(
      "logprobs(Tensor hidden_TD, Tensor weight_VD, Tensor labels_T, Tensor temperature_T, int chunk)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "logprobs_backward(Tensor? d_logprob_T, Tensor? d_entropy_T, Tensor hidden_TD, Tensor weight_VD, Tensor labels_T,"
      " Tensor temperature_T, Tensor entropy_T, Tensor total_T, int chunk, bool want_hidden, bool want_weight)"
      " -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("label_logprobs", TORCH_BOX(&prl::label_logprobs));
  m.impl("logprobs", TORCH_BOX(&prl::logprobs));
  m.impl("logprobs_backward", TORCH_BOX(&prl::logprobs_backward));
}
