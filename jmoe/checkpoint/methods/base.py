"""What a quantization method is, the registry of methods, and the checks that they share.

Everything here works on NumPy arrays on the host: a weight reaches a device only when it is complete.
"""

import contextlib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, Self, TypeVar, cast

import ml_dtypes
import numpy as np
from jax import Array

from jmoe.arguments import check_type
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.qtensor import QTensor, scale_grid
from jmoe.scheme import Recipe, Scheme
from pallas_kernels import bits

HostWeight = QTensor | np.ndarray
"""A weight before it reaches a device: a plain array, or a QTensor whose leaves are NumPy arrays."""

_F32_TINY = float(np.finfo(np.float32).tiny)

SCALE_DTYPES: Mapping[str, str] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E8M0": "e8m0",
    "U8": "e8m0",
}
"""How a file's dtype for scales is named in a ``Scheme``; plain bytes are e8m0."""

FLOAT_DTYPES = ("BF16", "F16", "F32")
"""A file's dtypes for weights that are not quantized."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: one sentence names file, tensor, what was expected and what was found."""


class Tensors(Protocol):
    """What methods read from: the headers of all tensors, and their bytes as NumPy arrays."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray: ...


class Files(Tensors, Protocol):
    """Open files: `Tensors`, whose memory can be let go of and which end."""

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


class Method(Protocol):
    """A translation from a ``quantization_config`` and the names of tensors to recipes and weights.

    A module is the part of a tensor's name before its last dot, a leaf the part behind it. What a module is, its
    tensors say; where the configuration says otherwise, that is an error naming both facts.

    Attributes:
      leaves: the leaves that make up a weight of this method.
    """

    leaves: tuple[str, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The method as the ``quantization_config`` sets it up (empty without one).

        Raises:
          CheckpointError: a setting that the method does not have.
        """
        ...

    def view(self, files: Files) -> Files:
        """The files with tensors under the names of modules and leaves, where the format's own are others.

        Raises:
          CheckpointError: tensors of shapes that the format does not have.
        """
        return files

    def is_quantized(self, leaves: Collection[str]) -> bool:
        """Whether a module with these leaves is quantized."""
        ...

    def ignored_by(self, module: str) -> str | None:
        """The entry of the configuration that leaves the module unquantized, or None."""
        return None

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        """The recipe of a module, from the headers of its tensors by leaf; no data is read.

        Raises:
          CheckpointError: tensors that are missing, contradict each other, or contradict the configuration.
        """
        ...

    def shape_for(self, module: str, present: Mapping[str, TensorInfo]) -> tuple[int, ...]:
        """The logical shape of a module's weight, from the headers of its tensors by leaf."""
        return present["weight"].shape

    def read_shape(self, tensors: Tensors, module: str) -> tuple[int, ...]:
        """As `shape_for`, where a format has tensors that say a shape, by reading these."""
        return self.shape_for(module, present_leaves(tensors.tensors, module, self.leaves))

    def load_weight(self, tensors: Tensors, module: str) -> HostWeight:
        """The module's weight (N, K) on the host, exactly as stored; leaves may be views of the file.

        Raises:
          CheckpointError: as `recipe_for`, and a scale that is not a positive, normal, finite number.
        """
        ...

    def load_input_scale(self, tensors: Tensors, module: str) -> np.float32 | None:
        """The given scale of the module's input where its recipe has a static one, else None."""
        return None


_REGISTRY: dict[str, type[Method]] = {}
_M = TypeVar("_M", bound=type[Method])


def register(name: str) -> Callable[[_M], _M]:
    """Class decorator that enters a method under its ``quant_method`` name.

    Raises:
      ValueError: the name is taken; TypeError: it is none.
    """
    check_type("name", name, str, "what quant_method is in a checkpoint")

    def enter(cls: _M) -> _M:
        if name in _REGISTRY:
            raise ValueError(f"name={name!r} is taken by {_REGISTRY[name].__qualname__}; choose another")
        _REGISTRY[name] = cls
        return cls

    return enter


def known_methods() -> tuple[str, ...]:
    """The names under which methods are registered."""
    return tuple(_REGISTRY)


def method_for(name: str, config: Mapping[str, Any], where: str) -> Method:
    """The method of that name set up by ``config``; ``where`` says where that was found, for errors.

    Raises:
      CheckpointError: an unknown name, or settings that the method does not have.
    """
    if name not in _REGISTRY:
        raise CheckpointError(
            f"{where} has quant_method {name!r}, which is not supported; known are {', '.join(_REGISTRY)}"
        )
    try:
        return _REGISTRY[name].from_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{where} {error}") from None


def where(info: TensorInfo) -> str:
    """File and tensor, as errors begin."""
    return f"{info.file}: tensor {info.name!r}"


def present_leaves(tensors: Mapping[str, TensorInfo], module: str, leaves: Iterable[str]) -> dict[str, TensorInfo]:
    """The headers of those of a module's leaves that are there."""
    return {leaf: tensors[name] for leaf in leaves if (name := f"{module}.{leaf}") in tensors}


