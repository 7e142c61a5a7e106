"""Block-scaled FP8 in kernels, as `prl.kernels.numerics` has it: amax, scale, code, and casts right also when interpreted.

Codes are uint8 in the kernels (launchers pass `codes.view(torch.uint8)`). On a GPU the casts are the hardware's; Triton's
interpreter truncates to bfloat16, loses mantissa carries to e4m3 and reads NaNs as numbers, so there the same values are made
of integers.
"""

import os

import triton
import triton.language as tl

HARDWARE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Whether casts are the processor's own; False under the interpreter."""

INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def widen(x):
    """float32 of a bfloat16 or float32 tensor."""
    if HARDWARE:
        return x.to(tl.float32)
    elif x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 `x` rounded to nearest even to `dtype`, bfloat16 or float32."""
    if HARDWARE:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > INFINITY_BITS, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x


@triton.jit
def magnitude(x):
    """int32: the bits of |x|, float32. They are ordered as the magnitudes are, NaN above all, so that `tl.max` keeps a NaN."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scale(amax_bits, POW2: tl.constexpr):
    """(scale, its reciprocal), float32, of blocks whose largest `magnitude` is given; both NaN where that is not finite."""
    finite = amax_bits < INFINITY_BITS
    amax = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    bits = tl.maximum(_over_448(amax).to(tl.int32, bitcast=True), 1 << 23)
    if POW2:
        bits = ((bits + 0x7FFFFF) >> 23) << 23
    bits = tl.where(amax_bits == 0, 0x3F800000, bits)
    scale = bits.to(tl.float32, bitcast=True)
    reciprocal = ((254 << 23) - bits).to(tl.float32, bitcast=True) if POW2 else _reciprocal(scale)
    return tl.where(finite, scale, float("nan")), tl.where(finite, reciprocal, float("nan"))


@triton.jit
def _over_448(amax):
    """amax / 448 as rounded by division, or below 2^-126 where that is. A thread divides for many blocks: no slow path."""
    if HARDWARE:
        # the quotient by the rounded reciprocal, corrected by its remainder (checked for every mantissa)
        quotient = amax * 0.002232142857142857
        return tl.fma(tl.fma(-quotient, 448.0, amax), 0.002232142857142857, quotient)
    else:
        return tl.math.div_rn(amax, 448.0)


@triton.jit
def _reciprocal(scale):
    """1 / scale as rounded by division, for finite scales from 2^-126 to 2^120, whose reciprocals are normal."""
    if HARDWARE:
        # Two Newton steps from up to three units off round right (checked for every mantissa) but for that of all ones, whose
        # reciprocal lies just above the middle of two numbers: they end one unit short.
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)
        y = tl.fma(y, tl.fma(-scale, y, 1.0), y)
        y = tl.fma(y, tl.fma(-scale, y, 1.0), y)
        ones = (scale.to(tl.int32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
        return (y.to(tl.int32, bitcast=True) + ones.to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        return tl.math.div_rn(1.0, scale)


@triton.jit
def encode(x, reciprocal):
    """uint8 e4m3fn codes of float32 x · reciprocal: saturating, to nearest even; 0x7F where the reciprocal is NaN."""
    y = x * reciprocal
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = y.to(tl.uint32, bitcast=True)
        mag = bits & 0x7FFFFFFF
        normal = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - (120 << 3)
        # 2^14 has an ulp of 2^-9, the smallest subnormal: the addition rounds to it
        small = (mag.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(mag < 0x3C800000, small, normal), 0x7E) | ((bits >> 24) & 0x80)
        return tl.where(mag > INFINITY_BITS, 0x7F, code).to(tl.uint8)


@triton.jit
def decode(codes):
    """float32 of uint8 e4m3fn codes."""
    if HARDWARE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = codes.to(tl.uint32)
        mag = bits & 0x7F
        normal = ((mag << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(mag < 8, mag.to(tl.float32) * 0.001953125, normal)
        value = tl.where(mag == 0x7F, float("nan"), value)
        return (value.to(tl.uint32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
