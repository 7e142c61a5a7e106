// The module `prl._cpu`: importing it registers the ops of `torch.ops.prl_cpu`. Each source file adds its own by
// STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) for the schema and STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CPU, m) for the function.

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "common.h"

namespace prl {

namespace {

bool supported() {
#ifdef PRL_X86
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
#else
  return false;
#endif
}

bool chosen = supported();

// For tests: the portable path on every processor. Returns whether the other would otherwise serve.
bool force_portable(bool portable) {
  chosen = supported() && !portable;
  return supported();
}

}  // namespace

bool avx512() { return chosen; }

}  // namespace prl

STABLE_TORCH_LIBRARY_FRAGMENT(prl_cpu, m) { m.def("force_portable(bool portable) -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(prl_cpu, CompositeExplicitAutograd, m) {
  m.impl("force_portable", TORCH_BOX(&prl::force_portable));
}

extern "C" PyMODINIT_FUNC PyInit__cpu() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
