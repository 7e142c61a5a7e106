// Grouped GEMMs: rows grouped by expert, each group times its expert's weight; and the sums over rows that weights need.
//
// The pieces of work are panels of 64 output columns of a group: the weight's part is packed once and meets all the group's rows
// while it is in the cache, as the next part is on its way from memory. FP8 rows are decoded once a group, panels while they
// are packed.

#include "gemm.h"

namespace prl {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Non-empty groups of rows.
struct Group {
  int64_t expert, start, rows;
};

std::vector<Group> groups_of(const Tensor& starts, const Tensor& counts) {
  std::vector<Group> groups;
  const int64_t *start = in<int64_t>(starts), *count = in<int64_t>(counts);
  for (int64_t e = 0; e < counts.numel(); ++e)
    if (count[e] > 0) groups.push_back({e, start[e], count[e]});
  return groups;
}

// Zeros in all rows that no group holds.
void clear_between(const std::vector<Group>& groups, char* c, int64_t rows, int64_t row_bytes) {
  int64_t end = 0;
  for (const Group& g : groups) {
    std::memset(c + end * row_bytes, 0, (g.start - end) * row_bytes);
    end = g.start + g.rows;
  }
  std::memset(c + end * row_bytes, 0, (rows - end) * row_bytes);
}

// f(group, begin, end) for every group and range of its `pieces` pieces, groups in turn; `columns` outputs of k products each.
template <class F>
void for_groups(const std::vector<Group>& groups, int64_t pieces, int64_t columns, int64_t k, const F& f) {
  const int64_t items = int64_t(groups.size()) * pieces;
  double cost = 0;
  for (const Group& g : groups) cost += double(g.rows) * double(columns) * double(k);
  parallel(items, int64_t(double(items) * 1e6 / (cost + 1)), [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t stop = std::min(end, (begin / pieces + 1) * pieces);
      f(groups[begin / pieces], begin % pieces, begin % pieces + stop - begin);
      begin = stop;
    }
  });
}

Tensor grouped_gemm(
    const Tensor& a_RK, const Tensor& w_ENK, const Tensor& starts_E1, const Tensor& counts_E, bool transposed) {
  const int64_t r = a_RK.size(0), k = a_RK.size(1), n = w_ENK.size(transposed ? 2 : 1);
  const ScalarType dtype = a_RK.scalar_type();
  const Kind kind = dtype == kBF16 ? Kind::bf16 : Kind::f32;
  const Store store = dtype == kBF16 ? Store::bf16 : Store::f32;
  const int64_t element = size_of(dtype), units = units_of(kind, k);
  Tensor c_RN = empty({r, n}, dtype);
  const std::vector<Group> groups = groups_of(starts_E1, counts_E);
  char* c = out<char>(c_RN);
  clear_between(groups, c, r, n * element);
  const char *a_data = in<char>(a_RK), *w_data = in<char>(w_ENK);
  for_groups(groups, ceil_div(n, kColumns), n, k, [&](const Group& g, int64_t begin, int64_t end) {
    static thread_local Scratch panel_scratch, a_scratch, w_scratch;
    const Rows a = rows_of(kind, dtype, a_data + g.start * k * element, nullptr, g.rows, k, a_scratch);
    float* b = panel_scratch.get<float>(units * kColumns);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kColumns, columns = std::min(kColumns, n - first);
      const char* w = w_data + (g.expert * n * k + (transposed ? first : first * k)) * element;
      Tile t = {a.data, a.row, 4, b, units, 0, columns, c + (g.start * n + first) * element, n, store};
      if (transposed) {
        pack_columns(kind, dtype, b, w, n, columns, k, w_scratch);
        t.next = w + kColumns * element, t.next_step = n * element, t.next_end = t.next + k * n * element;
      } else {
        pack_rows(kind, dtype, b, w, k, columns, k, w_scratch);
        t.next = w + kColumns * k * element, t.next_step = 128, t.next_end = t.next + kColumns * k * element;
      }
      multiply(kind, t, g.rows);
    }
  });
  return c_RN;
}

