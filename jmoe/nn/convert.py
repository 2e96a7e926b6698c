"""``quantize_model``: quantizes the layers of an existing model, as rules say."""

import collections
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jmoe.arguments import check_type
from jmoe.backends.spec import DeviceSpec
from jmoe.nn import flax_layers, options, param, walk
from jmoe.nn.calibrate import Calibration
from jmoe.nn.experts import quantize_experts
from jmoe.nn.flax_layers import FLAX_LAYERS, from_flax
from jmoe.nn.linear import Linear
from jmoe.nn.moe import FusedMoE
from jmoe.nn.rules import Rules, decide_all
from jmoe.ops.prepare import prepare
from jmoe.qtensor import QTensor
from jmoe.quantize import quantize
from jmoe.scheme import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """What became of one layer.

    Attributes:
      path: its module path.
      kind: its class before.
      rule: index of the rule that decided, None where none matched.
      pattern: that rule's expression.
      recipe: how it is quantized, None where it was left as it was.
      bytes_before, bytes_after: of its weights, scales included.
      sqnr_db: signal to quantisation noise of its weights in dB, where it was asked for.
    """

    path: str
    kind: str
    rule: int | None
    pattern: str | None
    recipe: str | None
    bytes_before: int
    bytes_after: int
    sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What ``quantize_model`` did, a row a layer; print it for a table."""

    layers: tuple[LayerReport, ...]

    @property
    def bytes_before(self) -> int:
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        rows = [("layer", "kind", "rule", "recipe", "bytes", "quantized", "SQNR dB")]
        for layer in self.layers:
            rows.append(
                (
                    layer.path,
                    layer.kind,
                    "none" if layer.rule is None else f"{layer.rule}: {layer.pattern}",
                    layer.recipe or "left as it is",
                    f"{layer.bytes_before:,}",
                    f"{layer.bytes_after:,}",
                    "" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f}",
                )
            )
        rows.append(("all", "", "", "", f"{self.bytes_before:,}", f"{self.bytes_after:,}", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        align = "<<<<>>>"
        lines = ("  ".join(f"{t:{a}{w}}" for t, a, w in zip(row, align, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def quantize_model(
    model: nnx.Module,
    rules: Rules,
    *,
    device: DeviceSpec | jax.Device | str | None = None,
    calibration: Calibration | None = None,
    sqnr: bool = False,
) -> Report:
    r"""Quantizes layers of ``model`` in place: afterwards the model computes with quantized weights.

    Layers are ``jmoe.nn.Linear`` and ``FusedMoE``, whose weights are replaced, and ``nnx.Linear``,
    ``nnx.LinearGeneral`` (of which ``nnx.MultiHeadAttention`` is made) and ``nnx.Einsum``, in whose place a ``Linear``
    comes that is called the same way. Stacked layers (a leading axis in every variable, as ``nnx.vmap`` makes them)
    stay stacked. One layer is quantized after the other and its dense weight released, so that there is never a second
    copy of the model. A layer that is held in several places is quantized once, as the first rule says that matches any
    of its paths, and layers that share a weight share it afterwards, where they get one recipe.

    Example usage::

      >>> from flax import nnx
      >>> from jmoe.nn import quantize_model
      ...
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))
      >>> print(quantize_model(model, [(r"layers\.2", None), (r".*", "int8")]))
      layer     kind    rule          recipe          bytes  quantized  SQNR dB
      layers.0  Linear  1: .*         int8           32,768      8,704
      layers.2  Linear  0: layers\.2  left as it is   5,120      5,120
      all                                            37,888     13,824

    Args:
      model: any model; the layers are below it, not the model itself.
      rules: (regular expression, recipe) pairs on module paths such as ``layers.0.self_attn.q_proj``. An expression
        must match the whole path; the first rule that matches decides. A recipe that is None (or "bf16") leaves a layer
        alone, as layers do that no rule matches.
      device: what weights are prepared for; see ``jmoe.prepare``.
      calibration: what ``jmoe.nn.calibrate`` measured; recipes with given activation scales (``fp8_tensor_static``,
        ``nvfp4``) need it.
      sqnr: measure each layer's signal to quantisation noise.

    Returns:
      A Report.

    Raises:
      ValueError: a rule that decides nothing; or a layer to be quantized that is quantized already, whose class or
        product is not known, or that lacks calibration; TypeError: rules that are none, or a layer that holds or
        computes in what a ``Linear`` does not. Nothing is changed then.
    """
    check_type("model", model, nnx.Module, "an nnx.Module")
    check_type("calibration", calibration, (Calibration, type(None)), "what jmoe.nn.calibrate returns, or None")
    options.flag("sqnr", sqnr)
    nodes = [node for node in walk.modules(model) if isinstance(node.module, (Linear, FusedMoE, *FLAX_LAYERS))]
    decisions = decide_all(rules, [node.paths for node in nodes])
    scales = {}
    for node in nodes:
        if (recipe := decisions[node.path].recipe) is not None:
            _check(node, recipe, calibration)
            scales[node.path] = _scales(node, recipe, calibration)
            _rehearse(node, recipe, device, scales[node.path])
    shared = _shared_weights([node for node in nodes if node.path in scales])
    sharers: dict[Any, nnx.Module] = {}
    rows = []
    nodes.reverse()
    while nodes:  # a node goes as it is done, and with it the last reference to its dense weight
        node = nodes.pop()
        decision = decisions[node.path]
        before = _nbytes(node.module)
        after, noise = before, None
        if decision.recipe is not None:
            layer, powers = _converted(node.module, decision.recipe, device, scales[node.path], measure=sqnr)
            if layer is not node.module:
                node.replace(layer)
            if (key := shared.get(node.path)) is not None:
                _share(layer, sharers.setdefault((key, decision.recipe), layer))
            after, noise = _nbytes(layer), _decibels(powers) if sqnr else None
        rows.append(
            LayerReport(
                path=node.path,
                kind=type(node.module).__name__,
                rule=decision.rule,
                pattern=None if decision.rule is None else rules[decision.rule][0],
                recipe=None if decision.recipe is None else decision.recipe.name,
                bytes_before=before,
                bytes_after=after,
                sqnr_db=noise,
            )
        )
    return Report(tuple(rows))


def _check(node: walk.Node, recipe: Recipe, calibration: Calibration | None) -> None:
    """Raises ValueError where a layer cannot be quantized so, before anything is changed."""
    module = node.module
    if isinstance(module, Linear | FusedMoE):
        for name in module.weight_names:
            if getattr(module, name + "_format") is not None:
                now = param.recipe_of_weight(module, name).name
                raise ValueError(
                    f"{node.path} is quantized already ({name}: {now}), and recipe {recipe.name!r} would round it "
                    f"again; leave it alone with the rule ({node.path!r}, None)"
                )
    else:
        flax_layers.check(node.path, module)
        if node.fixed is not None:
            raise ValueError(f"{node.fixed} is held by a tuple, which cannot be changed in place; use an nnx.List")
    if recipe.input is not None and recipe.input.static:
        if calibration is None:
            raise ValueError(
                f"recipe {recipe.name!r} of {node.path} has given activation scales: pass calibration, which "
                "jmoe.nn.calibrate measures"
            )
        calibration.check(node.path, experts=isinstance(module, FusedMoE))


def _scales(node: walk.Node, recipe: Recipe, calibration: Calibration | None) -> dict[str, Array]:
    """The given activation scales of a layer, by the weight that the activation meets."""
    scheme = recipe.input
    if scheme is None or not scheme.static or calibration is None:
        return {}
    first = calibration.input_scale(node.path, scheme)
    if not isinstance(node.module, FusedMoE):
        return {"weight": first}
    return {"w13": first, "w2": calibration.intermediate_scale(node.path, scheme)}


def _rehearse(
    node: walk.Node, recipe: Recipe, device: DeviceSpec | jax.Device | str | None, scales: dict[str, Array]
) -> None:
    """Converts a layer without its values: what goes wrong with it does so before any layer is changed."""
    nnx.eval_shape(lambda module: _converted(module, recipe, device, scales), node.module)


def _converted(
    module: Any,
    recipe: Recipe,
    device: DeviceSpec | jax.Device | str | None,
    scales: dict[str, Array],
    *,
    measure: bool = False,
) -> tuple[Linear | FusedMoE, list[Any]]:
    """The quantized layer, ``module`` itself if it is one of ours, and ``_powers`` of its weights where asked for."""
    powers = []
    if isinstance(module, FusedMoE):
        for name in module.weight_names:
            dense = getattr(module, name).get_value()
            q = prepare(quantize_experts(dense, recipe, first=name == "w13"), op="moe", device=device)
            (module.set_w13 if name == "w13" else module.set_w2)(q, input_scale=scales.get(name))
            powers += [_powers(dense, q)] if measure else []
            jax.block_until_ready(q)
            del dense, q
        return module, powers
    layer = module if isinstance(module, Linear) else from_flax(module)
    dense = layer.weight.get_value()
    q = prepare(quantize(dense, recipe), op="linear", device=device)
    scale = scales.get("weight")
    if scale is not None:
        scale = jnp.broadcast_to(scale.reshape(*scale.shape, *(1,) * (q.ndim - 2 - scale.ndim)), q.shape[:-2])
    layer.set_weight(q, input_scale=scale)
    powers += [_powers(dense, q)] if measure else []
    jax.block_until_ready(q)  # or the next layer's codes are allocated before this one's weight is free
    return layer, powers


def _shared_weights(nodes: list[walk.Node]) -> dict[str, tuple[Any, ...]]:
    """By path, of layers of one kind that hold the same variables for their weights: what tells which these are."""
    keys = {}
    for node in nodes:
        names = node.module.weight_names if isinstance(node.module, Linear | FusedMoE) else ("kernel",)
        keys[node.path] = (type(node.module), *(id(getattr(node.module, name)) for name in names))
    counts = collections.Counter(keys.values())
    return {path: key for path, key in keys.items() if counts[key] > 1}


def _share(layer: Any, first: Any) -> None:
    """Gives ``layer`` the variables of the weights of ``first``."""
    if layer is not first:
        for name in layer.weight_names:
            for part in param.part_names(name):
                setattr(layer, part, getattr(first, part))


def _nbytes(module: nnx.Module) -> int:
    """Bytes of a layer's weights, scales included, biases not."""
    names: tuple[str, ...] = ("kernel",)
    if isinstance(module, Linear | FusedMoE):
        names = tuple(part for name in module.weight_names for part in param.part_names(name))
    leaves = jax.tree.leaves([param.value_of(getattr(module, name)) for name in names])
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


@jax.jit
def _powers(dense: Array, q: QTensor) -> tuple[Array, Array]:
    """Sums of squares of the weight and of its quantisation error, matrix by matrix to bound memory."""

    def one(pair: tuple[Array, QTensor]) -> tuple[Array, Array]:
        w = pair[0].astype(jnp.float32)
        return jnp.sum(jnp.square(w)), jnp.sum(jnp.square(w - pair[1].dequantize()))

    batch = dense.ndim - 2
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[batch:]), (dense, q))
    signal, noise = lax.map(one, flat)
    return jnp.sum(signal), jnp.sum(noise)


def _decibels(powers: list[Any]) -> float:
    signal, noise = (sum(float(part) for part in column) for column in zip(*powers, strict=True))
    return math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
