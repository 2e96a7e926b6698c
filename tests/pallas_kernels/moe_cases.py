"""Layers of experts for tests: random weights quantized by recipes, as the kernels take them and as jmoe does."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmoe
from jmoe.qtensor import QTensor
from jmoe.scheme import Scheme
from pallas_kernels.activation import Activation
from pallas_kernels.experts import Experts, ExpertsSpec, InputScheme
from pallas_kernels.grouped import scale_cell
from pallas_kernels.moe import fused_moe
from pallas_kernels.tuning.moe_heuristics import MoETiles, moe_tiles

BARS = {"float32": 1e-5, "16bit": 5e-3, "exact": 8e-3, "fast": 2e-2, "one scale": 2.5e-2}
"""Largest relative errors to the reference: of float32, of a 16-bit intermediate, and of FP8 ones.

Where all of the intermediate has one measured scale, a rounding of its largest value moves codes everywhere.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer's shape and how it is quantized; names as in ``jmoe.fused_moe``."""

    recipe: str = "bf16"
    tokens: int = 5
    hidden: int = 64
    intermediate: int = 48
    experts: int = 4
    top_k: int = 2
    gated: bool = True
    activation: Any = "silu"
    dtype: str = "bfloat16"
    bias: bool = False
    exact: bool | None = None

    @property
    def accumulation(self) -> str:
        """As a jmoe call names it; by default exact for scales inside the loop, else fast."""
        exact = "block" in self.recipe or self.recipe == "mxfp8" if self.exact is None else self.exact
        return "exact" if exact else "fast"

    @property
    def bar(self) -> float:
        if self.dtype == "float32":
            return BARS["float32"]
        if self.recipe == "fp8_tensor" and self.accumulation == "fast":
            return BARS["one scale"]
        fine = self.recipe == "bf16" or "a16" in self.recipe or "int8" in self.recipe
        return BARS["16bit" if fine else self.accumulation]


class Layer(NamedTuple):
    """Weights as jmoe takes them."""

    w13: QTensor | jax.Array
    w2: QTensor | jax.Array
    b13: jax.Array | None
    b2: jax.Array | None


def layer(case: Case, seed: int | jax.Array = 0) -> Layer:
    """Normal weights that keep the result near 1; ``seed`` may be a key."""
    keys = jax.random.split(jax.random.key(seed) if isinstance(seed, int) else seed, 4)
    halves = 1 + case.gated
    e, i, h = case.experts, case.intermediate, case.hidden
    w13 = jax.random.normal(keys[0], (e, halves, i, h), jnp.float32) * h**-0.5
    w2 = jax.random.normal(keys[1], (e, h, i), jnp.float32) * i**-0.5
    b13 = b2 = None
    if case.bias:
        b13 = jax.random.normal(keys[2], (e, halves, i), jnp.float32)
        b2 = jax.random.normal(keys[3], (e, h), jnp.float32)
    if case.recipe == "bf16":
        return Layer(w13.astype(case.dtype), w2.astype(case.dtype), b13, b2)
    return Layer(jmoe.quantize(w13, case.recipe), jmoe.quantize(w2, case.recipe), b13, b2)


def tokens(case: Case, seed: int | jax.Array = 0) -> tuple[jax.Array, jax.Array]:
    """x (T, H) and router weights (T, k)."""
    keys = jax.random.split(jax.random.key(1000 + seed) if isinstance(seed, int) else jax.random.fold_in(seed, 1), 2)
    x = jax.random.normal(keys[0], (case.tokens, case.hidden), case.dtype)
    return x, jax.random.uniform(keys[1], (case.tokens, case.top_k), jnp.float32, 0.2, 1.0)


ROUTINGS = ("uniform", "zipf", "hot", "one expert", "empty experts", "elsewhere", "padding", "duplicates")


