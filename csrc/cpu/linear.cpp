// Router logits and the LM head's logits, x · wᵀ into float32, and `linear`, the same into the type of x. Both operands in
// bfloat16 go as pairs, their products exact in float32; where one is float32 the other is widened. One item of work is a panel
// of 64 outputs and up to 256 rows of x.

#include "gemm.h"

namespace prl {
namespace {

constexpr int64_t kChunk = 256;

Tensor product(const Tensor& x_TD, const Tensor& w_ND, ScalarType out_dtype) {
  const int64_t t = x_TD.size(0), d = x_TD.size(1), n = w_ND.size(0);
  const ScalarType x_dtype = x_TD.scalar_type(), w_dtype = w_ND.scalar_type();
  const Kind kind = x_dtype == kBF16 && w_dtype == kBF16 ? Kind::bf16 : Kind::f32;
  const Store store = out_dtype == kBF16 ? Store::bf16 : Store::f32;
  Tensor c = empty({t, n}, out_dtype);
  const char *x = in<char>(x_TD), *w = in<char>(w_ND);
  char* to = out<char>(c);
  const int64_t panels = (n + kColumns - 1) / kColumns, chunks = (t + kChunk - 1) / kChunk;
  parallel(panels * chunks, 1 + int64_t(1e6 / double(kColumns * std::min(t, kChunk) * d + 1)), [&](int64_t begin, int64_t end) {
    static thread_local Scratch panel_scratch, x_scratch, w_scratch;
    float* b = panel_scratch.get<float>(units_of(kind, d) * kColumns);
    Rows a;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % panels * kColumns, columns = std::min(kColumns, n - first);
      const int64_t row = item / panels * kChunk, rows = std::min(kChunk, t - row);
      if (item == begin || first == 0) a = rows_of(kind, x_dtype, x + row * d * size_of(x_dtype), nullptr, rows, d, x_scratch);
      pack_rows(kind, w_dtype, b, w + first * d * size_of(w_dtype), d, columns, d, w_scratch);
      Tile tile = {a.data, a.row, 4, b, units_of(kind, d), 0, columns, to + (row * n + first) * size_of(out_dtype), n, store};
      tile.next = w + (first + kColumns) * d * size_of(w_dtype), tile.next_step = 128;
      tile.next_end = tile.next + kColumns * d * size_of(w_dtype);
      multiply(kind, tile, rows);
    }
  });
  return c;
}

Tensor wide_linear(const Tensor& x_TD, const Tensor& w_ND) { return product(x_TD, w_ND, kF32); }
Tensor linear(const Tensor& x_TD, const Tensor& w_ND) { return product(x_TD, w_ND, x_TD.scalar_type()); }

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("router_logits(Tensor x_TD, Tensor weight_ED) -> Tensor");
  m.def("logits(Tensor hidden_TD, Tensor weight_VD) -> Tensor");
  m.def("linear(Tensor x_TK, Tensor weight_NK) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("router_logits", TORCH_BOX(&prl::wide_linear));
  m.impl("logits", TORCH_BOX(&prl::wide_linear));
  m.impl("linear", TORCH_BOX(&prl::linear));
}
