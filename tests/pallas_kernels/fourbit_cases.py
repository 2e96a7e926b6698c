"""Four-bit weights for tests: quantized by recipes, as the kernels take them."""

from typing import Any

import jax
import jax.numpy as jnp

import jmoe
from jmoe.qtensor import QTensor
from pallas_kernels.experts import Experts, ExpertsSpec
from pallas_kernels.fourbit.packing import Packed, Packing, pack
from pallas_kernels.tuning.fourbit import Kind, moe_tiles
from tests.pallas_kernels import lanes, moe_cases
from tests.pallas_kernels.moe_cases import Case, Layer

RECIPES = (
    "mxfp4",
    "mxfp4_a8",
    "nvfp4_w4a16",
    "int4",
    "int4:group=32,scale_dtype=bfloat16",
    "int4:group=64,scale_dtype=float16,zero_point",
    "int4:group=256",
    "int4:group=-1,zero_point",
    "int4_fp8:scale_dtype=bfloat16",
    "int4_int8:group=32,zero_point",
)


LONG: dict[str, Any] = {"tokens": 5, "hidden": 1000, "intermediate": 5200, "experts": 4, "top_k": 2}
"""Few experts with much of the second product's K, which goes in shares on a large GPU."""


def packing_of(q: QTensor) -> Packing:
    n, k = q.shape[-2:]
    return Packing(
        codes=q.scheme.format,
        operand="e4m3" if q.scheme.format == "e2m1" and q.input_scheme is not None else "bfloat16",
        scale=q.scheme.scale_dtype,
        group=q.scheme.block[1],
        zero_point=q.scheme.zero_point,
        n=n,
        k=k,
    )


def packed(q: QTensor) -> Packed:
    return pack(q.data, q.scale, q.zero_point, q.global_scale, packing_of(q))


def kind_of(q: QTensor) -> Kind:
    packing = packing_of(q)
    scales_sums = packing.codes == "int4" and packing.group != -1 and q.input_scheme is not None
    return Kind(operand=packing.operand, words=packing.words_a_tile, codes=packing.codes, scales_sums=scales_sums)


def abstract_weight(recipe: str, shape: tuple[int, ...]) -> QTensor:
    """A weight of that recipe as shapes."""
    return jax.eval_shape(lambda w: jmoe.quantize(w, recipe), lanes.spec(shape, jnp.float32))


def of_wide_range(key: jax.Array, shape: tuple[int, ...], exponents: int) -> Any:
    """Normal weights whose groups of 32 columns are scaled by powers of two from 2**-exponents to 1."""
    n, k = shape
    keys = jax.random.split(key)
    power = jax.random.randint(keys[1], (n, -(-k // 32)), -exponents, 1)
    scale = jnp.repeat(jnp.exp2(power.astype(jnp.float32)), 32, axis=1)[:, :k]
    return jax.random.normal(keys[0], shape) * scale


def spec_of(case: Case, layer: Layer, **facts: Any) -> ExpertsSpec:
    """Static facts of a layer with packed weights, with the heuristics' tiles."""
    first, second = packing_of(layer.w13), packing_of(layer.w2)
    sizes = (case.tokens, case.hidden, case.intermediate, case.experts, case.top_k)
    return ExpertsSpec(
        tiles=moe_tiles(
            *sizes, kind=kind_of(layer.w13), halves=1 + case.gated, exact=case.accumulation == "exact", **facts
        ),
        dtype=case.dtype,
        out_dtype=case.dtype,
        activation=moe_cases.activation_of(case),
        input_scheme=moe_cases.input_scheme(layer.w13),
        intermediate_scheme=moe_cases.input_scheme(layer.w2),
        exact=case.accumulation == "exact",
        w13_packing=first,
        w2_packing=second,
    )


def experts_of(layer: Layer, **more: Any) -> Experts:
    """The layer's arrays as the kernels take them."""
    return Experts(w13=packed(layer.w13), w2=packed(layer.w2), b13=layer.b13, b2=layer.b2, **more)
