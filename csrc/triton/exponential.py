"""exp and sigmoid in float32, within two units in the last place at every magnitude, without branches.

Triton's own exp multiplies by log2(e) first and so loses as many bits as the exponent has, and the processor's 2^f alone takes
two units; its division branches. Here 2^n is made of bits, the rest of a polynomial of degree 6, and the reciprocal of the
processor's estimate and one Newton step.
"""

import triton
import triton.language as tl

from prl_triton.fp8 import HARDWARE


@triton.jit
def approximate_reciprocal(x):
    """1 / x within a unit, 0 where that is below 2^-126."""
    if HARDWARE:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.where(x > 8.507059173023462e37, 0.0, tl.math.div_rn(1.0, x))


@triton.jit
def _split(x):
    """(whole n, as the bits of 1.5 · 2^23 + n; p) with exp(x) = 2^n · p and p between √½ and √2, for |x| < 2^21."""
    shifted = tl.fma(x, 1.4426950408889634, 12582912.0)  # its last bit is worth 1
    n = shifted - 12582912.0
    # ln 2 in two parts, the first with so few bits that n times it is exact
    r = tl.fma(n, 2.12194440e-4, tl.fma(n, -0.693359375, x))
    # e^r = 1 + r + r² · q(r), q fitted for the least relative error on |r| ≤ ½ ln 2: 2^-28
    q = tl.fma(tl.fma(0.001381432, r, 0.008368851), r, 0.0416684)
    q = tl.fma(tl.fma(q, r, 0.1666652), r, 0.49999994)
    return shifted.to(tl.int32, bitcast=True), tl.fma(tl.fma(q, r, 1.0), r, 1.0)


@triton.jit
def exp(x):
    """e^x for x ≤ 0 (or NaN): 0 from −104 on, denormals before it as they are."""
    n, p = _split(tl.maximum(x, -110.0, propagate_nan=tl.PropagateNan.ALL))
    # 2^n in two factors, since n goes down to −159
    n = n - 0x4B400000
    half = n >> 1
    first, second = ((half + 127) << 23).to(tl.float32, bitcast=True), ((n - half + 127) << 23).to(tl.float32, bitcast=True)
    return p * first * second


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x), the sum in float32 like everyone's: so 0 where e^−x overflows."""
    n, p = _split(tl.clamp(-x, -86.0, 89.0, propagate_nan=tl.PropagateNan.ALL))  # below −86 the sum is 1
    quarter = tl.fma(p, ((n + 125) << 23).to(tl.float32, bitcast=True), 0.25)  # of the sum, so that it never overflows
    s = approximate_reciprocal(quarter)  # 0 exactly where the sum would be infinite
    return tl.fma(s, tl.fma(-quarter, s, 1.0), s) * 0.25
