"""How a validated operation reaches its implementation: selection, jit, derivatives.

Derivatives are those of the weight-only operation: quantising an activation counts as the identity (straight-through)
and quantized weights get none. They are written once, as a forward rule that JAX also transposes, so forward and
reverse mode both work; everything the backward pass needs is computed again from the inputs, so no intermediate and no
dequantised weight is kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import checkify

from jmoe.backends.select import IMPLEMENTATIONS, select
from jmoe.backends.spec import Accumulation, BatchedArgs, LinearArgs, MoEArgs, OpSpec, Selection
from jmoe.config import config
from jmoe.qtensor import QTensor
from jmoe.quantize import check_static_scale
from jmoe.scheme import Recipe, Scheme, as_recipe, recipe_of

Args = LinearArgs | MoEArgs | BatchedArgs

_FUNCTIONS = {"linear": "linear", "moe": "fused_moe", "batched_experts": "batched_experts"}


def call(op: OpSpec, args: Args, implementation: str | None) -> Array:
    """Selects, records the choice for ``explain``, and runs."""
    selection = select(op, implementation=implementation)
    if config.recorder is not None:
        config.recorder.add(op, selection)
    return _call(op, selection, args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(op: OpSpec, selection: Selection, args: Args) -> Array:
    return _differentiable(op, selection, args)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(op: OpSpec, selection: Selection, args: Args) -> Array:
    return _run(op, selection, args)


def _run(op: OpSpec, selection: Selection, args: Args) -> Array:
    return getattr(IMPLEMENTATIONS[selection.implementation], _FUNCTIONS[op.op])(op, selection, args)


@_differentiable.defjvp
def _jvp(op: OpSpec, selection: Selection, primals: tuple[Args], tangents: tuple[Args]) -> tuple[Array, Array]:
    (args,), (directions,) = primals, tangents
    active = {name: value for name, value in args._asdict().items() if _is_differentiable(value)}
    weight_only_op = op.replace(recipe=_weight_only_recipe(op.recipe), second_recipe=None)

    @jax.checkpoint
    def weight_only(active: dict[str, Any]) -> Array:
        return _run(weight_only_op, selection, _weight_only(args._replace(**active)))

    out = _differentiable(op, selection, args)
    _, tangent = jax.jvp(weight_only, (active,), ({name: getattr(directions, name) for name in active},))
    return out, tangent


def _is_differentiable(value: Any) -> bool:
    if isinstance(value, QTensor):
        return False
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def _weight_only(args: Args) -> Args:
    """The operation with the activation as it is: no input schemes, hence no static scales."""
    changes: dict[str, Any] = {
        name: value.with_input_scheme(None)
        for name, value in args._asdict().items()
        if name in ("w", "w13", "w2") and isinstance(value, QTensor)
    }
    changes.update({name: None for name in ("input_scale", "intermediate_scale") if name in args._fields})
    return args._replace(**changes)


def _weight_only_recipe(recipe: Recipe) -> Recipe:
    return recipe_of(recipe.weight, None)


def resolve_recipe(name: str, w: Array | QTensor, recipe: Recipe | str | None) -> Recipe:
    """The recipe that a weight implies, or with a call's own choice of how the activation is quantised.

    Raises:
      ValueError: the choice is about another kind of weight.
    """
    scheme, input_scheme = (w.scheme, w.input_scheme) if isinstance(w, QTensor) else (None, None)
    if recipe is None:
        return recipe_of(scheme, input_scheme)
    asked = as_recipe(recipe)
    if _kind(asked.weight) != _kind(scheme):
        wanted = asked.weight.describe() if asked.weight else "not quantized"
        found = scheme.describe() if scheme else "not quantized"
        raise ValueError(
            f"recipe={asked.name!r} is for weights that are {wanted}, but {name} is {found}; "
            f"quantize it first with jmoe.quantize"
        )
    return recipe_of(scheme, asked.input)


def _kind(scheme: Scheme | None) -> tuple[Any, ...] | None:
    """What a recipe and a weight must agree on; how the scale itself is held does not matter."""
    return None if scheme is None else (scheme.format, scheme.block, scheme.zero_point, scheme.global_scale)


def with_input_of(w: Array | QTensor, recipe: Recipe) -> Array | QTensor:
    """``w`` asking for the recipe's activation."""
    return w.with_input_scheme(recipe.input) if isinstance(w, QTensor) else w