def routing(name: str, case: Case, seed: int = 0) -> np.ndarray:
    """Expert ids (T, k), int32, of that kind.

    uniform: a token's are distinct. zipf: skewed. hot: every token's first is the last expert. one expert: all slots.
    empty experts: only even ones. elsewhere: some on either side of the range, -1 among them. padding: the last third
    of the tokens have none. duplicates: a token's may be equal.
    """
    rng = np.random.default_rng(seed)
    shape, e = (case.tokens, case.top_k), case.experts
    distinct = np.argsort(rng.random((case.tokens, max(e, case.top_k))), axis=1)[:, : case.top_k] % e
    kinds = {
        "uniform": distinct,
        "zipf": np.minimum(rng.zipf(1.3, shape) - 1, e - 1),
        "hot": np.where(np.arange(case.top_k) == 0, e - 1, distinct),
        "one expert": np.full(shape, e // 2),
        "empty experts": distinct // 2 * 2,
        "elsewhere": rng.integers(-2, e + 2, shape),
        "padding": np.where(np.arange(case.tokens)[:, None] < case.tokens - case.tokens // 3, distinct, -1),
        "duplicates": rng.integers(0, e, shape),
    }
    return kinds[name].astype(np.int32)


def spoiled(case: Case, x: jax.Array, weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x and weights with what nothing reads: 1e4, inf and NaN in tokens without an expert, NaN in slots without one."""
    here = (ids >= 0) & (ids < case.experts)
    anything = jnp.resize(jnp.array([1e4, jnp.inf, jnp.nan], x.dtype), x.shape)
    return jnp.where(here.any(1, keepdims=True), x, anything), jnp.where(here, weights, jnp.nan)


def activation_of(case: Case) -> Activation:
    known = jmoe.backends.activation.as_activation(case.activation)
    return Activation(**{f.name: getattr(known, f.name) for f in dataclasses.fields(known)})


def input_scheme(w: QTensor | jax.Array) -> InputScheme | None:
    scheme: Scheme | None = w.input_scheme if isinstance(w, QTensor) else None
    if scheme is None:
        return None
    if scheme.static:
        return InputScheme(scale="static")
    kind = {(-1, -1): "tensor", (1, -1): "token"}.get(scheme.block, "group")
    group = max(scheme.block[1], 1)
    return InputScheme(scale=kind, group=group, power_of_two=scheme.power_of_two, format=scheme.format)


def arrays(layer: Layer, /, **more: Any) -> Experts:
    """The layer's arrays as the kernels take them."""
    parts = {}
    for name in ("w13", "w2"):
        w = getattr(layer, name)
        quantized = isinstance(w, QTensor)
        parts |= {name: w.data if quantized else w, f"{name}_scale": w.scale if quantized else None}
    return Experts(b13=layer.b13, b2=layer.b2, **parts, **more)


def block_of(w: QTensor | jax.Array) -> tuple[int, int]:
    return w.scheme.block if isinstance(w, QTensor) else (-1, -1)


def tiles_of(case: Case, layer: Layer, **options: Any) -> MoETiles:
    """What the heuristic chooses."""
    first, second = input_scheme(layer.w13), input_scheme(layer.w2)
    group = second.group if second is not None and second.scale == "group" else None
    operands = "16bit" if case.dtype != "float32" else "32bit"
    if isinstance(layer.w13, QTensor):
        operands = "w8a16" if case.dtype != "float32" else "32bit"
        if first is not None:
            operands = "int8" if first.format == "int8" else "fp8"
    return moe_tiles(
        case.tokens,
        case.hidden,
        case.intermediate,
        case.experts,
        case.top_k,
        operands=operands,
        halves=1 + case.gated,
        first_cell=scale_cell(block_of(layer.w13), -1 if first is None else first.x_group),
        second_cell=scale_cell(block_of(layer.w2), -1 if second is None else second.x_group),
        group=group,
        exact=case.accumulation == "exact",
        **options,
    )


def spec_of(case: Case, layer: Layer, tiles: MoETiles) -> ExpertsSpec:
    return ExpertsSpec(
        tiles=tiles,
        dtype=case.dtype,
        out_dtype=case.dtype,
        activation=activation_of(case),
        w13_block=block_of(layer.w13),
        w2_block=block_of(layer.w2),
        input_scheme=input_scheme(layer.w13),
        intermediate_scheme=input_scheme(layer.w2),
        exact=case.accumulation == "exact",
    )


def options_of(case: Case, layer: Layer) -> dict[str, Any]:
    """Keywords of ``jmoe.fused_moe`` that make the same layer."""
    return {"activation": case.activation, "b13": layer.b13, "b2": layer.b2, "accumulation": case.accumulation}


def relative_error(found: Any, wanted: Any) -> float:
    """Frobenius; NaN if anything is."""
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-30))


LAYERS = {
    "dsv3": {"hidden": 7168, "intermediate": 2048, "experts": 256, "top_k": 8},
    "dsv3-tp8": {"hidden": 7168, "intermediate": 256, "experts": 256, "top_k": 8},
    "qwen3-30b": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "mixtral": {"hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2},
    "gpt-oss": {"hidden": 2880, "intermediate": 2880, "experts": 128, "top_k": 4},
}
"""Sizes of layers that models have."""


def abstract(case: Case, layers: int = 2, **options: Any) -> tuple[Any, list[jax.ShapeDtypeStruct], ExpertsSpec]:
    """fused_moe as a function of flat arrays, these as shapes, and the spec: one of so many stacked layers."""
    shapes = jax.eval_shape(lambda: layer(case))
    spec = spec_of(case, shapes, tiles_of(case, shapes, **options))
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((layers, *s.shape), s.dtype), arrays(shapes))
    experts = stacked._replace(layer=jax.ShapeDtypeStruct((), jnp.int32))
    x, weights = jax.eval_shape(lambda: tokens(case))
    ids = jax.ShapeDtypeStruct(weights.shape, jnp.int32)
    flat, tree = jax.tree.flatten((x, experts, weights, ids))

    def call(*flat: jax.Array) -> jax.Array:
        x, experts, weights, ids = jax.tree.unflatten(tree, flat)
        return fused_moe(x, experts, weights, ids, spec=spec)

    return call, flat, spec
