"""Integers of a few bits in words of 32, as compressed-tensors packs them."""

import numpy as np

from jmoe.checkpoint.methods.base import CheckpointError, where
from jmoe.checkpoint.safetensors import TensorInfo


def word_counts(count: int, bits: int) -> tuple[int, int]:
    """Words of 32 bits that so many fields take, as a stream of bits and as whole fields in every word."""
    return -(-count * bits // 32), -(-count // (32 // bits))


def unpack(words: np.ndarray, bits: int, count: int, info: TensorInfo) -> np.ndarray:
    """Fields of words (rows, W), the least significant first: unsigned (rows, count).

    Where a word is no multiple of the field, versions of the library differ: older ones have whole fields in every
    word, newer ones a stream across words. The number of words says which it is, unless both take as many.
    """
    stream, whole = word_counts(count, bits)
    if words.shape[1] not in (stream, whole):
        raise CheckpointError(
            f"{where(info)} has shape {info.shape}, expected {stream} words of 32 bits for {count} elements of {bits} "
            "bits"
        )
    per_word = 32 // bits
    if stream == whole and 32 % bits and count > per_word:
        raise CheckpointError(
            f"{where(info)} has {stream} words for {count} elements of {bits} bits, which versions of the library read "
            "in two ways: expected another number of elements"
        )
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[:, :count]
    element = np.arange(count)
    position = element * bits if words.shape[1] == stream else element // per_word * 32 + element % per_word * bits
    octets = np.pad(octets, ((0, 0), (0, 1)))
    pairs = octets[:, position // 8] | (octets[:, position // 8 + 1].astype(np.uint16) << 8)
    return (pairs >> (position % 8).astype(np.uint16) & np.uint16(2**bits - 1)).astype(np.uint8)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes of 4 bits (N, K), two to a byte, the low nibble first."""
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return padded[:, ::2] | (padded[:, 1::2] << 4)
