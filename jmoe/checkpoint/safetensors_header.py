"""The header of a safetensors file: what it may say, and every check on what it does say.

A file is an unsigned 64-bit little-endian header length, a JSON header, and the tensors' bytes in row-major order::

    {"__metadata__": {"format": "pt"}, "w": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]}}

Offsets count from the end of the header, and the tensors cover everything behind it without hole or overlap.
Source: the format's specification, https://github.com/huggingface/safetensors#format.

Nothing is allocated from a size that a file merely claims, and malformed input of any kind raises `SafetensorsError`.
"""

import json
import math
import mmap
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

METADATA_KEY = "__metadata__"
_ENTRY_KEYS = ("dtype", "shape", "data_offsets")
MAX_JSON_BYTES = 100_000_000  # the reference implementation's limit for a header
_MAX_RANK = 64  # NumPy's
_MAX_NBYTES = 2**63 - 1  # NumPy's, and it holds for zero-size arrays with the zero extents left out

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "U16": np.dtype("<u2"),
        "I16": np.dtype("<i2"),
        "F16": np.dtype("<f2"),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "U32": np.dtype("<u4"),
        "I32": np.dtype("<i4"),
        "F32": np.dtype("<f4"),
        "U64": np.dtype("<u8"),
        "I64": np.dtype("<i8"),
        "F64": np.dtype("<f8"),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "F4": np.dtype(np.uint8),  # two elements a byte
    }
)
DTYPE_NAMES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "F4"}
_FNUZ = "AMD's FP8, whose exponent bias and NaN differ from the OCP formats F8_E4M3 and F8_E5M2"
_REFUSED_DTYPES: Mapping[str, str] = {
    "F8_E4M3FNUZ": _FNUZ,
    "F8_E5M2FNUZ": _FNUZ,
    "F6_E2M3": "a 6-bit float that no recipe here uses",
    "F6_E3M2": "a 6-bit float that no recipe here uses",
    "C64": "a complex number, which no recipe here uses",
}
_OTHER_FORMATS: Sequence[tuple[bytes, str]] = (
    (b"PK\x03\x04", "a zip archive, such as PyTorch pickles checkpoints into, which can run code when it is loaded"),
    *((bytes([0x80, protocol]), "a pickle, which can run code when it is loaded") for protocol in range(2, 6)),
    (b"GGUF", "a GGUF file"),
    (b"version ", "a Git LFS pointer, so that the weights themselves were never downloaded"),
)
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})

_shortened = reprlib.Repr()
_shortened.maxstring = 200


class SafetensorsError(ValueError):
    """A checkpoint that cannot be read or written: one sentence names file, tensor, what was expected and found."""


def show(value: object) -> str:
    """``repr`` bounded in length and depth: a value out of a hostile header may be megabytes long."""
    return _shortened.repr(value)


