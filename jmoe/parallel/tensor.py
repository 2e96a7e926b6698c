"""Tensor and expert parallelism: the operations on weights that lie in parts on the devices of a mesh.

Each device multiplies with its own part, inside ``jax.shard_map``, and results are summed where a sum is split; no
weight ever moves. A scale of an activation is measured over all devices that hold a part of what it is for, so that the
result is that of one device up to the order of sums.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from jmoe import ops
from jmoe.arguments import COMPUTE_DTYPES, float_dtype
from jmoe.backends import activation as act
from jmoe.backends import common
from jmoe.backends.activation import Activation, as_activation
from jmoe.backends.spec import Accumulation, LinearArgs, MoEArgs
from jmoe.config import Shards, config
from jmoe.ops import validate as v
from jmoe.ops.moe import Experts, as_routed
from jmoe.parallel import axes as on_mesh
from jmoe.parallel.axes import Axes, AxisName
from jmoe.qtensor import QTensor


def linear(
    x: Array,
    w: Array | QTensor,
    *,
    out_axes: AxisName = None,
    in_axes: AxisName = None,
    token_axes: Sequence[AxisName] = (),
    bias: Array | None = None,
    activation: Activation | str | None = None,
    input_scale: Array | float | None = None,
    layer: Array | int | None = None,
    accumulation: Accumulation | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """``jmoe.linear`` on the mesh in force, with w split over N (column parallel), K (row parallel) or both.

    Args:
      x: (..., K) bfloat16, float16 or float32; on an axis of automatic type XLA brings it into the form needed.
      w: QTensor or array (N, K); (L, N, K) with ``layer``.
      out_axes: the mesh axes over which N is split, and with it the result.
      in_axes: those over which K is: each device has a partial sum in float32, and these are added up.
      token_axes: for each leading axis of x, the mesh axes over which it is split; axes left out are not.
      bias, activation, input_scale, layer, accumulation, preferred_element_type, implementation: as for
        ``jmoe.linear``; ``bias`` and ``activation`` come after the sum over K.

    Returns:
      (..., N).

    Raises:
      ValueError: no mesh in force, an axis that it does not have or that is named twice, an extent that its devices do
        not divide, or blocks of scales or groups of an activation that would lie on several of them (one scale a row or
        a tensor may); TypeError: axes that are no names; and both as ``jmoe.linear`` does.
    """
    x, w = v.as_floats("x", x), v.as_weight("w", w, "(N, K)", layer)
    n, k = w.shape[-2:]
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}, but w has K = {k} (w is (N, K) = {(n, k)})")
    if activation is not None:
        as_activation(activation).check_halves(1)
    index, layers = v.as_layer(layer, w)
    scheme = w.input_scheme if isinstance(w, QTensor) else None
    args = LinearArgs(
        x=x,
        w=w,
        bias=v.as_bias("bias", bias, (n,), "(N,)", layers),
        input_scale=v.as_static_scale("input_scale", input_scale, scheme, quantized=False),
        layer=index,
    )
    how = _Linear(
        manual=on_mesh.manual_axes(),
        tokens=on_mesh.as_token_axes(x, token_axes),
        out=on_mesh.as_axes("out_axes", out_axes),
        into=on_mesh.as_axes("in_axes", in_axes),
        activation=activation,
        accumulation=accumulation,
        out_dtype=_out_dtype(x, preferred_element_type),
        implementation=implementation,
    )
    rows = on_mesh.flat(how.tokens)
    on_mesh.check_axes(how.manual, {"token_axes": rows, "out_axes": how.out, "in_axes": how.into})
    on_mesh.check_tokens(x, how.tokens)
    on_mesh.check_groups("w", w, "K", how.into, instead="N")
    on_mesh.check_rows("w", w, rows, _local_lead(x, how.tokens))
    on_mesh.check_split("w", w, {-2: ("N", how.out), -1: ("K", how.into)})
    return _run(how, args)


def fused_moe(
    x: Array,
    w13: Array | QTensor,
    w2: Array | QTensor,
    topk_weights: Array,
    topk_ids: Array,
    *,
    expert_axes: AxisName = None,
    intermediate_axes: AxisName = None,
    token_axes: Sequence[AxisName] = (),
    activation: Activation | str = "silu",
    b13: Array | None = None,
    b2: Array | None = None,
    input_scale: Array | float | None = None,
    intermediate_scale: Array | float | None = None,
    weight_on_input: bool = False,
    expert_map: Array | None = None,
    layer: Array | int | None = None,
    accumulation: Accumulation | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """``jmoe.fused_moe`` on the mesh in force, with the weights split over experts, I or both.

    Every device gets its part of the tokens (``token_axes``) and computes the slots whose experts it has, each over its
    part of I; partial sums are float32 and are added up over both kinds of axes.

    Args:
      x: (..., H) bfloat16, float16 or float32.
      w13, w2: as for ``jmoe.fused_moe``; E is the number of slots on all devices together.
      topk_weights, topk_ids: (..., k); ids count experts before the map.
      expert_axes: the mesh axes over which E is split, in parts of successive slots.
      intermediate_axes: those over which I is, of gate and up alike.
      token_axes: for each leading axis of x, the mesh axes over which it is split; axes left out are not.
      expert_map: integers (E_global,): the slot of each expert among those of all devices, or -1
        (``jmoe.parallel.expert_map``); None where ids are slots.
      activation, b13, b2, input_scale, intermediate_scale, weight_on_input, layer, accumulation,
        preferred_element_type, implementation: as for ``jmoe.fused_moe``.

    Returns:
      (..., H).

    Raises:
      ValueError: no mesh in force, an axis that it does not have or that is named twice, an extent that its devices do
        not divide, or blocks of scales or groups of an activation that would lie on several of them (one scale a row or
        a tensor may); TypeError: axes that are no names; and both as ``jmoe.fused_moe`` does.
    """
    experts = Experts(w13, w2, None, activation, None, b13, b2, layer)
    x = v.as_floats("x", x)
    experts.as_input(x, "(..., H)", "(T, H)")  # or what it raises
    w13, w2 = experts.w13, experts.w2
    routed = as_routed(x.shape[:-1], topk_weights, topk_ids, expert_map, experts.count)
    how = _MoE(
        manual=on_mesh.manual_axes(),
        tokens=on_mesh.as_token_axes(x, token_axes),
        experts=on_mesh.as_axes("expert_axes", expert_axes),
        intermediate=on_mesh.as_axes("intermediate_axes", intermediate_axes),
        activation=activation,
        weight_on_input=weight_on_input,
        accumulation=accumulation,
        out_dtype=_out_dtype(x, preferred_element_type),
        implementation=implementation,
    )
    rows, e, i = on_mesh.flat(how.tokens), how.experts, how.intermediate
    on_mesh.check_axes(how.manual, {"token_axes": rows, "expert_axes": e, "intermediate_axes": i})
    on_mesh.check_tokens(x, how.tokens)
    on_mesh.check_groups("w2", w2, "I", i, instead="E")
    for name, w in (("w13", w13), ("w2", w2)):
        on_mesh.check_rows(name, w, (*rows, *e), None)
    on_mesh.check_split("w13", w13, {-4: ("E", e), -2: ("I", i)})
    on_mesh.check_split("w2", w2, {-3: ("E", e), -1: ("I", i)})
    args = MoEArgs(
        x=x,
        topk_weights=routed.weights,
        topk_ids=routed.ids,
        expert_map=routed.expert_map,
        **experts.arrays(x, input_scale, intermediate_scale),
    )
    return _run(how, args)


@dataclass(frozen=True, kw_only=True)
class _Linear:
    """A linear on a mesh, without its arrays."""

    manual: frozenset[str]
    tokens: tuple[Axes, ...]
    out: Axes
    into: Axes
    activation: Activation | str | None
    accumulation: Accumulation | None
    out_dtype: str
    implementation: str | None

    def specs(self, args: LinearArgs) -> Any:
        n, k = self.out or None, self.into or None
        specs: dict[str, Any] = {
            "x": PartitionSpec(*_entries(self.tokens), k),
            "w": _weight_specs(args.w, (n, k)),
            "bias": None if args.bias is None else _trailing(args.bias, (n,)),
            "input_scale": None if args.input_scale is None else PartitionSpec(),
            "layer": None if args.layer is None else PartitionSpec(),
        }
        return LinearArgs(**specs)

    @property
    def result(self) -> PartitionSpec:
        return PartitionSpec(*_entries(self.tokens), self.out or None)

    def __call__(self, args: LinearArgs) -> Array:
        """One device's share."""
        if not self.into:
            return self._product(args, args.bias, self.activation, self.out_dtype)
        return _summed(self, args) if isinstance(args.w, QTensor) and args.w.input_scheme else self.summed(args)

    def summed(self, args: LinearArgs) -> Array:
        """The sum of all devices' partial products, then bias and activation."""
        y = lax.psum(self._product(args, None, None, "float32"), self.into)
        if args.bias is not None:
            bias = common.at_layer(args.bias, args.layer).astype(jnp.float32)
            y = y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)
        if self.activation is not None:
            y = act.ungated(as_activation(self.activation), y)
        return y.astype(self.out_dtype)

    def _product(
        self, args: LinearArgs, bias: Array | None, activation: Activation | str | None, out_dtype: str
    ) -> Array:
        with config(check=False, shards=Shards(rows=on_mesh.flat(self.tokens), columns=self.into)):
            return ops.linear(
                args.x,
                args.w,
                bias=bias,
                activation=activation,
                input_scale=args.input_scale,
                layer=args.layer,
                accumulation=self.accumulation,
                preferred_element_type=out_dtype,
                implementation=self.implementation,
            )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _summed(how: _Linear, args: LinearArgs) -> Array:
    """``how.summed(args)``, with the derivatives of the weight-only operation, as ``jmoe.linear`` has them."""
    return how.summed(args)


