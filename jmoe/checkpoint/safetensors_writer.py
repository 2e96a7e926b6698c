"""Writer of safetensors files: whole from a mapping, or tensor by tensor as they are made."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jmoe.checkpoint.safetensors import ClosedOnExit
from jmoe.checkpoint.safetensors_header import (
    DTYPE_NAMES,
    MAX_JSON_BYTES,
    METADATA_KEY,
    NUMPY_DTYPES,
    SafetensorsError,
    checked_nbytes,
    shortlist,
    show,
)

_Source = np.ndarray | tuple[str, Sequence[int], bytes | bytearray | memoryview]
_Description = tuple[str, tuple[int, ...], int]  # dtype, shape, bytes in the file


def _describe(name: object, value: object) -> _Description:
    """Dtype, shape and bytes in the file of a tensor to be written."""
    if not isinstance(name, str):
        raise TypeError(f"tensors has the key {show(name)}, expected a string")
    if name == METADATA_KEY:
        raise SafetensorsError(f"tensors has the key {METADATA_KEY}, which the format keeps for the argument metadata")
    where = f"tensors[{show(name)}]"
    if isinstance(value, np.ndarray):
        dtype = DTYPE_NAMES.get(value.dtype.newbyteorder("<"))
        if dtype is None:
            raise SafetensorsError(
                f"{where} has dtype {value.dtype}, expected one of {', '.join(map(str, DTYPE_NAMES))}, "
                'or packed 4-bit elements as ("F4", shape, bytes)'
            )
        return dtype, value.shape, value.nbytes
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], (bytes, bytearray, memoryview)):
        dtype, shape, data = value
        nbytes = checked_nbytes(where, dtype, shape)
        if (found := memoryview(data).nbytes) != nbytes:
            raise SafetensorsError(f"{where} has {found} bytes, expected {nbytes} for {dtype} of shape {show(shape)}")
        return dtype, tuple(shape), nbytes
    raise TypeError(f"{where} is {show(value)}, expected a NumPy array or a tuple (dtype, shape, bytes)")


def _lay_out(
    path: Path, described: Mapping[str, _Description], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """What precedes the tensors' bytes, and where each tensor starts, in the order of the bytes.

    Tensors are ordered by falling element size, then by name, behind a header padded to 8 bytes, so each is aligned.
    """
    header: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise TypeError(f"metadata is {show(dict(metadata))}, expected strings to strings")
        header[METADATA_KEY] = dict(metadata)
    starts: dict[str, int] = {}
    offset = 0
    for name in sorted(described, key=lambda name: (-NUMPY_DTYPES[described[name][0]].itemsize, name)):
        dtype, shape, nbytes = described[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        starts[name] = offset
        offset += nbytes
    try:
        raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise SafetensorsError(f"{path}: a name or metadata text cannot be written: {error}") from error
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_JSON_BYTES:
        raise SafetensorsError(f"{path}: needs a header of {len(raw)} bytes, expected at most {MAX_JSON_BYTES}")
    preamble = len(raw).to_bytes(8, "little") + raw
    return preamble, {name: len(preamble) + start for name, start in starts.items()}


def _write_value(file: BinaryIO, value: _Source) -> None:
    if isinstance(value, np.ndarray):
        stored = np.asarray(value, dtype=value.dtype.newbyteorder("<"), order="C")
        file.write(stored.reshape(-1).view(np.uint8).data)
    else:
        data = memoryview(value[2])
        file.write(data if data.c_contiguous else data.tobytes())


class SafetensorsWriter(ClosedOnExit):
    """Writes a safetensors file whose tensors arrive one by one, in any order, so that none need stay in memory.

    A context manager. Until `finish` has returned the file is no whole one.

    Args:
      path: the file, which must not exist.
      tensors: name to (dtype as the format names it, shape) of everything that will be written.
      metadata: strings to strings, for the header's ``__metadata__``.

    Raises:
      SafetensorsError: a dtype, shape or name that a file cannot hold.
      OSError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self._described = {
            name: (dtype, tuple(shape), checked_nbytes(f"tensors[{show(name)}]", dtype, shape))
            for name, (dtype, shape) in tensors.items()
        }
        preamble, self._starts = _lay_out(self.path, self._described, metadata)
        self._file = open(self.path, "xb")  # noqa: SIM115  close() does, or finish()
        self._file.write(preamble)

    def write(self, name: str, value: _Source) -> None:
        """Writes one tensor, an array or ``(dtype, shape, bytes)`` as for `write_safetensors`.

        Raises:
          SafetensorsError: a name that was not announced or is written already, or another dtype or shape.
        """
        if name not in self._starts:
            raise SafetensorsError(f"{self.path}: tensor {show(name)} was not announced, or is written already")
        if (found := _describe(name, value)) != (expected := self._described[name]):
            raise SafetensorsError(
                f"{self.path}: tensor {show(name)} is {found[0]} of shape {show(found[1])}, "
                f"expected {expected[0]} of shape {show(expected[1])} as announced"
            )
        self._file.seek(self._starts.pop(name))
        _write_value(self._file, value)

    def finish(self) -> None:
        """Brings everything to the disk and closes the file.

        Raises:
          SafetensorsError: an announced tensor was not written.
        """
        if self._starts:
            raise SafetensorsError(f"{self.path}: {shortlist(list(self._starts))} was announced and not written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Closes the file, whole or not."""
        self._file.close()


def write_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, _Source], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, whole or not at all.

    Tensors are ordered by falling element size, then by name, so that each is aligned and equal contents give equal
    files. A temporary file beside ``path`` takes its place when complete. Values are looked
    up twice, for the header and for the bytes, so a mapping that makes them on demand never has two in memory.

    Args:
      path: the file; one that exists is replaced.
      tensors: name to an array of any shape and byte order, or to ``(dtype, shape, bytes)`` with the format's own dtype
        name, such as ``("F4", (4, 8), bytes(16))``; ``F4`` has the even element in the low nibble.
      metadata: strings to strings, for the header's ``__metadata__``.

    Raises:
      TypeError: a key or value of the wrong type.
      SafetensorsError: a dtype or name that a file cannot hold, or bytes that do not match dtype and shape.
      OSError: the file cannot be written.
    """
    path = Path(path)
    described = {name: _describe(name, tensors[name]) for name in tensors}
    preamble, starts = _lay_out(path, described, metadata)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(preamble)
            for name in starts:
                value = tensors[name]
                if _describe(name, value) != described[name]:
                    raise SafetensorsError(f"tensors[{show(name)}] changed between its two look-ups")
                _write_value(file, value)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
