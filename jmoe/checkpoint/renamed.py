"""Files whose tensors are shown under names that the user wants, as for a model whose names no family has."""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jmoe.checkpoint.methods import CheckpointError
from jmoe.checkpoint.methods.base import Files, where
from jmoe.checkpoint.safetensors import TensorInfo

Names = Sequence[tuple[str, str]]
"""(regular expression, replacement) pairs, applied to a tensor's name one after the other, as by ``re.sub``."""


class RenamedFiles(Mapping[str, TensorInfo]):
    """Files under other names, with the interface of ``SafetensorsFile``; the mapping is this object.

    Raises:
      TypeError: ``names`` are no such pairs; ValueError: an expression or replacement that is none, or that changes no
        name; CheckpointError: two tensors get one name.
    """

    def __init__(self, files: Files, names: Names) -> None:
        rules = _compiled(names)
        used = [False] * len(rules)
        self._files = files
        self._sources: dict[str, str] = {}
        for source in files.tensors:
            shown = source
            for index, (pattern, replacement) in enumerate(rules):
                try:
                    before, shown = shown, pattern.sub(replacement, shown)
                except (re.error, IndexError) as error:
                    raise ValueError(f"names[{index}]={names[index]!r} has no replacement for it: {error}") from error
                used[index] |= shown != before
            if shown in self._sources:
                raise CheckpointError(
                    f"{where(files.tensors[source])} becomes {shown!r} by names, as {self._sources[shown]!r} does"
                )
            self._sources[shown] = source
        if not all(used):
            index = used.index(False)
            raise ValueError(f"names[{index}]={names[index]!r} changes none of the {len(files.tensors)} tensors' names")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self

    def __getitem__(self, name: str) -> TensorInfo:
        return self._files.tensors[self._sources[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def read(self, name: str) -> np.ndarray:
        """As ``SafetensorsFile.read``."""
        return self._files.read(self._sources.get(name, name))

    def release(self, name: str) -> None:
        """As ``SafetensorsFile.release``."""
        self._files.release(self._sources.get(name, name))

    def close(self) -> None:
        self._files.close()


def _compiled(names: Names) -> list[tuple[re.Pattern[str], str]]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"names={names!r} must be a list of (regular expression, replacement) pairs")
    rules = []
    for index, rule in enumerate(names):
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not all(isinstance(part, str) for part in rule):
            raise TypeError(f"names[{index}]={rule!r} must be a pair of a regular expression and its replacement")
        try:
            rules.append((re.compile(rule[0]), rule[1]))
        except re.error as error:
            raise ValueError(f"names[{index}]={rule!r} is no regular expression: {error}") from error
    return rules
