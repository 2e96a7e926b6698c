"""Activations between an expert's two products, in kernels: of a gate and an up half, or of the only half.

swiglu      g = min(g, limit), u = clip(u, -limit, limit); g sigmoid(alpha g) (u + beta)
swiglustep  min(g sigmoid(g), limit) clip(u, -limit, limit)
gelu        gelu(g) u, the exact form; gelu_tanh: its tanh form
ungated     "swiglu" is x sigmoid(x); gelu, gelu_tanh; relu2 is max(x, 0)^2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels import body
from pallas_kernels.lowering import load


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """Which activation, with its static constants; ``limit`` None is no clamp."""

    name: Literal["swiglu", "swiglustep", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


SILU = Activation()
"""Of a gate g and an up half u: g sigmoid(g) u."""


class ActivationParams(NamedTuple):
    """swiglu's constants as arrays instead, or None: refs of float32 (1,) or (E,) inside a kernel."""

    alpha: Any | None = None
    beta: Any | None = None
    limit: Any | None = None


def activate(activation: Activation, halves: Sequence[Array], params: ActivationParams, expert: Array) -> Array:
    """In a kernel: the intermediate of one expert's float32 halves, gate and up or the only one.

    Clamps are selects, so that NaN survives them.
    """
    if len(halves) == 1:
        name = "silu" if activation.name == "swiglu" else activation.name
        return body.ungated(name, halves[0])
    gate, up = halves
    if activation.name in ("gelu", "gelu_tanh"):
        return body.ungated(activation.name, gate) * up
    alpha = _constant(activation.alpha, params.alpha, expert)
    beta = _constant(activation.beta, params.beta, expert)
    limit = None
    if activation.limit is not None or params.limit is not None:
        limit = _constant(activation.limit, params.limit, expert)
    if activation.name == "swiglustep":
        assert limit is not None
        return _at_most(body.silu(gate), limit) * _between(up, limit)
    if limit is not None:
        gate, up = _at_most(gate, limit), _between(up, limit)
    return body.silu(gate, alpha) * (up + beta)


def _constant(static: Any, given: Any | None, expert: Array) -> Any:
    return static if given is None else load(given, (expert if given.shape[0] > 1 else 0,))


def _at_most(x: Array, limit: Array | float) -> Array:
    return jnp.where(x > limit, limit, x)


def _between(x: Array, limit: Array | float) -> Array:
    return jnp.where(x < -limit, -limit, _at_most(x, limit))