def _summed_jvp(how: _Linear, primals: tuple[LinearArgs], tangents: tuple[LinearArgs]) -> tuple[Array, Array]:
    (args,), (directions,) = primals, tangents
    y = _summed(how, args)
    along = {name: getattr(directions, name) for name in ("x", "bias") if getattr(args, name) is not None}
    along = {name: direction for name, direction in along.items() if not isinstance(direction, SymbolicZero)}
    if not along:
        return y, jnp.zeros_like(y)
    assert isinstance(args.w, QTensor)
    weight_only = args._replace(w=args.w.with_input_scheme(None), input_scale=None)
    at = {name: getattr(args, name) for name in along}
    return y, jax.jvp(lambda changed: how.summed(weight_only._replace(**changed)), (at,), (along,))[1]


_summed.defjvp(_summed_jvp, symbolic_zeros=True)


@dataclass(frozen=True, kw_only=True)
class _MoE:
    """Experts on a mesh, without their arrays."""

    manual: frozenset[str]
    tokens: tuple[Axes, ...]
    experts: Axes
    intermediate: Axes
    activation: Activation | str
    weight_on_input: bool
    accumulation: Accumulation | None
    out_dtype: str
    implementation: str | None

    def specs(self, args: MoEArgs) -> Any:
        e, i = self.experts or None, self.intermediate or None
        whole, of_tokens = PartitionSpec(), PartitionSpec(*_entries(self.tokens), None)

        def of_scale(scale: Array | None) -> PartitionSpec | None:
            return None if scale is None else PartitionSpec(e) if scale.ndim else whole

        specs: dict[str, Any] = {
            "x": of_tokens,
            "w13": _weight_specs(args.w13, (e, None, i, None)),
            "w2": _weight_specs(args.w2, (e, None, i)),
            "topk_weights": of_tokens,
            "topk_ids": of_tokens,
            "b13": None if args.b13 is None else _trailing(args.b13, (e, None, i)),
            "b2": None if args.b2 is None else _trailing(args.b2, (e, None)),
            "input_scale": of_scale(args.input_scale),
            "intermediate_scale": of_scale(args.intermediate_scale),
            "expert_map": None if args.expert_map is None else whole,
            "layer": None if args.layer is None else whole,
        }
        return MoEArgs(**specs)

    @property
    def result(self) -> PartitionSpec:
        return PartitionSpec(*_entries(self.tokens), None)

    def __call__(self, args: MoEArgs) -> Array:
        """One device's share."""
        here = args.w13.shape[-4]
        ids = args.topk_ids
        devices = lax.axis_size(self.experts) if self.experts else 1
        if self.experts:
            first = lax.axis_index(self.experts) * here
            slots = common.local_ids(ids, args.expert_map, here * devices) - first
            ids = jnp.where((slots >= 0) & (slots < here), slots, -1)
        b2 = args.b2
        if self.intermediate and b2 is not None:  # or each part of the sum over I would add it
            b2 = jnp.where(lax.axis_index(self.intermediate) == 0, b2, jnp.zeros_like(b2))
        split = (*self.experts, *self.intermediate)
        rows = (*on_mesh.flat(self.tokens), *self.experts)
        shards = Shards(rows=rows, columns=self.intermediate, experts=devices)
        with config(check=False, shards=shards):
            y = ops.fused_moe(
                args.x,
                args.w13,
                args.w2,
                args.topk_weights,
                ids,
                activation=self.activation,
                b13=args.b13,
                b2=b2,
                input_scale=args.input_scale,
                intermediate_scale=args.intermediate_scale,
                weight_on_input=self.weight_on_input,
                expert_map=None if self.experts else args.expert_map,
                layer=args.layer,
                accumulation=self.accumulation,
                preferred_element_type=jnp.float32 if split else self.out_dtype,
                implementation=self.implementation,
            )
        return lax.psum(y, split).astype(self.out_dtype) if split else y


