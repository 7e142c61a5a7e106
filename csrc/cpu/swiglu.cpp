// SwiGLU. Element by element where nothing else is asked; where columns are quantised too, the float32 product of a tile of
// 128x128 stays in the cache. The exponential is our own: torch's sigmoid depends on an element's place in the tensor.

#ifndef PRL_PATH

#include "common.h"

#include <cmath>

namespace prl {

// Where swiglu_backward_quantise writes: d_gate_up by row and by column, weight times activation by column, d_weights.
struct Backward {
  f8* codes;
  float* scales;
  f8* column_codes;
  float* column_scales;
  f8* act_codes;
  float* act_scales;
  float* d_weights;
};

}  // namespace prl

#define PRL_KERNELS "swiglu.cpp"
#include "twice.h"

namespace prl {
namespace {

template <class T>
void forward(const Tensor& gate_up_RJ, const Tensor& out_RI) {
  int64_t width = out_RI.size(1);
  auto kernel = PRL_CHOOSE(forward<T>);
  const T* gate_up = in<T>(gate_up_RJ);
  T* to = out<T>(out_RI);
  parallel(out_RI.size(0), 8192 / (width + 1), [&](int64_t begin, int64_t end) { kernel(gate_up, width, to, begin, end); });
}

Tensor swiglu(const Tensor& gate_up_RJ) {
  Tensor out_RI = empty({gate_up_RJ.size(0), gate_up_RJ.size(1) / 2}, gate_up_RJ.scalar_type());
  gate_up_RJ.scalar_type() == kBF16 ? forward<bf16>(gate_up_RJ, out_RI) : forward<float>(gate_up_RJ, out_RI);
  return out_RI;
}

template <class T>
void backward(const Tensor& gate_up_RJ, const Tensor& grad_RI, const Tensor& d_gate_up_RJ) {
  int64_t width = grad_RI.size(1);
  auto kernel = PRL_CHOOSE(backward<T>);
  const T *gate_up = in<T>(gate_up_RJ), *grad = in<T>(grad_RI);
  T* to = out<T>(d_gate_up_RJ);
  parallel(grad_RI.size(0), 8192 / (width + 1), [&](int64_t begin, int64_t end) {
    kernel(gate_up, grad, width, to, begin, end);
  });
}

Tensor swiglu_backward(const Tensor& gate_up_RJ, const Tensor& grad_RI) {
  Tensor d_gate_up_RJ = empty({gate_up_RJ.size(0), gate_up_RJ.size(1)}, gate_up_RJ.scalar_type());
  auto run = gate_up_RJ.scalar_type() == kBF16 ? backward<bf16> : backward<float>;
  run(gate_up_RJ, grad_RI, d_gate_up_RJ);
  return d_gate_up_RJ;
}

template <class T>
void quantise(const Tensor& gate_up_RJ, bool pow2, f8* codes, float* scales, f8* column_codes, float* column_scales) {
  int64_t rows = gate_up_RJ.size(0), width = gate_up_RJ.size(1) / 2;
  const T* gate_up = in<T>(gate_up_RJ);
  if (!column_codes) {
    auto kernel = PRL_CHOOSE(quantise_rows<T>);
    parallel(rows, 8192 / (width + 1), [&](int64_t begin, int64_t end) {
      kernel(gate_up, rows, width, pow2, codes, scales, begin, end);
    });
    return;
  }
  auto kernel = PRL_CHOOSE(quantise_tiles<T>);
  parallel(rows / kBlock * (width / kBlock), 1, [&](int64_t begin, int64_t end) {
    kernel(gate_up, rows, width, pow2, codes, scales, column_codes, column_scales, begin, end);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> swiglu_quantise(const Tensor& gate_up_RJ, bool columns, bool pow2) {
  int64_t rows = gate_up_RJ.size(0), width = gate_up_RJ.size(1) / 2, kept = columns ? width : 0, along = columns ? rows : 0;
  Tensor codes = empty({rows, width}, kF8), scales = empty({width / kBlock, rows}, kF32);
  Tensor column_codes = empty({kept, along}, kF8), column_scales = empty({along / kBlock, kept}, kF32);
  auto run = gate_up_RJ.scalar_type() == kBF16 ? quantise<bf16> : quantise<float>;
  run(gate_up_RJ, pow2, out<f8>(codes), out<float>(scales), columns ? out<f8>(column_codes) : nullptr,
      out<float>(column_scales));
  return {codes, scales, column_codes, column_scales};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> swiglu_backward_quantise(
    const Tensor& gate_up_RJ, const Tensor& grad_RI, const Tensor& weights_R, bool pow2) {
  int64_t rows = grad_RI.size(0), width = grad_RI.size(1);
  Tensor codes = empty({rows, 2 * width}, kF8), scales = empty({2 * width / kBlock, rows}, kF32);
  Tensor column_codes = empty({2 * width, rows}, kF8), column_scales = empty({rows / kBlock, 2 * width}, kF32);
  Tensor act_codes = empty({width, rows}, kF8), act_scales = empty({rows / kBlock, width}, kF32);
  Tensor d_weights_R = empty({rows}, kF32);
  Backward to = {out<f8>(codes),         out<float>(scales),     out<f8>(column_codes),  out<float>(column_scales),
                 out<f8>(act_codes),     out<float>(act_scales), out<float>(d_weights_R)};
  const float* weights = in<float>(weights_R);
  auto run = [&](auto kernel, auto* gate_up, auto* grad) {
    parallel(rows / kBlock, 1, [&](int64_t begin, int64_t end) {
      kernel(gate_up, grad, weights, rows, width, pow2, to, begin, end);
    });
  };
  if (gate_up_RJ.scalar_type() == kBF16)
    run(PRL_CHOOSE(backward_quantise<bf16>), in<bf16>(gate_up_RJ), in<bf16>(grad_RI));
  else
    run(PRL_CHOOSE(backward_quantise<float>), in<float>(gate_up_RJ), in<float>(grad_RI));
  return {codes, scales, column_codes, column_scales, act_codes, act_scales, d_weights_R};
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("swiglu(Tensor gate_up_RJ) -> Tensor");
  m.def("swiglu_backward(Tensor gate_up_RJ, Tensor grad_RI) -> Tensor");
  m.def("swiglu_quantise(Tensor gate_up_RJ, bool columns, bool pow2) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "swiglu_backward_quantise(Tensor gate_up_RJ, Tensor grad_RI, Tensor weights_R, bool pow2)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("swiglu", TORCH_BOX(&prl::swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&prl::swiglu_backward));
  m.impl("swiglu_quantise", TORCH_BOX(&prl::swiglu_quantise));
  m.impl("swiglu_backward_quantise", TORCH_BOX(&prl::swiglu_backward_quantise));
}

#else

#include "fp8.h"

PRL_INLINE vf product(vf gate, vf up) { return gate * exact_sigmoid(gate) * up; }

template <class T>
static void forward(const T* gate_up, int64_t width, T* to, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T *gate = gate_up + 2 * r * width, *up = gate + width;
    for (int64_t i = 0; i < width; i += kLanes)
      store(to + r * width + i, product(load(gate + i, width - i), load(up + i, width - i)), width - i);
  }
}

template <class T>
static void backward(const T* gate_up, const T* grads, int64_t width, T* to, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T *gates = gate_up + 2 * r * width, *ups = gates + width, *grad_row = grads + r * width;
    T *d_gate = to + 2 * r * width, *d_up = d_gate + width;
    for (int64_t i = 0; i < width; i += kLanes) {
      int64_t n = width - i;
      vf gate = load(gates + i, n), up = load(ups + i, n), grad = load(grad_row + i, n), s = exact_sigmoid(gate);
      store(d_gate + i, grad * up * (s * (1.0f + gate * (1.0f - s))), n);
      store(d_up + i, grad * (gate * s), n);
    }
  }
}

template <class T>
static void quantise_rows(const T* gate_up, int64_t rows, int64_t width, bool pow2, f8* codes, float* scales, int64_t begin,
                          int64_t end) {
  for (int64_t r = begin; r < end; ++r)
    for (int64_t b = 0; b < width / kBlock; ++b) {
      const T *gate = gate_up + 2 * r * width + b * kBlock, *up = gate + width;
      vf act[kParts];
      for (int j = 0; j < kParts; ++j) act[j] = product(load(gate + j * kLanes), load(up + j * kLanes));
      scales[b * rows + r] = quantise_row(act, pow2, codes + r * width + b * kBlock);
    }
}

// A tile of float32 and the pointers to its rows.
struct Buffer {
  alignas(64) float x[kBlock][kBlock];
  const float* rows[kBlock];

  Buffer() {
    for (int r = 0; r < kBlock; ++r) rows[r] = x[r];
  }
};

template <class T>
static void quantise_tiles(const T* gate_up, int64_t rows, int64_t width, bool pow2, f8* codes, float* scales,
                           f8* column_codes, float* column_scales, int64_t begin, int64_t end) {
  Buffer act;
  for (int64_t i = begin; i < end; ++i) {
    int64_t down = i / (width / kBlock) * kBlock, right = i % (width / kBlock) * kBlock;
    for (int r = 0; r < kBlock; ++r) {
      const T *gate = gate_up + 2 * (down + r) * width + right, *up = gate + width;
      for (int j = 0; j < kBlock; j += kLanes) store(act.x[r] + j, product(load(gate + j), load(up + j)));
    }
    quantise_tile(act.rows, pow2,
                  {codes + down * width + right, width, scales + right / kBlock * rows + down,
                   column_codes + right * rows + down, rows, column_scales + down / kBlock * width + right, kBlock});
  }
}

// Blocks [begin, end) of 128 rows.
template <class T>
static void backward_quantise(const T* gate_up, const T* grads, const float* weights, int64_t rows, int64_t width, bool pow2,
                              const Backward& to, int64_t begin, int64_t end) {
  Buffer d_gate, d_up, act;
  for (int64_t c = begin; c < end; ++c) {
    int64_t down = c * kBlock;
    Sum d_weights[kBlock];
    for (int64_t right = 0; right < width; right += kBlock) {
      for (int r = 0; r < kBlock; ++r) {
        const T *gates = gate_up + 2 * (down + r) * width + right, *ups = gates + width;
        const T* grad_row = grads + (down + r) * width + right;
        for (int j = 0; j < kParts; ++j) {
          int at = j * kLanes;
          vf gate = load(gates + at), up = load(ups + at), plain = load(grad_row + at), s = exact_sigmoid(gate);
          vf a = gate * s * up, grad = plain * weights[down + r];
          vf& sum = d_weights[r].part[j % (16 / kLanes)];
          sum = sum + plain * a;
          store(act.x[r] + at, a * weights[down + r]);
          store(d_gate.x[r] + at, grad * up * (s * (1.0f + gate * (1.0f - s))));
          store(d_up.x[r] + at, grad * (gate * s));
        }
      }
      for (int half = 0; half < 2; ++half) {
        int64_t column = half * width + right;
        quantise_tile(half ? d_up.rows : d_gate.rows, pow2,
                      {to.codes + down * 2 * width + column, 2 * width, to.scales + column / kBlock * rows + down,
                       to.column_codes + column * rows + down, rows, to.column_scales + c * 2 * width + column, kBlock});
      }
      quantise_tile(act.rows, pow2,
                    {nullptr, 0, nullptr, to.act_codes + right * rows + down, rows, to.act_scales + c * width + right, kBlock});
    }
    for (int r = 0; r < kBlock; ++r) to.d_weights[down + r] = d_weights[r].total();
  }
}

#endif