class ModuleList:
    """A configuration's list of modules, such as those to leave alone.

    An entry means a module by its whole name, by the first or last components of it, as a shell pattern of the whole
    name, or as a regular expression of the first components: the union of what libraries write into such lists.

    Args:
      entries: as the configuration has them.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._names: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        for entry in entries:
            if re.fullmatch(r"[\w.\-]*", entry):
                self._names.setdefault(entry.strip("."), entry)
                continue
            self._patterns.append((re.compile(fnmatch.translate(entry)), entry))
            # A shell pattern such as *.attn.* is no regular expression.
            with contextlib.suppress(re.error):
                self._patterns.append((re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))"), entry))

    def find(self, module: str) -> str | None:
        """An entry that means this module, or None."""
        parts = module.split(".")
        # Lists have hundreds of names, checkpoints tens of thousands of modules: look up, never walk the list.
        for i in range(1, len(parts) + 1):
            for name in (".".join(parts[:i]), ".".join(parts[-i:])):
                if name in self._names:
                    return self._names[name]
        return next((entry for pattern, entry in self._patterns if pattern.match(module)), None)


def check_keys(config: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises a CheckpointError that names a key of the configuration which is not known."""
    unknown = sorted(set(config).difference(known))
    if unknown:
        raise CheckpointError(
            f"has the key {unknown[0]!r} with the value {config[unknown[0]]!r}, which is not known; known are "
            f"{', '.join(sorted(known))}"
        )


def list_of_names(config: Mapping[str, Any], key: str) -> list[str]:
    """The list of modules under a key; empty where there is none.

    Raises:
      CheckpointError: the value is something else.
    """
    entries = config.get(key) or ()
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise CheckpointError(f"has {key} {entries!r}, expected a list of names")
    return list(entries)


def require_matrix(info: TensorInfo) -> tuple[int, int]:
    """The (N, K) of a weight's header."""
    if len(info.shape) != 2:
        raise CheckpointError(f"{where(info)} has shape {info.shape}, expected the two axes (N, K) of a linear layer")
    return info.shape[0], info.shape[1]


def logical_shape(info: TensorInfo, *, packed: bool) -> tuple[int, ...]:
    """The shape of a weight, whose codes share a byte in twos where it is packed; of any rank, also none."""
    return (*info.shape[:-1], 2 * info.shape[-1]) if packed and info.shape else info.shape


def require_grid(scale: TensorInfo, weight: TensorInfo, block: tuple[int, int]) -> None:
    """Checks a scale's shape against its weight's: one scale a block, the last ones ragged."""
    n, k = require_matrix(weight)
    grid = scale_grid((n, k), block)
    if scale.shape != grid and not (grid == (1, 1) and scale.shape in ((), (1,))):
        transposed = ", so it looks transposed" if scale.shape == grid[::-1] else ""
        raise CheckpointError(
            f"{where(scale)} has shape {scale.shape}, expected {grid} for {weight.name!r} of shape {(n, k)} in blocks "
            f"of {block[0]}x{block[1]}{transposed}"
        )


def require_groups(weight: TensorInfo, scale: TensorInfo, group: int) -> None:
    """Checks the shape of scales against that of 4-bit codes, two to a byte: one scale for ``group`` of K."""
    n, half = require_matrix(weight)
    k = 2 * half
    if scale.shape != (grid := (n, -(-k // group))):
        transposed = ", so it looks transposed" if scale.shape == grid[::-1] else ""
        raise CheckpointError(
            f"{where(scale)} has shape {scale.shape}, expected {grid} for {weight.name!r} of {n} rows of {k} 4-bit "
            f"codes in groups of {group}{transposed}"
        )


def read_scale(tensors: Tensors, name: str) -> np.ndarray:
    """A scale tensor, checked and as ``QTensor.scale`` holds it (e8m0 as its bytes).

    Raises:
      CheckpointError: an element that is not finite, not positive, or too small for its reciprocal to be finite: a
        scale that was never set, or divides by zero later on. An e8m0 byte of 0 is 2^-127, the scale of a zero block;
        an e4m3 scale of a zero block, under a global scale, may be 0.
    """
    stored = tensors.read(name)
    least = 0.0 if stored.dtype == ml_dtypes.float8_e4m3fn else _F32_TINY
    if stored.dtype in (np.uint8, ml_dtypes.float8_e8m0fnu):
        stored = stored.view(np.uint8)
        bad = stored == bits.E8M0_NAN
    else:
        values = stored.astype(np.float32)
        bad = ~(np.isfinite(values) & (values >= least))
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.ndim else ()
        value = "NaN (e8m0 byte 255)" if stored.dtype == np.uint8 else f"{float(stored[index]):.9g}"
        at = f" at {list(index)}" if index else ""
        raise CheckpointError(
            f"{where(tensors.tensors[name])} holds the scale {value}{at}, expected finite "
            f"{'positive ' if least else ''}numbers of at least {least:.9g}: it was never set or is damaged"
        )
    return stored


def host_qtensor(
    data: np.ndarray,
    scale: np.ndarray,
    scheme: Scheme,
    input_scheme: Scheme | None,
    *,
    global_scale: np.ndarray | None = None,
) -> QTensor:
    """A QTensor with NumPy leaves, of shapes that the caller has checked against the scheme."""
    parts = (cast(Array, data), cast(Array, scale), cast(Array | None, global_scale))
    return QTensor(*parts, None, scheme, input_scheme)