# Values are checked (``jmoe.config(check=True)``) before, for checkify does not get errors out of a shard_map.
@functools.partial(jax.jit, static_argnums=0)
def _run(how: _Linear | _MoE, args: Any) -> Array:
    return jax.shard_map(how, in_specs=(how.specs(args),), out_specs=how.result, axis_names=how.manual)(args)


def _weight_specs(w: Array | QTensor, axes: Sequence[AxisName]) -> Any:
    """A spec for each array of ``w``, whose last axes are split over ``axes``; scales are with their blocks."""
    if not isinstance(w, QTensor):
        return _trailing(w, axes)
    return jax.tree.map(lambda leaf: _trailing(leaf, axes), w)


def _trailing(leaf: Array, axes: Sequence[AxisName]) -> PartitionSpec:
    """The last axes of ``leaf`` split over ``axes``; one of extent 1 is the same for all."""
    lead = (None,) * (leaf.ndim - len(axes))
    split = (None if extent == 1 else axis for axis, extent in zip(axes, leaf.shape[len(lead) :], strict=True))
    return PartitionSpec(*lead, *split)


def _entries(axes: Sequence[Axes]) -> tuple[AxisName, ...]:
    """The same as entries of a PartitionSpec."""
    return tuple(names or None for names in axes)


def _local_lead(x: Array, tokens: Sequence[Axes]) -> tuple[int, ...]:
    """The leading axes of the part of x that each device has."""
    return tuple(extent // on_mesh.devices(names) for extent, names in zip(x.shape[:-1], tokens, strict=True))


def _out_dtype(x: Array, preferred: jax.typing.DTypeLike | None) -> str:
    if preferred is None:
        return str(jnp.dtype(x.dtype).name)
    return str(float_dtype("preferred_element_type", preferred, COMPUTE_DTYPES).name)
