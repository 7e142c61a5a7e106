// Where a value lies in shared memory and in the accumulators: the arithmetic that TMA, wgmma and the epilogue agree on.
// Sources: PTX ISA, "Swizzling modes" of tensor copies, "Matrix descriptor" and "Register fragments" of wgmma.
#ifndef PRL_CUDA_LAYOUT_H
#define PRL_CUDA_LAYOUT_H

#include "schedule.h"

namespace prl {

// A tile of codes is rows of 128 bytes (128 values of the contraction), aligned to an atom of eight rows. TMA and wgmma both
// apply the 128-byte swizzle: bits 4-6 of an address are XORed with bits 7-9, so that the eight rows of an atom meet each bank once.
constexpr int ROW_BYTES = 128;
constexpr int ATOM_BYTES = 1024;

// The descriptor of a K-major operand at shared address `address`: bits 0-13 address / 16, 16-29 the leading offset (unused
// where a row is one swizzle span: 1), 32-45 the distance of atoms / 16, 62-63 the swizzle (1: 128 bytes). A later 32 bytes
// of K, or a later atom, is an address that much larger: the hardware swizzles absolute addresses.
PRL_INLINE uint64_t descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | static_cast<uint64_t>(ATOM_BYTES >> 4) << 32 |
         uint64_t{1} << 62;
}
PRL_INLINE uint64_t advanced(uint64_t descriptor, int bytes) { return descriptor + static_cast<uint64_t>(bytes >> 4); }

// Accumulator i of thread t of a warpgroup in a 64-row product.
PRL_INLINE int fragment_row(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
PRL_INLINE int fragment_column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

}  // namespace prl

#endif
