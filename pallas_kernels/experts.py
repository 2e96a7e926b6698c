"""A layer of experts as arrays and static facts, checked, and its weights as the grouped products take them."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import bits, body
from pallas_kernels.activation import SILU, Activation, ActivationParams
from pallas_kernels.fourbit.packing import Packed, Packing
from pallas_kernels.grouped import WHOLE, Weights, scale_cell
from pallas_kernels.tuning.moe_heuristics import MoETiles

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputScheme:
    """How a product's left operand is quantised.

    Attributes:
      scale: one a "group" of columns, a "token", or the "tensor", measured; or, for e4m3, "static", given.
      group: columns of a group.
      power_of_two: measured scales are powers of two.
      format: of the codes.
    """

    scale: Literal["group", "token", "tensor", "static"]
    group: int = 128
    power_of_two: bool = False
    format: Literal["e4m3", "int8"] = "e4m3"

    @property
    def codes(self) -> Any:
        """Dtype of the codes."""
        return jnp.int8 if self.format == "int8" else body.F8

    @property
    def x_group(self) -> int:
        """As ``grouped.Product`` takes it."""
        return self.group if self.scale == "group" else WHOLE


class Experts(NamedTuple):
    """Arrays of a layer of experts.

    Attributes:
      w13: (E, halves, I, H), half 0 gate and half 1 up, or the only one: bfloat16, float16, float32, or codes,
        float8_e4m3fn or int8.
        Four-bit ones are packed as ``ExpertsSpec`` says, scales and all, with (E, halves) in front.
      w2: (E, H, I), likewise.
      w13_scale, w2_scale: of codes, (E, halves, ceil(I/rows), ceil(H/cols)) and (E, ceil(H/rows), ceil(I/cols))
        of the blocks that ``ExpertsSpec`` names; float32, bfloat16, float16 or uint8 (e8m0). They multiply.
      b13, b2: (E, halves, I) and (E, H), any float dtype.
      input_scale, intermediate_scale: float32 () or (E,), of static schemes.
      activation_params: float32 () or (E,) each, instead of the activation's own constants.
      layer: int32 (). With it every array of weights, scales and biases has one more leading axis, which the kernels
        index themselves: nothing is copied.
    """

    w13: Array | Packed
    w2: Array | Packed
    w13_scale: Array | None = None
    w2_scale: Array | None = None
    b13: Array | None = None
    b2: Array | None = None
    input_scale: Array | None = None
    intermediate_scale: Array | None = None
    activation_params: ActivationParams = ActivationParams()
    layer: Array | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Static facts of a layer of experts.

    Attributes:
      tiles: see ``tuning.moe_heuristics.moe_tiles``.
      dtype: of x before it is quantised; what the intermediate is rounded to and slot results are held in.
      out_dtype: of the result.
      activation: between the products.
      w13_block, w2_block: (rows, cols) that share a scale, -1 for a whole axis.
      input_scheme, intermediate_scheme: how x and the intermediate are quantised, to the weight's format; None for not
        at all, and then weights are decoded, e4m3 by bits, without float8 types in a kernel.
      exact: FP8 sums are promoted to float32 at least every 128 of K instead of left to the tensor core.
      w13_packing, w2_packing: of packed weights.
      expands: packed weights, which fold, are expanded to e4m3 codes before their product; ``tiles`` are of these.
    """

    tiles: MoETiles
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    activation: Activation = SILU
    w13_block: tuple[int, int] = (WHOLE, WHOLE)
    w2_block: tuple[int, int] = (WHOLE, WHOLE)
    input_scheme: InputScheme | None = None
    intermediate_scheme: InputScheme | None = None
    exact: bool = True
    w13_packing: Packing | None = None
    w2_packing: Packing | None = None
    expands: bool = False


class Sizes(NamedTuple):
    """E, halves of w13, I and H."""

    experts: int
    halves: int
    intermediate: int
    hidden: int


