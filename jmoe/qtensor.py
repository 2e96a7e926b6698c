"""``QTensor``: one pytree that holds any quantized array."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from jmoe import numerics
from jmoe.arguments import as_array, check_type, float_dtype
from jmoe.numerics import INT4, INT4_OFFSET
from jmoe.scheme import Scheme
from jmoe.sharding import AxisName, automatic_inside, spec_of
from pallas_kernels import bits
from pallas_kernels.fourbit import packing
from pallas_kernels.layouts import CANONICAL, PACKED_BFLOAT16, PACKED_E4M3, Layout

_OPERANDS: dict[Layout, Literal["bfloat16", "e4m3"]] = {PACKED_BFLOAT16: "bfloat16", PACKED_E4M3: "e4m3"}
"""What kernels make of codes in each packed layout."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # compared and hashed by identity: equality of arrays has no one truth value
class QTensor:
    """A quantized array (..., N, K): codes, scales and how to read them.

    Every leaf has the rank of ``data``; leading axes (layers, experts, halves) are batch axes that all leaves share, so
    ``jax.tree.map(lambda leaf: leaf[i], q)`` is the i-th of them. Values are ``(code - zero_point) * scale *
    global_scale``. Build one with ``QTensor.make``, which validates, or ``jmoe.quantize``. It is no array: ``==`` is
    identity, and NumPy and JAX functions refuse it with a TypeError that names ``dequantize``.

    Attributes:
      data: (..., N, K) float8_e4m3fn, float8_e5m2 or int8; 4-bit codes are uint8 (..., N, ceil(K/2)), low nibble first.
      scale: (..., ceil(N/bn), ceil(K/bk)), extent 1 where the block is -1; float32, bfloat16, float16, float8_e4m3fn or
        uint8 (e8m0). It multiplies.
      global_scale: float32 (..., 1 or N, 1) or None. It multiplies.
      zero_point: shape of ``scale``, uint8 for 4-bit codes, int8 for 8-bit ones, or None.
      scheme: how the array is quantized.
      input_scheme: how operations quantise the other operand; None is weight-only.
      layout: CANONICAL, which the shapes and dtypes above are of, or a kernel's own packing; see ``in_layout``.
      odd_k: K is odd, so the last nibble of each row of a 4-bit array is padding.
    """

    data: Array
    scale: Array
    global_scale: Array | None
    zero_point: Array | None
    scheme: Scheme = field(metadata={"static": True})
    input_scheme: Scheme | None = field(metadata={"static": True}, default=None)
    layout: Layout = field(metadata={"static": True}, default=CANONICAL)
    odd_k: bool = field(metadata={"static": True}, default=False)

    @classmethod
    @automatic_inside(lambda q, _, data, *__, **___: part_specs(q, spec_of(data)))
    def make(
        cls,
        data: Array,
        scale: Array,
        *,
        scheme: Scheme,
        global_scale: Array | None = None,
        zero_point: Array | None = None,
        input_scheme: Scheme | None = None,
        k: int | None = None,
    ) -> "QTensor":
        """A validated QTensor in the canonical layout.

        Args:
          data: codes as described above; float4_e2m1fn and int4 arrays (..., N, K) are packed here.
          scale: scales as described above; a float8_e8m0fnu array is taken as its bytes.
          scheme: how to read them.
          global_scale: float32 (..., 1 or N, 1), exactly where ``scheme.global_scale`` asks for it.
          zero_point: exactly where ``scheme.zero_point`` asks for it.
          input_scheme: how operations quantise the other operand.
          k: K, needed only for packed 4-bit data whose K is odd.

        Raises:
          TypeError: a dtype that the scheme does not have, or an argument of another kind.
          ValueError: a shape that does not fit the scheme, or a part missing or too many.
        """
        check_type("scheme", scheme, Scheme, "a Scheme; a recipe has one as its weight")
        _check_input_scheme(input_scheme)
        check_type("k", k, (int, type(None)), "an int or None")
        data, scale = as_array("data", data), as_array("scale", scale)
        global_scale = None if global_scale is None else as_array("global_scale", global_scale)
        zero_point = None if zero_point is None else as_array("zero_point", zero_point)
        if data.ndim < 2:
            raise ValueError(f"data has shape {data.shape}, but a quantized array has at least two axes (..., N, K)")
        data, k = _as_storage(data, scheme, k)
        scale = _scale_as_storage(scale, scheme)
        batch, n = data.shape[:-2], data.shape[-2]
        grid = (*batch, *scale_grid((n, k), scheme.block))
        if scale.shape != grid:
            raise ValueError(
                f"scale has shape {scale.shape}, but data of logical shape {(*batch, n, k)} in blocks of "
                f"{scheme.block} has scales of shape {grid}"
            )
        _validate_parts(scheme, grid, (batch, n), global_scale, zero_point)
        odd_k = scheme.fmt.bits == 4 and k % 2 == 1
        return cls(data, scale, global_scale, zero_point, scheme, input_scheme, CANONICAL, odd_k)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., N, K)."""
        if self.layout.n:
            return (*self.data.shape[:-2], self.layout.n, self.layout.k)
        *batch, k = self.data.shape
        return (*batch, 2 * k - self.odd_k) if self.scheme.fmt.bits == 4 else (*batch, k)

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def dtype(self) -> Any:
        """The dtype of one code; that of the stored array is ``data.dtype``."""
        return jnp.dtype(self.scheme.fmt.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    @automatic_inside(lambda _, q: PartitionSpec(*spec_of(q.data)))
    def codes(self) -> Array:
        """The codes as the format's own dtype: float8_*, int8, float4_e2m1fn, or int4 (uint8 with a zero point)."""
        canonical = self.in_layout(CANONICAL)
        raw = numerics.unpack(canonical.data, self.scheme.fmt, self.shape[-1])
        if self.scheme.format == "e2m1":
            return bits.e2m1_decode(raw).astype(jnp.float4_e2m1fn)
        if self.scheme.format == "int4" and self.zero_point is None:
            return (raw.astype(jnp.int8) - jnp.int8(INT4_OFFSET)).astype(jnp.int4)
        return raw

    @property
    def scales(self) -> Array:
        """The scales as the dtype that they are; bytes of e8m0 become float8_e8m0fnu."""
        scale = self.in_layout(CANONICAL).scale
        return lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu) if scale.dtype == jnp.uint8 else scale

    @automatic_inside(lambda _, q: PartitionSpec(*spec_of(q.scale)))
    def combined_scale(self) -> Array:
        """float32 scale * global_scale on the scale grid (rows where the global scale has them), rounded once."""
        scale = numerics.decode_scale(self.in_layout(CANONICAL).scale)
        if self.global_scale is None:
            return scale
        if self.global_scale.shape[-2] != 1:
            scale = expand_axis(scale, -2, self.scheme.block[0], self.shape[-2])
        return scale * self.global_scale

    @automatic_inside(lambda _, q, *__, **___: PartitionSpec(*spec_of(q.data)))
    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> Array:
        """The values (..., N, K), computed in float32 and cast once to a floating point dtype."""
        dtype = float_dtype("dtype", dtype)
        if self.layout != CANONICAL:
            return self.in_layout(CANONICAL).dequantize(dtype)
        n, k = self.shape[-2:]
        values = numerics.decode(numerics.unpack(self.data, self.scheme.fmt, k), self.scheme.fmt)
        if self.zero_point is not None:
            values = values - expand(self.zero_point.astype(jnp.float32), self.scheme.block, (n, k))
        elif self.scheme.format == "int4":
            values = values - INT4_OFFSET
        return (values * expand(self.combined_scale(), self.scheme.block, (n, k))).astype(dtype)

    def in_layout(self, layout: Layout) -> "QTensor":
        """The same tensor arranged so: bits change places, and come back in the canonical layout.

        Raises:
          ValueError: there is no way from the one layout to the other for such a tensor.
        """
        if layout.kind == self.layout.kind:
            return self
        if self.layout != CANONICAL:
            return _unpacked(self, packing_of(self.scheme, self.layout, self.shape)).in_layout(layout)
        return _packed(self, layout.kind, packing_of(self.scheme, layout, self.shape))

    def with_input_scheme(self, input_scheme: Scheme | None) -> "QTensor":
        """The same tensor, for operations that quantise the other operand so (None: not at all)."""
        _check_input_scheme(input_scheme)
        return replace(self, input_scheme=input_scheme)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        """Refuses what NumPy would otherwise make an array of objects.

        Raises:
          TypeError: always.
        """
        raise TypeError(f"{self!r} is no array; its values are those of .dequantize(), its codes those of .codes")

    __jax_array__ = __array__

    def __repr__(self) -> str:
        if len(getattr(self.data, "shape", ())) >= 2:
            parts = [f"shape={self.shape}"]
        else:  # a tree of shardings, axes or the like in a QTensor's form
            leaves = [(f.name, getattr(self, f.name)) for f in fields(self) if not f.metadata.get("static")]
            parts = [f"{name}={leaf!r}" for name, leaf in leaves if leaf is not None]
        parts.append(self.scheme.describe())
        parts.append(f"input {self.input_scheme.describe()}" if self.input_scheme else "weight-only")
        return f"QTensor({', '.join(parts)})"


