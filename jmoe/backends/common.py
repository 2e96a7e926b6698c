"""Steps that the reference and the xla implementation share, each a small pure function."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe.backends import activation as act
from jmoe.backends.activation import Activation, ActivationParams
from jmoe.backends.spec import DeviceSpec, OpSpec
from jmoe.qtensor import QTensor, index_leading
from jmoe.quantize import quantize
from jmoe.scheme import Scheme
from pallas_kernels import bits

Weight = Array | QTensor


def has_fp4_activations(op: OpSpec) -> bool:
    """Whether either product takes activations that are rounded to FP4."""
    recipes = (op.recipe, op.second_recipe)
    return any(r is not None and r.input is not None and r.input.format == "e2m1" for r in recipes)


def check_emulation(op: OpSpec, device: DeviceSpec, name: str, *, explicit: bool) -> None:
    """Raises NotImplementedError where a GPU without FP4 matrix units would emulate FP4 activations unasked."""
    if has_fp4_activations(op) and device.platform == "cuda" and not device.has_fp4 and not explicit:
        raise NotImplementedError(
            f"FP4 activations need FP4 matrix units (compute capability 10.0), and {device.name} has none; "
            f"they are emulated where implementation={name!r} asks for that by name"
        )


def at_layer(tree: Any, layer: Array | None) -> Any:
    """The layer's part of leaves with a leading layers axis, or the leaves themselves where ``layer`` is None."""
    return tree if layer is None else index_leading(tree, layer)


def zeros(shape: tuple[int, ...], like: Any) -> Array:
    """float32 zeros that vary over the shard_map axes that any leaf of ``like`` varies over.

    What a loop carries, or a branch returns, must vary over as many axes as what is computed from the arguments.
    """
    axes: set[str] = set()
    for leaf in jax.tree.leaves(like):
        axes |= jax.typeof(leaf).manual_axis_type.varying
    empty = jnp.zeros(shape, jnp.float32)
    return lax.pcast(empty, tuple(sorted(axes)), to="varying") if axes else empty


def values(w: Weight) -> Array:
    """float32 values of a weight or an activation, quantized or not."""
    return w.dequantize() if isinstance(w, QTensor) else w.astype(jnp.float32)


def input_scheme_of(w: Weight) -> Scheme | None:
    """How ``w`` asks for the other operand to be quantised, None for not at all."""
    return w.input_scheme if isinstance(w, QTensor) else None


def quantised(x: Array, scheme: Scheme, scale: Array | None) -> tuple[QTensor, Array | None]:
    """X (M, K) quantised, and float32 (M, 1) that multiplies its values too, or None.

    A row that is not finite becomes NaN, and no other does. Formats without a NaN of their own have it in a scale;
    where rows share that, the factor is NaN instead for such a row, and 1 for the others.

    ``scale`` is float32 () or (M, 1), for static schemes.
    """
    scale = scale if scheme.static else None
    if scheme.block[0] == 1 or scheme.format in ("e4m3", "e5m2"):
        return quantize(x, scheme, scale=scale), None
    finite = jnp.isfinite(x)
    factor = jnp.where(jnp.all(finite, axis=-1, keepdims=True), jnp.float32(1), jnp.float32(jnp.nan))
    return quantize(jnp.where(finite, x, 0), scheme, scale=scale), factor


def quantised_values(x: Array, scheme: Scheme, scale: Array | None) -> Array:
    """float32 values of x (M, K) after it is ``quantised``."""
    q, factor = quantised(x, scheme, scale)
    return q.dequantize() if factor is None else q.dequantize() * factor


def rounded_input(x: Weight, w: Weight, scale: Array | None) -> Array:
    """float32 values of x (M, K) after the quantisation that ``w`` asks for; x may be quantized already.

    ``scale`` is float32 () or (M, 1), for static schemes.
    """
    scheme = input_scheme_of(w)
    if isinstance(x, QTensor) or scheme is None:
        return values(x)
    return quantised_values(x, scheme, scale)


def measures_over_rows(scheme: Scheme | None) -> bool:
    """Whether a scale is measured over several rows, so that the values of one change the codes of others."""
    return scheme is not None and not scheme.static and (scheme.block[0] != 1 or scheme.global_scale == "tensor")


def chosen_rows(x: Array, ids: Array) -> Array:
    """X (T, H) with zeros for tokens without an expert here (ids (T, k) all -1): they may hold anything, even NaN."""
    return jnp.where(jnp.any(ids >= 0, axis=1)[:, None], x, 0)


def local_ids(topk_ids: Array, expert_map: Array | None, experts: int) -> Array:
    """Local expert of each slot, int32 like ``topk_ids``, -1 where there is none (out of range, -1, or not here)."""
    if expert_map is not None:
        known = (topk_ids >= 0) & (topk_ids < expert_map.shape[0])
        # A negative index would wrap to the last expert, so it is clipped first and masked after.
        mapped = jnp.take(expert_map, jnp.where(known, topk_ids, 0), mode="clip").astype(jnp.int32)
        topk_ids = jnp.where(known, mapped, -1)
    return jnp.where((topk_ids >= 0) & (topk_ids < experts), topk_ids, -1)


def per_row(scale: Array | None, ids: Array) -> Array | None:
    """A static scale () or (E,) for rows of experts ``ids`` (S,): () or (S, 1); rows of -1 get expert 0's."""
    if scale is None or scale.ndim == 0:
        return scale
    return jnp.take(scale, jnp.maximum(ids, 0), mode="clip")[:, None]


def params_of(params: ActivationParams | None, expert: Array) -> ActivationParams | None:
    """One expert's activation constants."""
    return None if params is None else index_leading(params, expert)


def activate(activation: Activation, product: Array, params: ActivationParams | None) -> Array:
    """The intermediate (T, I) from the first product (halves, T, I), in float32."""
    if product.shape[0] == 1:
        return act.ungated(activation, product[0])
    return act.gated(activation, product[0], product[1], params)


def weighted_input(x: Weight, topk_weights: Array, ids: Array) -> Array:
    """X times its one router weight, in x's dtype (Llama 4); slots without an expert keep x."""
    assert not isinstance(x, QTensor)  # fused_moe refuses it: the weight comes before quantisation
    weight = jnp.where(ids >= 0, topk_weights, jnp.float32(1))
    return bits.round_to(x.astype(jnp.float32) * weight, x.dtype.name).astype(x.dtype)
