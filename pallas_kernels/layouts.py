"""How a quantized tensor's bytes are arranged: the canonical order, and the packings that kernels want.

A ``Layout`` is a frozen value that travels with the tensor as static data, so a packed tensor can never be taken for a
canonical one.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax


@dataclass(frozen=True, slots=True)
class Layout:
    """A named arrangement of a tensor's codes and scales.

    Attributes:
      name: which.
      n, k: rows and columns of the tensor, where its arrays do not tell; else 0.
    """

    name: str
    n: int = 0
    k: int = 0

    @property
    def kind(self) -> "Layout":
        """The arrangement alone."""
        return Layout(self.name)


CANONICAL = Layout("canonical")
"""Row-major codes, two 4-bit codes a byte with the even element in the low nibble, scales as a grid of blocks."""

PACKED_BFLOAT16 = Layout("packed_bfloat16")
"""Four-bit codes that products make bfloat16 of, see ``fourbit.packing``."""

PACKED_E4M3 = Layout("packed_e4m3")
"""Four-bit codes that products make e4m3 of."""


def pack_ue8m0_words(scale: Array) -> Array:
    """Packs e8m0 scale bytes four to a word along K, the form that DeepGEMM calls UE8M0.

    Args:
      scale: uint8 (..., N, G), one e8m0 byte a group of K.

    Returns:
      int32 (..., N, ceil(G/4)); byte i of a word (from the least significant) is group 4 * word + i; the tail is zero.

    Raises:
      TypeError: ``scale`` is not uint8. A float32 scale has other bits and would be read as garbage.
    """
    if scale.dtype != jnp.uint8:
        raise TypeError(
            f"scale has dtype {scale.dtype}, but UE8M0 words are packed from e8m0 bytes (uint8); "
            "quantize with scale_dtype='e8m0' first"
        )
    tail = -scale.shape[-1] % 4
    padded = jnp.pad(scale, [(0, 0)] * (scale.ndim - 1) + [(0, tail)])
    return lax.bitcast_convert_type(padded.reshape(*scale.shape[:-1], padded.shape[-1] // 4, 4), jnp.int32)


def unpack_ue8m0_words(words: Array, groups: int) -> Array:
    """The first ``groups`` e8m0 bytes (uint8) of each row of ``words`` (int32); inverse of ``pack_ue8m0_words``."""
    if words.dtype != jnp.int32:
        raise TypeError(f"words has dtype {words.dtype}, but UE8M0 words are int32")
    if not 4 * words.shape[-1] - 3 <= groups <= 4 * words.shape[-1]:
        raise ValueError(f"groups={groups} does not fit rows of {words.shape[-1]} words of four groups")
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])[..., :groups]
