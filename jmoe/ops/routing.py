"""``route``: from router logits to each token's experts and weights, in float32."""

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from jmoe.arguments import as_array
from jmoe.ops.validate import check_shape
from jmoe.sharding import automatic_inside, spec_of
from pallas_kernels import bits


class Routed(NamedTuple):
    """What a router decided.

    Attributes:
      weights: float32 (..., k).
      ids: int32 (..., k), -1 where the slot went to an identity expert.
      identity_weight: float32 (...), the weight with which x itself is added, or None without identity experts.
    """

    weights: Array
    ids: Array
    identity_weight: Array | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How a router decides.

    Attributes:
      top_k: slots a token.
      score: "softmax", "sigmoid" or "sqrtsoftplus" (sqrt(log(1 + exp(x)))).
      order: "score_topk" scores all experts and takes the top k; "topk_score" takes the top k logits and scores those
        (softmax over the k: gpt-oss; sigmoid: Llama 4).
      renormalize: weights are divided by their sum (+ 1e-20).
      n_group, topk_group: experts in equal groups, of which only the best ``topk_group`` stay. A group's score is the
        sum of its two best choices with a correction bias, its best one without.
      scale: multiplies the weights, last.
      weight_on_input: the weight is meant to multiply the expert's input (Llama 4; top_k = 1).
      n_identity: the last so many of the logits are identity experts, which add x itself.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    order: Literal["score_topk", "topk_score"] = "score_topk"
    renormalize: bool = False
    n_group: int = 1
    topk_group: int = 1
    scale: float = 1.0
    weight_on_input: bool = False
    n_identity: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "n_group", "topk_group", "n_identity"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name}={value!r} must be an integer")
        for name in ("renormalize", "weight_on_input"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        if isinstance(self.scale, bool) or not isinstance(self.scale, numbers.Real):
            raise TypeError(f"scale={self.scale!r} must be a number")
        if not math.isfinite(self.scale):
            raise ValueError(f"scale={self.scale} must be finite")
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.score not in ("softmax", "sigmoid", "sqrtsoftplus"):
            raise ValueError(f"score={self.score!r} must be 'softmax', 'sigmoid' or 'sqrtsoftplus'")
        if self.order not in ("score_topk", "topk_score"):
            raise ValueError(f"order={self.order!r} must be 'score_topk' or 'topk_score'")
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group={self.topk_group} must lie in [1, n_group={self.n_group}]")
        if self.n_group > 1 and self.order == "topk_score":
            raise ValueError(f"n_group={self.n_group} chooses groups by score, which order='topk_score' has not yet")
        if self.weight_on_input and self.top_k != 1:
            raise ValueError(f"weight_on_input=True needs top_k=1, not {self.top_k}")
        if self.n_identity < 0:
            raise ValueError(f"n_identity={self.n_identity} must not be negative")

    def check_experts(self, experts: int) -> None:
        """Raises ValueError unless the groups and top_k fit that many experts (identity ones included)."""
        if experts % self.n_group:
            raise ValueError(f"n_group={self.n_group} does not divide {experts} experts")
        available = self.topk_group * experts // self.n_group
        if self.top_k > available:
            raise ValueError(f"top_k={self.top_k} is more than the {available} experts that routing leaves")
        if self.n_identity >= experts:
            raise ValueError(f"n_identity={self.n_identity} leaves none of {experts} experts")


def _place(routed: Routed, logits: Any, *_: Any, **__: Any) -> Routed:
    return jax.tree.map(lambda _: PartitionSpec(*spec_of(logits)[:-1]), routed)


@automatic_inside(_place)
def route(logits: Array, routing: Routing, *, bias: Array | None = None) -> Routed:
    """Each token's experts and weights.

    Ties go to the lowest index. NaN logits give distinct ids in range, and NaN weights in that row only.

    Args:
      logits: (..., E), any float dtype; computed in float32. With identity experts, E counts them.
      routing: how to decide.
      bias: (E,), DeepSeek-V3's e_score_correction_bias: added to the scores to choose, not to weigh.

    Returns:
      Routed, k = routing.top_k. On a mesh with explicit axes, sharded as the leading axes of logits are.

    Raises:
      ValueError: shapes, groups or top_k that do not fit; TypeError: dtypes.
    """
    if not isinstance(routing, Routing):
        raise TypeError(f"routing={routing!r} must be a Routing")
    logits = as_array("logits", logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits has dtype {logits.dtype}, but router logits are floating point")
    if logits.ndim < 1:
        raise ValueError("logits has shape (), but it is (..., E)")
    experts = logits.shape[-1]
    routing.check_experts(experts)
    if bias is not None:
        if routing.order == "topk_score":
            raise ValueError("bias is given, but it corrects scores, which order='topk_score' has only after choosing")
        bias = as_array("bias", bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias has dtype {bias.dtype}, but it is floating point")
        check_shape("bias", bias, (experts,), "(E,)")
    logits = logits.astype(jnp.float32)
    if routing.order == "topk_score":
        chosen, ids = lax.top_k(logits, routing.top_k)
        weights = _score(chosen, routing.score)
    else:
        scores = _score(logits, routing.score)
        choice = scores if bias is None else scores + jnp.broadcast_to(bias.astype(jnp.float32), scores.shape)
        if routing.n_group > 1:
            choice = _keep_best_groups(choice, routing, by_best_two=bias is not None)
        _, ids = lax.top_k(choice, routing.top_k)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
    ids = ids.astype(jnp.int32)
    if routing.renormalize:
        weights = _renormalized(weights)
    weights = weights * routing.scale
    if not routing.n_identity:
        return Routed(weights, ids, None)
    identity = ids >= experts - routing.n_identity
    identity_weight = jnp.sum(jnp.where(identity, weights, 0), axis=-1)
    return Routed(jnp.where(identity, 0, weights), jnp.where(identity, -1, ids), identity_weight)


def _score(logits: Array, score: str) -> Array:
    if score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if score == "sigmoid" else _sqrt_softplus(logits)


def _sqrt_softplus(x: Array) -> Array:
    """sqrt(log(1 + exp(x))).

    Far below zero it is exp(x / 2), which keeps its value and its slope where exp(x) underflows under the root.
    """
    low = x < -20
    return jnp.where(low, jnp.exp(x / 2), jnp.sqrt(jax.nn.softplus(jnp.where(low, 0, x))))


def _renormalized(weights: Array) -> Array:
    """Weights (..., k) over their sum + 1e-20.

    Both are multiplied by a power of two that brings the sum near 1. The quotient stays the same, bit for bit, but its
    derivatives have the sum's square below, which underflows for sums such as 1e-20.
    """
    total = jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    unit = lax.stop_gradient(bits.pow2(-jnp.minimum(bits.exponent(total), 126)))
    return weights * unit / (total * unit)


def _keep_best_groups(choice: Array, routing: Routing, *, by_best_two: bool) -> Array:
    """``choice`` with -inf for the experts of every group that is not among the best."""
    grouped = choice.reshape(*choice.shape[:-1], routing.n_group, choice.shape[-1] // routing.n_group)
    best = lax.top_k(grouped, min(2 if by_best_two else 1, grouped.shape[-1]))[0]
    _, kept = lax.top_k(jnp.sum(best, axis=-1), routing.topk_group)
    keep = jnp.any(jax.nn.one_hot(kept, routing.n_group, dtype=jnp.bool_), axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(choice.shape)
