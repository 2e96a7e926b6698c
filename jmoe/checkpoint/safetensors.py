"""Reader of safetensors files, one file or many shards; the writer is in `jmoe.checkpoint.safetensors_writer`.

The safetensors project's own NumPy reader knows no BF16, FP8 or FP4; this one returns them as ``ml_dtypes`` views of
the mapped file. The format itself, and the checks on it, are in `jmoe.checkpoint.safetensors_header`.
"""

import mmap
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np

from jmoe.checkpoint.safetensors_header import (
    MAX_JSON_BYTES,
    METADATA_KEY,
    PICKLE_SUFFIXES,
    SafetensorsError,
    TensorInfo,
    parse_header,
    parse_json,
    shortlist,
    show,
)

__all__ = [
    "SafetensorsError",
    "SafetensorsFile",
    "SafetensorsIndex",
    "TensorInfo",
    "open_safetensors",
]

_SINGLE_FILE = "model.safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_NUMBERED_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors")


def _nearby(path: Path) -> str:
    """What exists where ``path`` does not: a mistyped name is the usual reason."""
    folder = path.parent
    while not os.path.isdir(folder) and folder != folder.parent:
        folder = folder.parent
    names = sorted(os.listdir(folder))
    likely = get_close_matches(path.name, names, n=3) or [name for name in names if ".safetensors" in name] or names
    held = ", ".join(likely[:5]) + (", ..." if len(likely) > 5 else "")
    return f"{folder} holds {held or 'nothing'}"


def _file_kind(path: Path) -> int:
    """``st_mode`` of an existing path."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise SafetensorsError(f"{path}: links to {os.readlink(path)}, which does not exist") from None
        try:
            hint = _nearby(path)
        except OSError as error:
            hint = f"and its folder cannot be listed: {error.strerror}"
        raise SafetensorsError(f"{path}: does not exist; {hint}") from None
    except OSError as error:
        raise SafetensorsError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise SafetensorsError(f"{show(str(path))}: is no valid file name: {error}") from error


def _require_regular(path: Path) -> None:
    """Refuses folders, and pipes and devices, on which opening or reading would block."""
    mode = _file_kind(path)
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise SafetensorsError(f"{path}: is {kind}, expected a file")


class ClosedOnExit(ABC):
    """A context manager that is closed at the end."""

    @abstractmethod
    def close(self) -> None:
        """Ends reading."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SafetensorsFile(ClosedOnExit):
    """One safetensors file, mapped into memory and read without copies.

    A context manager. ``tensors`` maps names to `TensorInfo` in the order of the bytes, so that walking it reads the
    file from front to back; ``metadata`` is the header's ``__metadata__``, empty where there is none.

    Args:
      path: the file.

    Raises:
      SafetensorsError: the file is missing, no regular file, of another format, truncated or malformed in any way.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _require_regular(self.path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise SafetensorsError(f"{self.path}: has {size} bytes, expected at least 8 for the header length")
                mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise SafetensorsError(f"{self.path}: cannot be opened: {error.strerror}") from error
        try:
            tensors, metadata = parse_header(self.path, mapping)
        except SafetensorsError:
            mapping.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.metadata: dict[str, str] = metadata
        self._mapping: mmap.mmap | None = mapping

    def _locate(self, name: str) -> tuple[mmap.mmap, TensorInfo]:
        if name not in self.tensors:
            raise SafetensorsError(f"{self.path}: has no tensor {show(name)} among its {len(self.tensors)}")
        if self._mapping is None:
            raise SafetensorsError(f"{self.path}: was closed before tensor {show(name)} was read")
        return self._mapping, self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file, of ``np_shape`` and ``np_dtype``.

        Bytes are fetched from disk when they are touched. The view may be unaligned (``flags.aligned``) where the
        file was written so, and it outlives ``close``.

        Raises:
          SafetensorsError: no such tensor, a closed file, a file cut short since it was opened, or a BOOL tensor
            with bytes other than 0 and 1, which NumPy must never see.
        """
        mapping, info = self._locate(name)
        if (size := mapping.size()) < info.stop:  # touching pages beyond the end of a file kills the process
            raise SafetensorsError(
                f"{self.path}: was cut to {size} bytes while open, but tensor {show(name)} ends at byte {info.stop}"
            )
        array: np.ndarray = np.ndarray(info.np_shape, info.np_dtype, buffer=mapping, offset=info.start)
        if info.dtype == "BOOL" and (largest := array.view(np.uint8).max(initial=0)) > 1:
            raise SafetensorsError(f"{self.path}: BOOL tensor {show(name)} holds the byte {largest}, expected 0 or 1")
        return array

    def release(self, name: str) -> None:
        """Tells the kernel that the tensor's pages are not needed now, so that streaming a file keeps memory small.

        Arrays read from it stay valid: their pages are fetched again when touched. Does nothing where the platform
        has no ``madvise``.
        """
        mapping, info = self._locate(name)
        if info.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            first_page = info.start - info.start % mmap.PAGESIZE
            mapping.madvise(mmap.MADV_DONTNEED, first_page, info.stop - first_page)

    def close(self) -> None:
        """Ends reading. The file stays mapped until the last array read from it is gone."""
        # Never `mapping.close()`: NumPy holds a reference but no buffer export, so that would unmap living arrays.
        self._mapping = None