def shortlist(names: Sequence[str]) -> str:
    """The first three names and the number of the others."""
    shown = ", ".join(show(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
      name: its key in the header.
      dtype: the format's own name of the element type, such as ``"F8_E4M3"``.
      shape: the logical shape as the header has it; ``F4`` counts 4-bit elements.
      file: the file that holds it.
      start, stop: byte offsets from the beginning of the file, ``stop`` exclusive.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """The dtype that ``read`` returns: ``ml_dtypes`` for BF16 and FP8, uint8 for ``F4``."""
        return NUMPY_DTYPES[self.dtype]

    @property
    def np_shape(self) -> tuple[int, ...]:
        """The shape that ``read`` returns: ``shape``, with the last axis halved for ``F4`` (two elements a byte)."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" else self.shape


def checked_nbytes(where: str, dtype: object, shape: object) -> int:
    """Bytes that a tensor takes, from the unchecked dtype and shape of a header; ``where`` names it in errors."""
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        if isinstance(dtype, str) and dtype in _REFUSED_DTYPES:
            raise SafetensorsError(f"{where} has dtype {dtype}, {_REFUSED_DTYPES[dtype]}, and is not supported")
        raise SafetensorsError(f"{where} has dtype {show(dtype)}, expected one of {', '.join(NUMPY_DTYPES)}")
    # bool is a subclass of int, and JSON's true is no extent.
    if not isinstance(shape, (list, tuple)) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise SafetensorsError(f"{where} has shape {show(shape)}, expected a list of non-negative integers")
    if len(shape) > _MAX_RANK:
        raise SafetensorsError(f"{where} has {len(shape)} dimensions, expected at most {_MAX_RANK}")
    itemsize = NUMPY_DTYPES[dtype].itemsize
    # Each extent is bounded before the product, which would otherwise be quadratic in the digits of a hostile header.
    if max(shape, default=0) > _MAX_NBYTES or math.prod(filter(None, shape)) * itemsize > _MAX_NBYTES:
        raise SafetensorsError(f"{where} has shape {show(shape)}, expected at most 2**63 - 1 bytes")
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise SafetensorsError(
                f"{where} has dtype F4 and shape {show(shape)}, expected an even last axis: two elements share a byte"
            )
        return math.prod(shape) // 2
    return math.prod(shape) * itemsize


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` that refuses what ``json`` would let pass: repeated keys and text that is not Unicode."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {show(key)} occurs twice")
        for text in (key, value):
            if isinstance(text, str):
                text.encode()  # UnicodeEncodeError, a ValueError, on a lone surrogate written as an escape
        found[key] = value
    return found


def _no_constant(literal: str) -> None:
    raise ValueError(f"{literal} is not a JSON value")


def parse_json(where: str, raw: bytes) -> dict[str, Any]:
    """A JSON object with unique keys and Unicode text at every level; ``where`` names it in errors."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SafetensorsError(f"{where} is not UTF-8 text at its byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise SafetensorsError(f"{where} is JSON nested too deeply to be read") from None
    except ValueError as error:
        raise SafetensorsError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise SafetensorsError(f"{where} is a JSON {type(value).__name__}, expected an object")
    return value


def _parse_metadata(where: str, metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise SafetensorsError(f"{where} has {METADATA_KEY} {show(metadata)}, expected an object of strings")
    return metadata


def _parse_tensor(file: Path, name: str, entry: object, data_start: int, file_size: int) -> TensorInfo:
    where = f"{file}: tensor {show(name)}"
    if not isinstance(entry, dict) or not all(key in entry for key in _ENTRY_KEYS):
        raise SafetensorsError(f"{where} is described by {show(entry)}, expected the keys {', '.join(_ENTRY_KEYS)}")
    dtype, shape, offsets = (entry[key] for key in _ENTRY_KEYS)
    nbytes = checked_nbytes(where, dtype, shape)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise SafetensorsError(
            f"{where} has data_offsets {show(offsets)}, expected two integers [start, stop] with 0 <= start <= stop"
        )
    start, stop = offsets
    if data_start + stop > file_size:
        raise SafetensorsError(
            f"{where} has data_offsets {show(offsets)}, but the file has only {file_size - data_start} bytes of data: "
            "it is truncated or its header is wrong"
        )
    if stop - start != nbytes:
        raise SafetensorsError(
            f"{where} has {stop - start} bytes by its data_offsets {offsets}, "
            f"expected {nbytes} for {dtype} of shape {show(shape)}"
        )
    return TensorInfo(name, dtype, tuple(shape), file, data_start + start, data_start + stop)


def _check_coverage(file: Path, infos: Iterable[TensorInfo], data_start: int, file_size: int) -> None:
    """Tensors, sorted by offset, must follow each other from the header to the end of the file."""
    end, before = data_start, "the header"
    for info in infos:
        if info.start != end:
            fault = "overlaps" if info.start < end else "leaves a hole behind"
            raise SafetensorsError(
                f"{file}: tensor {show(info.name)} {fault} {before}: "
                f"it starts at offset {info.start - data_start}, expected {end - data_start}"
            )
        end, before = info.stop, f"tensor {show(info.name)}"
    if end != file_size:
        raise SafetensorsError(f"{file}: {file_size - end} bytes follow {before}, expected the end of the file")


def _header_length(file: Path, mapping: mmap.mmap) -> int:
    length, size = int.from_bytes(mapping[:8], "little"), len(mapping)
    if 0 < length <= min(size - 8, MAX_JSON_BYTES):
        return length
    # Only where the length makes no sense: a real header may happen to begin with another format's magic number.
    for magic, what in _OTHER_FORMATS:
        if mapping[: len(magic)] == magic:
            raise SafetensorsError(f"{file}: is {what}, expected a safetensors file")
    hint = ": its name is that of a pickled checkpoint" if file.suffix in PICKLE_SUFFIXES else ""
    raise SafetensorsError(
        f"{file}: has header length {length} in a file of {size} bytes, expected at least 1, at most {MAX_JSON_BYTES} "
        f"and no more than the file holds{hint}"
    )


def parse_header(file: Path, mapping: mmap.mmap) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors, ordered by offset, and the metadata of a mapped file."""
    size = len(mapping)
    data_start = 8 + _header_length(file, mapping)
    raw = mapping[8:data_start]
    if not raw.startswith(b"{"):
        raise SafetensorsError(f"{file}: has a header that begins with {show(raw[:8])}, expected '{{'")
    header = parse_json(f"{file}: its header", raw)
    metadata = _parse_metadata(str(file), header.pop(METADATA_KEY, {}))
    infos = [_parse_tensor(file, name, entry, data_start, size) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.start, info.stop))
    _check_coverage(file, infos, data_start, size)
    return {info.name: info for info in infos}, metadata