def packing_of(scheme: Scheme, layout: Layout, shape: tuple[int, ...]) -> packing.Packing:
    """How a weight (..., N, K) of such a scheme is packed in a layout.

    Raises:
      ValueError: it is not.
    """
    operand = _OPERANDS.get(layout.kind)
    rows, group = scheme.block
    of_e2m1 = {"e8m0": group == 32, "e4m3": group == 16 and operand == "bfloat16"}.get(scheme.scale_dtype, False)
    of_int4 = operand == "bfloat16" and packing.supports_group(group)
    if operand is None or rows != 1 or not {"e2m1": of_e2m1, "int4": of_int4}.get(scheme.format, False):
        raise ValueError(f"layout={layout.name!r}: there is no way from or to it for {scheme.describe()}")
    return packing.Packing(
        codes="int4" if scheme.format == "int4" else "e2m1",
        operand=operand,
        scale=scheme.scale_dtype,
        group=group,
        zero_point=scheme.zero_point,
        n=shape[-2],
        k=shape[-1],
    )


@jax.jit
def rows_beyond(q: QTensor) -> Array:
    """Which rows of MXFP4 weights have exponents that FP8 products take in by several passes over K, bool (..., N).

    Those whose groups other than zero span more than 12 consecutive ones.
    """
    q = q.in_layout(CANONICAL)
    return packing.rows_beyond(numerics.unpack(q.data, q.scheme.fmt, q.shape[-1]), q.scale)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _packed(q: QTensor, layout: Layout, how: packing.Packing) -> QTensor:
    data, scale, zero_point, global_scale = packing.pack(q.data, q.scale, q.zero_point, q.global_scale, how)
    layout = replace(layout, n=how.n, k=how.k)
    return replace(q, data=data, scale=scale, zero_point=zero_point, global_scale=global_scale, layout=layout)