class _ShardedTensors(Mapping[str, TensorInfo]):
    """Names without opening a shard, infos by opening the one that holds the tensor."""

    def __init__(self, index: "SafetensorsIndex") -> None:
        self._index = index

    def __getitem__(self, name: str) -> TensorInfo:
        return self._index._shard(self._index._files[name]).tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._index._files)

    def __len__(self) -> int:
        return len(self._index._files)

    def __contains__(self, name: object) -> bool:
        return name in self._index._files


class SafetensorsIndex(ClosedOnExit):
    """Tensors spread over several files, with the interface of `SafetensorsFile`.

    Made by `from_json` or `from_files`. With an index, shards are opened when first needed and then compared with it:
    each must hold exactly the tensors that the index places there.
    """

    def __init__(self, source: Path, files: Mapping[str, Path], opened: Mapping[Path, SafetensorsFile]) -> None:
        self.path = source
        self._files = dict(files)
        self._names: dict[Path, set[str]] = {file: set() for file in (*self._files.values(), *opened)}
        for name, file in self._files.items():
            self._names[file].add(name)
        self._opened = dict(opened)
        self._closed = False

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Self:
        """Reads an index such as ``model.safetensors.index.json``: ``{"weight_map": {tensor name: file name}}``.

        Raises:
          SafetensorsError: a malformed index, a shard outside the index's own folder, or a shard that does not exist.
        """
        path = Path(path)
        _require_regular(path)
        try:
            with open(path, "rb") as file:
                raw = file.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise SafetensorsError(f"{path}: cannot be opened: {error.strerror}") from error
        if len(raw) > MAX_JSON_BYTES:
            raise SafetensorsError(f"{path}: is longer than {MAX_JSON_BYTES} bytes, the most that an index may have")
        weight_map = parse_json(f"{path}: it", raw).get("weight_map")
        if not isinstance(weight_map, dict):
            raise SafetensorsError(f"{path}: has weight_map {show(weight_map)}, expected an object of file names")
        for name, shard in weight_map.items():
            # A plain name: an index must not lead out of its folder.
            if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\\0"):
                raise SafetensorsError(
                    f"{path}: places tensor {show(name)} in {show(shard)}, expected the name of a file beside it"
                )
        shards = {shard: path.parent / shard for shard in sorted(set(weight_map.values()))}
        if missing := [shard for shard, file in shards.items() if not os.path.isfile(file)]:
            raise SafetensorsError(
                f"{path}: lists {len(shards)} files, of which {shortlist(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not in {path.parent}"
            )
        return cls(path, {name: shards[shard] for name, shard in weight_map.items()}, {})

    @classmethod
    def from_files(cls, source: str | os.PathLike[str], files: Iterable[str | os.PathLike[str]]) -> Self:
        """Opens files that no index describes; ``source`` names them together in errors.

        Raises:
          SafetensorsError: a malformed file, or a tensor name that two files share.
        """
        placed: dict[str, Path] = {}
        opened: dict[Path, SafetensorsFile] = {}
        for path in map(Path, files):
            opened[path] = SafetensorsFile(path)
            for name in opened[path].tensors:
                if name in placed:
                    raise SafetensorsError(
                        f"{path}: tensor {show(name)} is in {placed[name].name} too, expected it in one file"
                    )
                placed[name] = path
        return cls(Path(source), placed, opened)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Names to `TensorInfo`; iterating over names opens nothing, looking one up opens its shard."""
        return _ShardedTensors(self)

    @property
    def shards(self) -> tuple[SafetensorsFile, ...]:
        """Every shard, opened and checked."""
        return tuple(self._shard(file) for file in self._names)

    @property
    def metadata(self) -> dict[str, str]:
        """The shards' ``__metadata__`` in one dictionary; opens every shard.

        Raises:
          SafetensorsError: two shards give one key different values; ``shards`` has them apart.
        """
        merged: dict[str, str] = {}
        for shard in self.shards:
            for key, text in shard.metadata.items():
                if merged.setdefault(key, text) != text:
                    raise SafetensorsError(
                        f"{shard.path}: has {show(text)} for {METADATA_KEY} key {show(key)}, "
                        f"expected {show(merged[key])} as in the shards before it"
                    )
        return merged

    def _shard(self, file: Path) -> SafetensorsFile:
        if self._closed:
            raise SafetensorsError(f"{self.path}: was closed before {file.name} was read")
        if file not in self._opened:
            shard = SafetensorsFile(file)
            listed = self._names[file]
            if absent := sorted(listed - shard.tensors.keys()):
                raise SafetensorsError(f"{self.path}: places {shortlist(absent)} in {file.name}, which lacks it")
            if unlisted := sorted(shard.tensors.keys() - listed):
                raise SafetensorsError(
                    f"{file}: holds {shortlist(unlisted)}, which {self.path.name} does not place in this file"
                )
            self._opened[file] = shard
        return self._opened[file]

    def _locate(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise SafetensorsError(f"{self.path}: has no tensor {show(name)} among its {len(self._files)}")
        return self._shard(self._files[name])

    def read(self, name: str) -> np.ndarray:
        """As `SafetensorsFile.read`."""
        return self._locate(name).read(name)

    def release(self, name: str) -> None:
        """As `SafetensorsFile.release`."""
        self._locate(name).release(name)

    def close(self) -> None:
        """As `SafetensorsFile.close`, for every shard."""
        self._closed = True
        for shard in self._opened.values():
            shard.close()


def _check_numbering(folder: Path, names: Sequence[str]) -> None:
    """Without an index, only the names ``x-00001-of-00003.safetensors`` tell that a shard is missing."""
    present: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _NUMBERED_SHARD.fullmatch(name):
            present.setdefault((match["stem"], int(match["total"])), set()).add(int(match["number"]))
    for (stem, total), numbers in present.items():
        first = 0 if 0 in numbers else 1
        missing = next((number for number in range(first, first + total) if number not in numbers), None)
        if missing is not None:
            raise SafetensorsError(
                f"{folder}: holds {len(numbers)} of the {total} files {stem}-*-of-*.safetensors, "
                f"expected all, but number {missing} is missing"
            )


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile | SafetensorsIndex:
    """Opens a checkpoint: a safetensors file, an index, or the folder that holds either.

    In a folder, ``model.safetensors.index.json`` or the only other ``*.safetensors.index.json`` decides; without one,
    ``model.safetensors`` is the whole checkpoint; without that, all ``*.safetensors`` together are, and no two of them
    may share a tensor name.

    Raises:
      SafetensorsError: nothing there, more than one reading of what is there, or a file that is malformed.
    """
    path = Path(path)
    if not stat.S_ISDIR(_file_kind(path)):
        return SafetensorsIndex.from_json(path) if path.suffix == ".json" else SafetensorsFile(path)
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise SafetensorsError(f"{path}: cannot be listed: {error.strerror}") from error
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(".safetensors")]
    preferred = f"model{_INDEX_SUFFIX}"
    if preferred in indices or (len(indices) == 1 and _SINGLE_FILE not in files):
        index = SafetensorsIndex.from_json(path / (preferred if preferred in indices else indices[0]))
        if _SINGLE_FILE in files and path / _SINGLE_FILE not in index._names:
            raise SafetensorsError(f"{path}: holds {_SINGLE_FILE} and {preferred} that does not list it, expected one")
        return index
    if _SINGLE_FILE in files:
        return SafetensorsFile(path / _SINGLE_FILE)
    if indices:
        raise SafetensorsError(f"{path}: holds {len(indices)} indices, {shortlist(indices)}, expected one")
    if not files:
        pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
        hint = f"; {shortlist(pickles)} may be pickled, which can run code when it is loaded" if pickles else ""
        raise SafetensorsError(f"{path}: holds no *.safetensors{hint}")
    if len(files) == 1:
        return SafetensorsFile(path / files[0])
    _check_numbering(path, files)
    return SafetensorsIndex.from_files(path, [path / name for name in files])
