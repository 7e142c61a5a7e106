// The plain C interface of the FP8 grouped GEMMs (grouped_gemm_fp8.cuh): no torch, no Python, nothing linked but a static runtime,
// so that the object can be carried to any machine, and loads where there is no driver. Pointers are device memory, laid out
// as prl/kernels/grouped_gemm.py says. A function returns 0, or a code that `prl_cuda_error` puts into words.

#include "grouped_gemm_fp8.cuh"

namespace {

using namespace prl;

using Encode = decltype(&cuTensorMapEncodeTiled);

// Codes beyond those of cudaError_t.
enum : int { NO_ENTRY_POINT = 100000, NO_TENSOR_MAP, TOO_LARGE };

// libcuda is not linked: its one function that is needed comes from the driver that runs.
int find_encode(Encode* encode) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess || !found) return NO_ENTRY_POINT;
  *encode = reinterpret_cast<Encode>(found);
  return 0;
}

// Codes [outer, rows, width] in boxes of [1, 128, 128].
int encode_map(Encode encode, TensorMap* map, const void* codes, int64_t outer, int64_t rows, int64_t width) {
  static_assert(TILE_M == HALF_N, "one size of box for both operands");
  cuuint64_t sizes[3] = {cuuint64_t(width), cuuint64_t(rows), cuuint64_t(outer)};
  cuuint64_t strides[2] = {cuuint64_t(width), cuuint64_t(width) * cuuint64_t(rows)};
  cuuint32_t box[3] = {ROW_BYTES, TILE_M, 1}, steps[3] = {1, 1, 1};
  CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(codes), sizes, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : NO_TENSOR_MAP;
}

bool fits(int64_t size) { return size <= INT32_MAX - TILE_N; }

template <bool WEIGHT, typename OUT>
int launch(const void* row_codes, const void* column_codes, const float* row_scales, const float* column_scales,
           const int64_t* starts, const int64_t* counts, void* out, int64_t rows, int64_t columns, int64_t depth, int64_t groups,
           void* stream) {
  // TMA: coordinates are int32, a stride has at most 40 bits.
  if (!fits(rows) || !fits(columns) || !fits(depth) || !fits(groups) || columns * depth >= int64_t{1} << 40 ||
      rows * depth >= int64_t{1} << 40 || count_pairs(rows, columns) > INT32_MAX / clamp(WEIGHT ? groups : 1, 1, INT32_MAX)) {
    return TOO_LARGE;
  }
  Problem p{row_scales, column_scales, starts, counts, out, int(rows), int(columns), int(depth), int(groups)};
  int64_t pairs = pairs_of<WEIGHT>(p);
  if (pairs == 0) return 0;
  Encode encode;
  TensorMap row_map, column_map;
  if (int error = find_encode(&encode)) return error;
  if (int error = encode_map(encode, &row_map, row_codes, 1, rows, depth)) return error;
  if (int error = encode_map(encode, &column_map, column_codes, WEIGHT ? 1 : groups, columns, depth)) return error;
  auto kernel = grouped_gemm_fp8<WEIGHT, OUT>;
  if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES)) return error;
  int device, processors;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(CLUSTER * static_cast<unsigned>(clamp(pairs, 1, clamp(processors / CLUSTER, 1, processors))));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = SHARED_BYTES;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, row_map, column_map, p);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// 0 where the kernels can be launched on the current device.
int prl_cuda_ready() {
  Encode encode;
  return find_encode(&encode);
}

const char* prl_cuda_error(int code) {
  switch (code) {
    case NO_ENTRY_POINT:
      return "the driver has no cuTensorMapEncodeTiled; 12.0 or newer is needed";
    case NO_TENSOR_MAP:
      return "the driver refused to describe an operand (cuTensorMapEncodeTiled)";
    case TOO_LARGE:
      return "a size is beyond what tensor copies take (2^31 - 257 along a dimension, 2^40 bytes of a matrix), or there are 2^31 tiles";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(code));
  }
}

// Dynamic shared memory of a block of every kernel here.
int prl_cuda_shared_bytes() { return SHARED_BYTES; }

// out [rows, n] = a [rows, k] . w [experts, n, k]; bfloat16, or float32 where `wide`. k and experts are at least 1.
int prl_grouped_gemm_fp8(const void* a, const float* a_scales, const void* w, const float* w_scales, const int64_t* starts,
                         const int64_t* counts, void* out, int wide, int64_t rows, int64_t n, int64_t k, int64_t experts,
                         void* stream) {
  auto run = wide ? launch<false, float> : launch<false, __nv_bfloat16>;
  return run(a, w, a_scales, w_scales, starts, counts, out, rows, n, k, experts, stream);
}

// out [experts, n, k] += g [n, rows] . a [k, rows], over each expert's rows. rows is at least 128.
int prl_grouped_gemm_weight_fp8(const void* g, const float* g_scales, const void* a, const float* a_scales, const int64_t* starts,
                                const int64_t* counts, float* out, int64_t rows, int64_t n, int64_t k, int64_t experts,
                                void* stream) {
  return launch<true, float>(g, a, g_scales, a_scales, starts, counts, out, n, k, rows, experts, stream);
}

}  // extern "C"
#pragma GCC visibility pop
