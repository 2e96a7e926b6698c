"""``prepare``: a weight in the arrangement that the kernels of a device want."""

import math
from typing import get_args

import jax
from jax import Array

from jmoe.arguments import type_of
from jmoe.backends.activation import swiglu
from jmoe.backends.select import select
from jmoe.backends.spec import DeviceSpec, Op, OpSpec
from jmoe.config import config
from jmoe.qtensor import QTensor
from jmoe.scheme import recipe_of


def prepare(
    w: QTensor | Array,
    *,
    op: OpSpec | Op,
    device: DeviceSpec | jax.Device | str | None = None,
) -> QTensor | Array:
    """``w`` in the layout that the implementation chosen for it reads without repacking; plain arrays stay.

    There is one layout for a recipe and a device, good for any number of tokens, so weights are prepared once, when
    they are loaded or quantized.

    Args:
      w: the weight, (..., N, K).
      op: the operation it is for, by name or as an OpSpec.
      device: what it is prepared for, here or not: a DeviceSpec, a JAX device, a known name; None is the current one.

    Returns:
      The same values.

    Raises:
      ValueError: ``w`` is in a layout from which there is no way to the one wanted, or an operation that there is not.
      TypeError: ``w`` is no weight.
      Whatever ``jmoe.select`` raises, where nothing serves such a weight.
    """
    if not isinstance(op, OpSpec) and op not in get_args(Op):
        raise ValueError(f"op={op!r} must be 'linear', 'moe', 'batched_experts' or an OpSpec")
    if not isinstance(w, QTensor):
        if not hasattr(w, "shape"):
            raise TypeError(f"w is {type_of(w)}, but a weight is a QTensor or an array")
        return w
    spec = op if isinstance(op, OpSpec) else _typical(w, op)
    return w.in_layout(select(spec.replace(layout=w.layout.kind), device).layout)


def _typical(w: QTensor, op: Op) -> OpSpec:
    """An operation of that kind on such a weight; the layout depends on recipe and device only."""
    n, k = w.shape[-2:]
    recipe = recipe_of(w.scheme, w.input_scheme)
    if op == "linear":
        return OpSpec(op=op, recipe=recipe, tokens=1, hidden=k, features=n, batch_invariant=config.batch_invariant)
    experts = max(math.prod(w.shape[:-2]), 1)
    return OpSpec(
        op=op,
        recipe=recipe,
        tokens=1,
        hidden=k,
        intermediate=n,
        experts=experts,
        global_experts=experts,
        top_k=1,
        activation=swiglu(),
        batch_invariant=config.batch_invariant,
    )