@functools.partial(jax.jit, static_argnums=1)
def _unpacked(q: QTensor, how: packing.Packing) -> QTensor:
    parts = packing.Packed(q.data, q.scale, q.zero_point, q.global_scale)
    data, scale, zero_point = packing.unpack(parts, how)
    return replace(q, data=data, scale=scale, zero_point=zero_point, layout=CANONICAL)


def part_specs(q: QTensor, spec: tuple[AxisName, ...]) -> QTensor:
    """How the arrays of ``q`` are sharded where its elements are by ``spec``, one entry an axis: a PartitionSpec each.

    Scales are sharded with their blocks, unless the last block is ragged, or one scale is for all.
    """
    *batch, rows, columns = spec
    if q.layout != CANONICAL:
        if rows is not None or columns is not None:
            raise ValueError(
                f"layout={q.layout.name!r}: rows and columns are not split over devices; q.in_layout(CANONICAL) can be"
            )
        return jax.tree.map(lambda leaf: PartitionSpec(*batch, None, None), q)
    n, k = q.shape[-2:]

    def part(leaf: Array, block: tuple[int, int]) -> PartitionSpec:
        cells = leaf.shape[-2:]
        names = (
            name if cell * size == extent else None
            for name, cell, size, extent in zip((rows, columns), cells, block, (n, k), strict=True)
        )
        return PartitionSpec(*batch, *names)

    blocks = {
        "data": (1, 2 if q.scheme.fmt.bits == 4 else 1),
        "scale": q.scheme.block,
        "global_scale": (1, 1),
        "zero_point": q.scheme.block,
    }
    given = {name: getattr(q, name) for name in blocks}
    parts: dict[str, Any] = {name: None if leaf is None else part(leaf, blocks[name]) for name, leaf in given.items()}
    return replace(q, **parts)


def grid_axes(
    q: QTensor, part: str, axes: Sequence[AxisName], devices: Callable[[AxisName], int]
) -> tuple[AxisName, ...]:
    """The mesh axes of the grid ``part`` ("scale", "global_scale" or "zero_point") of a tensor sharded over ``axes``.

    Those of the tensor, except where a device's shard of it would not have whole blocks of its own: there every device
    has all of the grid.

    Args:
      q: the tensor (possibly abstract).
      part: which of its arrays.
      axes: an entry for each of its axes.
      devices: how many devices there are along an entry.
    """
    block = (1, -1) if part == "global_scale" else q.scheme.block
    grid = getattr(q, part).shape
    names = list(axes)
    for axis in (-2, -1):
        extent = q.shape[axis]
        whole = block[axis] not in (-1, 0) and extent % block[axis] == 0
        if grid[axis] == 1 or not whole or grid[axis] % devices(axes[axis]):
            names[axis] = None
    return tuple(names)