def checked(experts: Experts, spec: ExpertsSpec) -> Sizes:
    """The layer's sizes, if its arrays fit together.

    Raises:
      ValueError, TypeError: they do not; the message names the array and what would be right.
    """
    lead = 0 if experts.layer is None else 1
    w13 = _shape("w13", experts.w13, spec.w13_packing)
    if len(w13) != 4 + lead or w13[-3] not in (1, 2) or not all(w13):
        raise ValueError(f"w13 has shape {w13}, but it is {'(L, E' if lead else '(E'}, 1 or 2, I, H), none of it 0")
    sizes = Sizes(*w13[lead:])
    e, halves, i, h = sizes
    layers = w13[:lead]
    found = {"w2": _shape("w2", experts.w2, spec.w2_packing)}
    found |= {name: array.shape for name in ("b13", "b2") if (array := getattr(experts, name)) is not None}
    shapes = {"w2": (e, h, i), "b13": (e, halves, i), "b2": (e, h)}
    for name, shape in found.items():
        if shape != layers + shapes[name]:
            raise ValueError(f"{name} has shape {shape}, but w13 {w13} goes with {layers + shapes[name]}")
    for name, block, scheme in (
        ("w13", spec.w13_block, spec.input_scheme),
        ("w2", spec.w2_block, spec.intermediate_scheme),
    ):
        w = getattr(experts, name)
        if not isinstance(w, Packed):
            _check_weight(name, w, getattr(experts, f"{name}_scale"), block, scheme)
    for name, scheme in (("input_scheme", spec.input_scheme), ("intermediate_scheme", spec.intermediate_scheme)):
        if scheme is not None and scheme.format == "int8" and scheme.scale == "static":
            raise ValueError(f"{name}={scheme}: scales of int8 codes are measured")
    _check_split(spec)
    tensor = spec.intermediate_scheme is None or spec.intermediate_scheme.scale == "tensor"
    if spec.expands and not (spec.w13_packing and spec.w2_packing and not tensor):
        raise ValueError("weights to expand are packed, and the intermediate's scales are of tokens or given")
    for name, scheme in (("input_scale", spec.input_scheme), ("intermediate_scale", spec.intermediate_scheme)):
        scale = getattr(experts, name)
        if (scheme is not None and scheme.scale == "static") != (scale is not None):
            raise ValueError(f"{name} is {'missing' if scale is None else 'given'}, but its scheme is {scheme}")
        if scale is not None and scale.shape not in ((), (1,), (e,)):
            raise ValueError(f"{name} has shape {scale.shape}, but it is () or (E,) = ({e},)")
    return sizes


def _check_split(spec: ExpertsSpec) -> None:
    first, second = spec.tiles.first, spec.tiles.second
    if first.split_k != 1:
        raise ValueError(f"the first product's tile {first} splits K, but activations are of whole sums")
    if second.split_k != 1 and (spec.tiles.single or spec.expands or second.run != 1):
        raise ValueError(
            f"the second product's tile {second} splits K of a run of tiles, single slots or expanded weights"
        )


def _shape(name: str, w: Array | Packed, packing: Packing | None) -> tuple[int, ...]:
    """The logical shape of a weight."""
    if not isinstance(w, Packed):
        return w.shape
    if packing is None:
        raise ValueError(f"{name} is packed, but its packing is not said")
    return (*w.data.shape[:-2], packing.n, packing.k)


def _check_weight(name: str, w: Array, scale: Array | None, block: tuple[int, int], scheme: InputScheme | None) -> None:
    if w.dtype not in (*_FLOATS, *body.CODES):
        raise TypeError(f"{name} is {w.dtype}, but weights are float8_e4m3fn, int8, bfloat16, float16 or float32")
    if scheme is not None and w.dtype != scheme.codes:
        raise TypeError(f"{name} is {w.dtype}, but {scheme.format} activations go with {scheme.format} weights")
    int32 = scheme is not None and scheme.format == "int8" and scale_cell(block, scheme.x_group) is None
    if int32 and w.shape[-1] > bits.INT32_PRODUCTS:
        raise ValueError(
            f"{name} has shape {w.shape}, but sums of int8 products are sure to fit int32 only up to K = "
            f"{bits.INT32_PRODUCTS}"
        )
    grid = tuple(1 if b == WHOLE else pl.cdiv(n, b) for n, b in zip(w.shape[-2:], block, strict=True))
    wanted = (*w.shape[:-2], *grid) if w.dtype in body.CODES else None
    shape = None if scale is None else scale.shape
    if shape != wanted:
        raise ValueError(
            f"{name}_scale has shape {shape}, but {name} {w.dtype} {w.shape} in blocks {block} has {wanted}"
        )


def weights_of(experts: Experts, spec: ExpertsSpec) -> tuple[Weights, Weights]:
    """w13 and w2 with an axis of layers and one of halves; e4m3 as bytes where it meets plain activations."""
    stacked = experts.layer is not None
    layer = None if experts.layer is None else experts.layer.astype(jnp.int32).reshape(1)

    def weights(name: str, bias: Array | None, scheme: InputScheme | None, *, halves: bool) -> Weights:
        w = getattr(experts, name)
        scale = getattr(experts, f"{name}_scale")
        zero_point = global_scale = None
        if isinstance(w, Packed):
            w, scale, zero_point, global_scale = w
        elif w.dtype == body.F8 and scheme is None:
            w = lax.bitcast_convert_type(w, jnp.uint8)

        def with_axes(a: Array) -> Array:
            a = a if stacked else a[None]
            return a if halves else jnp.expand_dims(a, 2)

        data, scale, bias, zero_point, global_scale = jax.tree.map(
            with_axes, (w, scale, bias, zero_point, global_scale)
        )
        return Weights(data, scale, bias, layer, zero_point, global_scale)

    w13 = weights("w13", experts.b13, spec.input_scheme, halves=True)
    return w13, weights("w2", experts.b2, spec.intermediate_scheme, halves=False)