// out[e] += gᵀ · a. A piece is 64 rows of out: both operands are packed by columns, the whole of a once for each thread and
// group. Few rows make the sums short and out the traffic, so that it is walked along its rows; many rows make panels of a that
// are better kept in the cache.
void grouped_gemm_weight(
    const Tensor& g_RN, const Tensor& a_RK, const Tensor& starts_E1, const Tensor& counts_E, const Tensor& out_ENK) {
  const int64_t n = g_RN.size(1), k = a_RK.size(1);
  const ScalarType dtype = a_RK.scalar_type();
  const Kind kind = dtype == kBF16 ? Kind::bf16 : Kind::f32;
  const std::vector<Group> groups = groups_of(starts_E1, counts_E);
  const char *g_data = in<char>(g_RN), *a_data = in<char>(a_RK);
  float* c_data = out<float>(out_ENK);
  for_groups(groups, ceil_div(n, kColumns), n, k, [&](const Group& g, int64_t begin, int64_t end) {
    static thread_local Scratch a_scratch, g_scratch, unused;
    const int64_t units = units_of(kind, g.rows), panels = ceil_div(k, kColumns), panel_size = units * kColumns;
    float* b = a_scratch.get<float>(panels * panel_size);
    for (int64_t p = 0; p < panels; ++p) {
      const char* src = a_data + (g.start * k + p * kColumns) * size_of(dtype);
      pack_columns(kind, dtype, b + p * panel_size, src, k, std::min(kColumns, k - p * kColumns), g.rows, unused);
    }
    float* a = g_scratch.get<float>(panel_size);
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = piece * kColumns, rows = std::min(kColumns, n - first);
      pack_columns(kind, dtype, a, g_data + (g.start * n + first) * size_of(dtype), n, rows, g.rows, unused);
      outer(kind, a, rows, b, units, k, c_data + (g.expert * n + first) * k, Store::add);
    }
  });
}

Tensor grouped_gemm_fp8(
    const Tensor& a_RK,
    const Tensor& a_scales_BR,
    const Tensor& w_ENK,
    const Tensor& w_scales_EMB,
    const Tensor& starts_E1,
    const Tensor& counts_E,
    ScalarType out_dtype) {
  const int64_t r = a_RK.size(0), k = a_RK.size(1), n = w_ENK.size(1), blocks = k / kBlock;
  const int64_t element = size_of(out_dtype);
  const Store store = out_dtype == kBF16 ? Store::bf16 : Store::f32;
  Tensor c = empty({r, n}, out_dtype);
  const std::vector<Group> groups = k ? groups_of(starts_E1, counts_E) : std::vector<Group>();  // no block: nothing to scale
  char* c_data = out<char>(c);
  clear_between(groups, c_data, r, n * element);
  const f8 *a_data = in<f8>(a_RK), *w_data = in<f8>(w_ENK);
  const float *a_scales = in<float>(a_scales_BR), *w_scales = in<float>(w_scales_EMB);
  for_groups(groups, n / kColumns, n, k, [&](const Group& g, int64_t begin, int64_t end) {
    static thread_local Scratch panel_scratch, a_scratch, scale_scratch;
    bf16* a = a_scratch.get<bf16>(g.rows * k);
    kernels().decode(a, a_data + g.start * k, g.rows * k);
    float *b = panel_scratch.get<float>(k / 2 * kColumns), *b_scales = scale_scratch.get<float>(blocks * kColumns);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kColumns;
      const f8* w = w_data + (g.expert * n + first) * k;
      kernels().pack_rows_f8(b, w, k, kColumns, k);
      const float* of_panel = w_scales + (g.expert * (n / kBlock) + first / kBlock) * blocks;
      for (int64_t block = 0; block < blocks; ++block) std::fill_n(b_scales + block * kColumns, kColumns, of_panel[block]);
      Tile t = {a, k * 2, 4, b, k / 2, 0, kColumns, c_data + (g.start * n + first) * element, n, store};
      t.a_scales = a_scales + g.start, t.a_scales_run = r, t.b_scales = b_scales;
      t.next = reinterpret_cast<const char*>(w + kColumns * k), t.next_step = 128, t.next_end = t.next + kColumns * k;
      multiply(Kind::bf16, t, g.rows);
    }
  });
  return c;
}

