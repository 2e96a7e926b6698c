"""Number formats by bit operations, in plain jnp: exact on every backend, whatever it does with subnormals or exp2.

``exp2(k)`` and ``ceil(log2(x))`` are inexact on XLA backends, a float32 cast to e4m3 overflows to NaN, and subnormal
float32 arithmetic may flush to zero. So exponents are read and built as integers, and casts saturate first.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

E8M0_NAN = 255
"""The e8m0 byte that means NaN (OCP MX); every other byte b is 2**(b - 127), byte 0 included."""
INT32_PRODUCTS = (2**31 - 1) // 128**2
"""So many products of int8 codes, whatever these are, have a sum that int32 holds: 131071."""


def f32_bits(x: Array) -> Array:
    """The bits of float32 ``x`` as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def exponent(x: Array) -> Array:
    """floor(log2(|x|)) of float32 ``x`` as int32; -127 for zero and subnormals, 128 for inf and NaN."""
    return ((f32_bits(x) >> 23) & 0xFF) - 127


def mantissa(x: Array) -> Array:
    """The 23 mantissa bits of float32 ``x`` as int32."""
    return f32_bits(x) & 0x7FFFFF


def pow2(e: Array) -> Array:
    """2**e as float32 for int32 ``e``, exactly; ``e`` is clipped to -127..127 (2**-127 is a subnormal float32)."""
    e = jnp.clip(e, -127, 127)
    bits = jnp.where(e == -127, 0x00400000, (e + 127) << 23)
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def e8m0_to_f32(code: Array) -> Array:
    """Decodes e8m0 bytes (uint8) to float32: 2**(code - 127); 255 is NaN, 0 is 2**-127 and not 0."""
    c = code.astype(jnp.int32)
    return jnp.where(c == E8M0_NAN, jnp.float32(np.nan), pow2(c - 127))


def ceil_exponent(amax: Array, fmt_max: float) -> Array:
    """ceil(log2(amax / fmt_max)) as int32 in -127..127, by integers: the power-of-two scale that never overflows.

    ``amax`` is float32 and not negative; zero gives -127. ``fmt_max`` is the format's largest value, e.g. 448 (e4m3).
    """
    m, e = np.frexp(np.float32(fmt_max))  # fmt_max = (2 m) * 2**(e - 1), with 2 m in [1, 2)
    limit = int(np.float32(2 * m).view(np.int32)) & 0x7FFFFF
    rounded = exponent(amax) - int(e - 1) + (mantissa(amax) > limit).astype(jnp.int32)
    return jnp.clip(rounded, -127, 127)


def saturate(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Casts float32 ``x`` to a float8 dtype, to nearest even, saturating at its largest value; NaN stays."""
    info = jnp.finfo(dtype)
    limit, shift, bias = float(info.max), 23 - info.nmant, 1 - info.minexp
    word = f32_bits(jnp.clip(x, -limit, limit))
    magnitude = word & 0x7FFFFFFF
    # Not a cast: where its result is cast back, XLA on GPUs takes the pair for excess precision and drops both.
    half_ulp = (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)
    normal = ((magnitude + half_ulp) >> shift) - ((127 - bias) << info.nmant)
    subnormal = jnp.rint(jnp.abs(x) * 2.0 ** (info.nmant - info.minexp)).astype(jnp.int32)
    code = jnp.where(magnitude < _word_of(2.0**info.minexp), subnormal, normal)
    code = jnp.where(magnitude > _word_of(np.inf), _word_of_nan(dtype), code)
    return lax.bitcast_convert_type(((word >> 24) & 0x80 | code).astype(jnp.uint8), dtype)


def _word_of(x: float) -> int:
    return int(np.float32(x).view(np.int32))


def _word_of_nan(dtype: jax.typing.DTypeLike) -> int:
    return int(np.asarray(np.nan, dtype).view(np.uint8)) & 0x7F


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: Array, dtype: str) -> Array:
    """float32 ``x`` rounded to the values of a 16-bit float dtype; a cast there and back may be elided by the compiler.

    Its derivative is that of the identity. "float32" leaves x as it is.
    """
    if dtype == "float32":
        return x
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if dtype == "float16":  # reduce_precision flushes float16's subnormals, which lie 2**-24 apart
        rounded = jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.rint(x * 2**24) * 2**-24, rounded)
    return rounded


@round_to.defjvp
def _round_to_jvp(dtype: str, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return round_to(primals[0], dtype), tangents[0]


def round_int(x: Array, low: int, high: int, dtype: jax.typing.DTypeLike) -> Array:
    """Rounds to nearest even and clips to [low, high]; an ``astype`` would truncate. NaN gives 0."""
    rounded = jnp.clip(jnp.rint(x), low, high)
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), rounded).astype(dtype)


def e2m1_encode(x: Array) -> Array:
    """Codes (uint8, 0..15) of float32 ``x`` in e2m1: round to nearest even, saturating at 6.

    Anything that rounds to zero gets code 0, so -0 (code 8) is never written; NaN gives code 0.
    """
    a = jnp.abs(x)
    # The seven midpoints between 0, .5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code, hence > and >= by turns.
    steps = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0)
    code = sum((s.astype(jnp.uint8) for s in steps), start=jnp.zeros(x.shape, jnp.uint8))
    return jnp.where((x < 0) & (code > 0), code | jnp.uint8(8), code)


def e2m1_decode(code: Array) -> Array:
    """Values (float32) of e2m1 codes (uint8, the low four bits); code 8 (-0) decodes to 0."""
    c = code.astype(jnp.int32)
    magnitude = c & 7
    # exponent e = magnitude >> 1, one mantissa bit: 1.m * 2**(e - 1), and m / 2 where e is 0.
    normal = lax.bitcast_convert_type((magnitude + 2 * 126) << 22, jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where((c & 15) > 8, -value, value)


def pack_nibbles(codes: Array) -> Array:
    """Packs 4-bit codes (uint8, values 0..15) (..., K) into bytes (..., ceil(K/2)); the even element is the low nibble.

    An odd K is padded with a zero nibble.
    """
    if codes.shape[-1] % 2:
        codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)])
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: Array, k: int) -> Array:
    """The first ``k`` 4-bit codes (uint8) of each row of ``packed`` (..., ceil(k/2)); inverse of ``pack_nibbles``."""
    pairs = jnp.stack([packed & jnp.uint8(0xF), packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :k]