def scale_grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """The shape of the grid of scales of an (N, K) array in such blocks; extent 1 where the block is -1."""
    rows, cols = (1 if b == -1 else -(-extent // b) for extent, b in zip(shape, block, strict=True))
    return rows, cols


def expand_axis(x: Array, axis: int, block: int, size: int) -> Array:
    """Repeats each entry of a scale grid over its block along ``axis``, to extent ``size``; extent 1 stays 1."""
    if block == 1 or x.shape[axis] == 1:
        return x
    return lax.slice_in_dim(jnp.repeat(x, block, axis=axis), 0, size, axis=axis % x.ndim)


def expand(scale: Array, block: tuple[int, int], shape: tuple[int, int]) -> Array:
    """A scale grid (..., gn, gk) repeated over its blocks, broadcastable against (..., N, K).

    An axis whose rows are already spelled out (extent N) is left alone.
    """
    n, k = shape
    if scale.shape[-2] != n:
        scale = expand_axis(scale, -2, block[0], n)
    return expand_axis(scale, -1, block[1], k)


def index_leading(tree: Any, index: Array | int) -> Any:
    """The ``index``-th entry of the leading axis of every leaf, sliced in place (no copy of the rest)."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), tree)


def _check_input_scheme(input_scheme: Any) -> None:
    check_type("input_scheme", input_scheme, (Scheme, type(None)), "a Scheme or None; a recipe has one as its input")


def _as_storage(data: Array, scheme: Scheme, k: int | None) -> tuple[Array, int]:
    """Codes in the storage dtype, and K."""
    fmt = scheme.fmt
    nibbles = None
    if data.dtype == jnp.float4_e2m1fn and scheme.format == "e2m1":
        nibbles = bits.e2m1_encode(data.astype(jnp.float32))
    elif data.dtype == jnp.int4 and fmt is INT4 and not scheme.zero_point:
        nibbles = (data.astype(jnp.int8) + INT4_OFFSET).astype(jnp.uint8)
    elif data.dtype != fmt.storage:
        raise TypeError(
            f"data has dtype {data.dtype}, but {scheme.format} codes are {jnp.dtype(fmt.storage).name}"
            + (", two to a byte" if fmt.bits == 4 else "")
            + (", or an int4 array" if fmt is INT4 and not scheme.zero_point else "")
            + (", or a float4_e2m1fn array" if scheme.format == "e2m1" else "")
        )
    elif fmt.bits == 4:
        k = 2 * data.shape[-1] if k is None else k
        if k < 0 or -(-k // 2) != data.shape[-1]:
            raise ValueError(f"k={k} does not fit rows of {data.shape[-1]} bytes of two 4-bit codes")
        return data, k
    if k is not None and k != data.shape[-1]:
        raise ValueError(f"k={k} but data has rows of {data.shape[-1]}")
    return (data if nibbles is None else bits.pack_nibbles(nibbles)), data.shape[-1]


def _scale_as_storage(scale: Array, scheme: Scheme) -> Array:
    if scheme.scale_dtype == "e8m0" and scale.dtype == jnp.float8_e8m0fnu:
        return lax.bitcast_convert_type(scale, jnp.uint8)
    expected = numerics.SCALE_DTYPES[scheme.scale_dtype]
    if scale.dtype != expected:
        raise TypeError(
            f"scale has dtype {scale.dtype}, but this scheme's scales are {scheme.scale_dtype} "
            f"({jnp.dtype(expected).name})"
        )
    return scale


def _validate_parts(
    scheme: Scheme,
    grid: tuple[int, ...],
    extents: tuple[tuple[int, ...], int],
    global_scale: Array | None,
    zero_point: Array | None,
) -> None:
    batch, n = extents
    if (global_scale is not None) != (scheme.global_scale is not None):
        state = "missing" if global_scale is None else "given"
        raise ValueError(f"global_scale is {state}, but the scheme has global_scale={scheme.global_scale!r}")
    if global_scale is not None:
        if global_scale.dtype != jnp.float32:
            raise TypeError(f"global_scale has dtype {global_scale.dtype}, but it is float32")
        if global_scale.shape not in ((*batch, 1, 1), (*batch, n, 1)):
            raise ValueError(
                f"global_scale has shape {global_scale.shape}, but it is {(*batch, 1, 1)} or {(*batch, n, 1)} here"
            )
    if (zero_point is not None) != scheme.zero_point:
        state = "missing" if zero_point is None else "given"
        raise ValueError(f"zero_point is {state}, but the scheme has zero_point={scheme.zero_point}")
    if zero_point is not None:
        expected = jnp.uint8 if scheme.fmt.bits == 4 else jnp.int8
        if zero_point.dtype != expected:
            raise TypeError(f"zero_point has dtype {zero_point.dtype}, but it is {jnp.dtype(expected).name} here")
        if zero_point.shape != grid:
            raise ValueError(f"zero_point has shape {zero_point.shape}, but it has the scale's shape {grid}")
