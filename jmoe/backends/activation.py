"""Activations between an expert's two products: static descriptions and their formulas, in float32."""

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_GATED = ("swiglu", "swiglustep", "gelu", "gelu_tanh")
_UNGATED = ("swiglu", "gelu", "gelu_tanh", "relu2")
_ALIASES = {"silu": "swiglu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """An activation; with two halves in w13 it is gated, with one it is applied to that one.

    ========== ================================================================ =======================
    name       gated: of gate g and up u                                        ungated: of x
    ========== ================================================================ =======================
    swiglu     g = min(g, L), u = clip(u, -L, L); g sigmoid(alpha g) (u + beta) x sigmoid(x) ("silu")
    swiglustep min(g sigmoid(g), L) clip(u, -L, L)                              -
    gelu       gelu(g) u, the exact form (erf)                                  gelu(x)
    gelu_tanh  gelu(g) u, the tanh form                                         gelu(x)
    relu2      -                                                                max(x, 0)**2
    ========== ================================================================ =======================

    Attributes:
      name: one of the above; "silu" is swiglu and "gelu_pytorch_tanh" is gelu_tanh.
      alpha, beta, limit: swiglu's constants, numbers; 1, 0 and None (no clamp, as is inf) are "silu". swiglustep has
        only the limit.
    """

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _ALIASES.get(self.name, self.name))
        for key in ("alpha", "beta", "limit"):
            value = getattr(self, key)
            if key == "limit" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(
                    f"activation {key}={value!r} must be a number; arrays, one value an expert, go in activation_params"
                )
            no_limit = key == "limit" and value == math.inf
            if not no_limit and not math.isfinite(value):
                raise ValueError(f"activation {key}={value} must be finite")
            object.__setattr__(self, key, None if no_limit else float(value))
        self._check_combination()

    def _check_combination(self) -> None:
        if self.name not in {*_GATED, *_UNGATED}:
            raise ValueError(f"activation {self.name!r} is unknown; known are {', '.join(known_activations())}")
        if self.name != "swiglu" and (self.alpha, self.beta) != (1.0, 0.0):
            raise ValueError(f"activation {self.name!r} takes no alpha or beta, only swiglu does")
        if self.name not in ("swiglu", "swiglustep") and self.limit is not None:
            raise ValueError(f"activation {self.name!r} takes no limit, only swiglu and swiglustep do")
        if self.name == "swiglustep" and self.limit is None:
            raise ValueError("activation 'swiglustep' needs its limit, e.g. swiglustep:limit=7")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"activation limit={self.limit} must be positive, or None for no clamp")

    @property
    def is_plain_silu(self) -> bool:
        return self == swiglu()

    def check_halves(self, halves: int) -> None:
        """Raises ValueError unless this activation has a form for w13 with that many halves."""
        if halves == 1 and (self.name not in _UNGATED or (self.name == "swiglu" and not self.is_plain_silu)):
            raise ValueError(f"activation {self} is gated, but here it is of one array, not of gate and up")
        if halves == 2 and self.name not in _GATED:
            raise ValueError(f"activation {self} has no gated form, but w13 has two halves (gate and up)")

    def __str__(self) -> str:
        if self.is_plain_silu:
            return "silu"
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        changed = [f"{n}={getattr(self, n):g}" for n in ("alpha", "beta", "limit") if getattr(self, n) != defaults[n]]
        return self.name + (":" + ",".join(changed) if changed else "")


class ActivationParams(NamedTuple):
    """Constants of a gated swiglu as arrays: each () or (E,), one an expert, or None for the activation's own.

    They replace ``Activation``'s alpha, beta and limit in the formula there; a limit of inf is no clamp.
    """

    alpha: Array | None = None
    beta: Array | None = None
    limit: Array | None = None


def swiglu(alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> Activation:
    """SwiGLU with its constants; see ``Activation``."""
    return Activation(name="swiglu", alpha=alpha, beta=beta, limit=limit)


def known_activations() -> tuple[str, ...]:
    """The names that ``activation`` takes."""
    return (*dict.fromkeys((*_GATED, *_UNGATED)), *_ALIASES, "swigluoai")


def as_activation(value: Activation | str) -> Activation:
    """The activation itself or the one of that name: ``silu``, ``swigluoai``, ``swiglu:alpha=1.702,limit=7``.

    Raises:
      ValueError: an unknown name or option, or a value that the activation does not allow.
    """
    if isinstance(value, Activation):
        return value
    if not isinstance(value, str):
        raise TypeError(f"activation={value!r} must be an Activation or the name of one")
    name, _, text = value.partition(":")
    if name == "swigluoai":
        if text:
            raise ValueError(f"activation {value!r}: swigluoai has fixed constants; write swiglu:... to choose them")
        return swiglu(1.702, 1.0, 7.0)
    return Activation(name=name, **dict(_option(name, item) for item in filter(None, text.split(","))))


def _option(name: str, item: str) -> tuple[str, float]:
    key, _, number = item.partition("=")
    if key not in ("alpha", "beta", "limit"):
        raise ValueError(f"activation {name!r} has no option {key!r}; options are alpha, beta and limit")
    try:
        return key, float(number)
    except ValueError as error:
        raise ValueError(f"activation {name!r}: {key}={number!r} is not a number") from error


def gated(activation: Activation, gate: Array, up: Array, params: ActivationParams | None = None) -> Array:
    """The gated activation of float32 ``gate`` and ``up``; ``params`` entries broadcast against them."""
    if activation.name == "gelu":
        return jax.nn.gelu(gate, approximate=False) * up
    if activation.name == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    given = params or ActivationParams()
    limit = activation.limit if given.limit is None else given.limit
    if activation.name == "swiglustep":
        assert limit is not None  # Activation holds it to that
        return jnp.minimum(gate * jax.nn.sigmoid(gate), limit) * jnp.clip(up, -limit, limit)
    alpha = activation.alpha if given.alpha is None else given.alpha
    beta = activation.beta if given.beta is None else given.beta
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + beta)


def ungated(activation: Activation, x: Array) -> Array:
    """The activation of float32 ``x`` alone."""
    if activation.name == "relu2":
        return jnp.square(jnp.maximum(x, 0))
    if activation.name == "swiglu":
        return x * jax.nn.sigmoid(x)
    return jax.nn.gelu(x, approximate=activation.name == "gelu_tanh")
