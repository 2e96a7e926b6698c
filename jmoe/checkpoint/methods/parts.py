"""Files whose tensors are shown in parts: experts that a file has in one tensor, as tensors of each expert."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jmoe.checkpoint.methods.base import CheckpointError, Files, where
from jmoe.checkpoint.safetensors import TensorInfo


@dataclass(frozen=True)
class Part:
    """Rows of one entry of a tensor (E, N, ...), as a tensor of their own.

    Attributes:
      name: what it is shown as.
      whole: the tensor's name in the file.
      entry: which entry; None is all of a tensor that several share, such as a scale.
      rows: of the entry.
      shape: of the part, which the rows are reshaped to.
      transposed: whether the entry is (K, N).
    """

    name: str
    whole: str
    entry: int | None
    rows: slice
    shape: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True)
class PartInfo(TensorInfo):
    """Header of a part; its name is that of the tensor it comes from, and its bytes lie between start and stop."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.np_shape) * self.np_dtype.itemsize


class FilesInParts(Mapping[str, TensorInfo]):
    """Files in which some tensors are replaced by their parts, with the interface of ``SafetensorsFile``.

    A tensor in parts is let go of with the part that is last in ``parts``. Looking up any other tensor opens its file,
    as in the files themselves; the mapping is this object.

    Raises:
      CheckpointError: a part has the name of another tensor.
    """

    def __init__(self, files: Files, parts: Iterable[Part]) -> None:
        self._files = files
        self._parts: dict[str, Part] = {}
        wholes: dict[str, str] = {}
        for part in parts:
            if part.name in files.tensors or part.name in self._parts:
                raise CheckpointError(
                    f"{where(files.tensors[part.whole])} holds what {part.name!r} holds too, expected one of them"
                )
            self._parts[part.name] = part
            wholes[part.whole] = part.name
        self._last = wholes
        self._others = [name for name in files.tensors if name not in wholes]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self

    def __getitem__(self, name: str) -> TensorInfo:
        if name not in self._parts:
            if name in self._last:
                raise KeyError(name)
            return self._files.tensors[name]
        part = self._parts[name]
        whole = self._files.tensors[part.whole]
        if part.entry is None:
            return PartInfo(part.whole, whole.dtype, part.shape, whole.file, whole.start, whole.stop)
        columns = ", :" if part.transposed and part.rows != slice(None) else ""
        rows = columns + _shown(part.rows)
        size = whole.nbytes // whole.shape[0]
        start = whole.start + part.entry * size
        return PartInfo(f"{part.whole}[{part.entry}{rows}]", whole.dtype, part.shape, whole.file, start, start + size)

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._parts

    def __len__(self) -> int:
        return len(self._others) + len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts or (name in self._files.tensors and name not in self._last)

    def read(self, name: str) -> np.ndarray:
        """As ``SafetensorsFile.read``: a view also of a part."""
        if name not in self._parts:
            return self._files.read(name)
        part = self._parts[name]
        whole = self._files.read(part.whole)
        if part.entry is None:
            return whole.reshape(part.shape)
        entry = np.asarray(whole[part.entry])  # a scalar is no array
        if not entry.ndim:
            return entry
        return (entry.T if part.transposed else entry)[part.rows].reshape(part.shape)

    def release(self, name: str) -> None:
        """As ``SafetensorsFile.release``; of a part, once all are through."""
        if name not in self._parts:
            self._files.release(name)
        elif self._last[whole := self._parts[name].whole] == name:
            self._files.release(whole)

    def close(self) -> None:
        self._files.close()


def _shown(rows: slice) -> str:
    """The rows as they follow another index; nothing where they are all."""
    if rows == slice(None):
        return ""
    start, stop = ("" if end is None else end for end in (rows.start, rows.stop))
    return f", {start}:{stop}" + ("" if rows.step is None else f":{rows.step}")