// out[e] += g · aᵀ over the columns of a group, whole blocks: the same product with the sum over rows.
void grouped_gemm_weight_fp8(
    const Tensor& g_NR,
    const Tensor& g_scales_CN,
    const Tensor& a_KR,
    const Tensor& a_scales_CK,
    const Tensor& starts_E1,
    const Tensor& counts_E,
    const Tensor& out_ENK) {
  const int64_t n = g_NR.size(0), r = g_NR.size(1), k = a_KR.size(0);
  const std::vector<Group> groups = groups_of(starts_E1, counts_E);
  const f8 *g_data = in<f8>(g_NR), *a_data = in<f8>(a_KR);
  const float *g_scales = in<float>(g_scales_CN), *a_scales = in<float>(a_scales_CK);
  float* c_data = out<float>(out_ENK);
  for_groups(groups, k / kColumns, n, k, [&](const Group& g, int64_t begin, int64_t end) {
    static thread_local Scratch panel_scratch, g_scratch, scale_scratch;
    const int64_t blocks = ceil_div(g.rows, kBlock), width = blocks * kBlock;
    bf16* rows = g_scratch.get<bf16>(n * width);
    for (int64_t i = 0; i < n; ++i) kernels().decode(rows + i * width, g_data + i * r + g.start, width);
    float *b = panel_scratch.get<float>(width / 2 * kColumns), *b_scales = scale_scratch.get<float>(blocks * kColumns);
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kColumns;
      kernels().pack_rows_f8(b, a_data + first * r + g.start, r, kColumns, width);
      for (int64_t block = 0; block < blocks; ++block)
        std::copy_n(a_scales + (g.start / kBlock + block) * k + first, kColumns, b_scales + block * kColumns);
      Tile t = {rows, width * 2, 4, b, width / 2, 0, kColumns, c_data + g.expert * n * k + first, k, Store::add};
      t.a_scales = g_scales + g.start / kBlock * n, t.a_scales_run = n, t.b_scales = b_scales;
      multiply(Kind::bf16, t, n);
    }
  });
}

}  // namespace
}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) {
  m.def("grouped_gemm(Tensor a_RK, Tensor w_ENK, Tensor starts_E1, Tensor counts_E, bool transposed) -> Tensor");
  m.def("grouped_gemm_weight(Tensor g_RN, Tensor a_RK, Tensor starts_E1, Tensor counts_E, Tensor(a!) out_ENK) -> ()");
  m.def(
      "grouped_gemm_fp8(Tensor a_RK, Tensor a_scales_BR, Tensor w_ENK, Tensor w_scales_EMB, Tensor starts_E1, Tensor counts_E,"
      " ScalarType out_dtype) -> Tensor");
  m.def(
      "grouped_gemm_weight_fp8(Tensor g_NR, Tensor g_scales_CN, Tensor a_KR, Tensor a_scales_CK, Tensor starts_E1,"
      " Tensor counts_E, Tensor(a!) out_ENK) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) {
  m.impl("grouped_gemm", TORCH_BOX(&prl::grouped_gemm));
  m.impl("grouped_gemm_weight", TORCH_BOX(&prl::grouped_gemm_weight));
  m.impl("grouped_gemm_fp8", TORCH_BOX(&prl::grouped_gemm_fp8));
  m.impl("grouped_gemm_weight_fp8", TORCH_BOX(&prl::grouped_gemm_weight_fp8));
}
