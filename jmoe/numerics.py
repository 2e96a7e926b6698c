"""The number formats that quantized data is held in: one table, and how codes become values.

Everything that depends on a format's range or coding goes through here; block structure and scales are ``scheme`` and
``quantize``'s.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels import bits


@dataclass(frozen=True, slots=True)
class Format:
    """An element format.

    Attributes:
      name: the field's name for it.
      bits: bits an element takes in memory.
      max: the largest magnitude a quantiser maps to (127 for int8: symmetric).
      dtype: the dtype of one element (an ml_dtypes type where NumPy has none).
      storage: the dtype of the array that holds it; 4-bit formats are held two to a uint8.
    """

    name: str
    bits: int
    max: float
    dtype: Any
    storage: Any


E4M3 = Format("e4m3", 8, 448.0, jnp.float8_e4m3fn, jnp.float8_e4m3fn)
E5M2 = Format("e5m2", 8, 57344.0, jnp.float8_e5m2, jnp.float8_e5m2)
E2M1 = Format("e2m1", 4, 6.0, jnp.float4_e2m1fn, jnp.uint8)
INT8 = Format("int8", 8, 127.0, jnp.int8, jnp.int8)
INT4 = Format("int4", 4, 7.5, jnp.int4, jnp.uint8)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, E2M1, INT8, INT4)}

INT4_OFFSET = 8
"""A symmetric int4 value q is held as the unsigned nibble q + 8."""

SCALE_DTYPES: dict[str, Any] = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "e8m0": jnp.uint8,
}
"""Names of the dtypes a scale may be held in, and the array dtype of each (e8m0 travels as its bytes)."""


def unpack(data: Array, fmt: Format, k: int) -> Array:
    """Stored data to one element an entry, still coded: (..., K) of 8-bit ``fmt.dtype``, or uint8 nibbles 0..15."""
    return bits.unpack_nibbles(data, k) if fmt.bits == 4 else data


def decode(codes: Array, fmt: Format) -> Array:
    """Unpacked codes to float32 numbers, before zero point and scale; int4 nibbles stay unsigned (0..15)."""
    return bits.e2m1_decode(codes) if fmt is E2M1 else codes.astype(jnp.float32)


def decode_scale(scale: Array) -> Array:
    """A scale array to float32; uint8 is e8m0."""
    return bits.e8m0_to_f32(scale) if scale.dtype == jnp.uint8 else scale.astype(jnp.float32)