def as_input(x: Array | QTensor, recipe: Recipe, allowed_ndim: int) -> Array | QTensor:
    """X checked: a float array, or a QTensor quantized just as the recipe wants it."""
    if isinstance(x, QTensor):
        if recipe.input is None or _kind(x.scheme) != _kind(recipe.input):
            wanted = recipe.input.describe() if recipe.input else "not quantized"
            raise ValueError(f"x is quantized as {x.scheme.describe()}, but here the activation is {wanted}")
        return x
    x = jnp.asarray(x)
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"x has dtype {x.dtype}, but activations are bfloat16, float16 or float32")
    if x.ndim < allowed_ndim:
        raise ValueError(f"x has shape {x.shape}, but it has at least {allowed_ndim} axes")
    return x


def dtypes(x: Array | QTensor, preferred: jax.typing.DTypeLike | None) -> tuple[str, str]:
    """Names of x's dtype and of the result's; a quantized x counts as the result's dtype, bfloat16 by default."""
    if preferred is not None:
        preferred = jnp.dtype(preferred)
        if preferred not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise TypeError(f"preferred_element_type={preferred} must be bfloat16, float16 or float32")
    if isinstance(x, QTensor):
        name = jnp.dtype(preferred or jnp.bfloat16).name
        return name, name
    return x.dtype.name, jnp.dtype(preferred or x.dtype).name


def static_scale(name: str, scale: Array | float | None, scheme: Scheme | None, experts: int | None) -> Array | None:
    """A given activation scale checked against its scheme: there just where it is static, float32 () or (E,)."""
    if scheme is None or not scheme.static:
        if scale is not None:
            how = scheme.describe() if scheme else "not quantized"
            raise ValueError(f"{name} is given, but the activation is {how}, whose scale is not a given one")
        return None
    if scale is None:
        raise ValueError(f"{name} is missing: the activation's scheme ({scheme.describe()}) has a given scale")
    scale = check_static_scale(name, scale)
    shapes = ((),) if experts is None else ((), (experts,))
    if scale.shape not in shapes:
        raise ValueError(f"{name} has shape {scale.shape}, but it is {' or '.join(map(str, shapes))} here")
    return scale


def as_layer(layer: Array | int | None, layers: int | None) -> Array | None:
    """``layer`` as an int32 scalar. ``layers`` is the extent of the weights' leading axis, None without one."""
    if layer is None:
        return None
    assert layers is not None
    if isinstance(layer, int) and not 0 <= layer < layers:
        raise ValueError(f"layer={layer} is outside the {layers} stacked layers")
    layer = jnp.asarray(layer)
    if not jnp.issubdtype(layer.dtype, jnp.integer) or layer.ndim:
        raise TypeError(f"layer has dtype {layer.dtype} and shape {layer.shape}, but it is one integer")
    return layer.astype(jnp.int32)


def check_shape(name: str, value: Array | QTensor | None, expected: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless ``value`` is None or has the shape."""
    if value is not None and tuple(value.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but here it is {meaning} = {expected}")


def check_weight(name: str, w: Array | QTensor, ndim: int, layer: Any, meaning: str) -> Array | QTensor:
    """A weight checked for rank and dtype."""
    if not isinstance(w, QTensor):
        w = jnp.asarray(w)
        if w.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            raise TypeError(f"{name} has dtype {w.dtype}, but a plain weight is bfloat16, float16 or float32")
    expected = ndim + (layer is not None)
    if w.ndim != expected:
        stacked = ", with a leading axis of layers since layer is given" if layer is not None else ""
        raise ValueError(f"{name} has shape {tuple(w.shape)}, but it has {expected} axes: {meaning}{stacked}")
    return w


def check_accumulation(accumulation: Accumulation | None) -> None:
    """Raises ValueError unless it is one of the two, or None."""
    if accumulation not in (None, "exact", "fast"):
        raise ValueError(f"accumulation={accumulation!r} must be 'exact', 'fast' or None")


def mesh_axes(*arrays: Any) -> tuple[tuple[str, int], ...]:
    """Axes larger than one over which XLA itself would partition: those of the mesh in force, or of the arrays'."""
    meshes = [jax.sharding.get_abstract_mesh()]
    for leaf in jax.tree.leaves(arrays):
        sharding = getattr(jax.typeof(leaf), "sharding", None)
        if sharding is not None:
            meshes.append(sharding.mesh)
    axes = {}
    for mesh in meshes:
        manual = jax.sharding.AxisType.Manual
        for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
            if size > 1 and kind != manual:
                axes[axis] = size
    return tuple(axes.items())


def check_values(condition: Array, message: str) -> None:
    """Under ``jmoe.config(check=True)``, raises (through checkify) where ``condition`` does not hold."""
    if config.check:
        checkify.check(jnp.all(condition), message)
