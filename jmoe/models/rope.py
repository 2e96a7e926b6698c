"""Rotary embeddings, and how YaRN stretches them for contexts longer than those of training."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): wavelengths that turn often within the training context stay, others are stretched.

    Between the dimension that turns ``beta_fast`` times within ``original_max_position_embeddings`` tokens and the one
    that turns ``beta_slow`` times, frequencies go linearly from f to f / ``factor``.

    Attributes:
      factor: by how much the context is longer, at least 1.
      original_max_position_embeddings: tokens of the training context.
      beta_fast, beta_slow: turns.
      truncate: the two dimensions are rounded outwards to integers.
      attention_factor: multiplies queries and keys both; None is 0.1 ln(factor) + 1.

    Raises:
      ValueError: a number that is not positive, a factor below 1, or turns that do not decrease.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if name == "attention_factor" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} must be a positive number")
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate={self.truncate!r} must be true or false")
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} must be at least 1")
        if self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must not be less than beta_slow={self.beta_slow}")

    @property
    def scale(self) -> float:
        """What multiplies queries and keys."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else float(self.attention_factor)

    def stretched(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The frequencies (d,), radians a token, of wavelengths to the base ``theta``, with the long ones stretched."""
        half = len(frequencies)
        low, high = (self._dimension(turns, half, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        ramp = np.clip((np.arange(half) - low) / (high - low if high != low else 1e-3), 0, 1)
        return frequencies * (1 - ramp + ramp / self.factor)

    def _dimension(self, turns: float, half: int, theta: float) -> float:
        """The dimension whose wave turns that many times in the training context."""
        return half * math.log(self.original_max_position_embeddings / (2 * math.pi * turns)) / math.log(theta)


def rotate(x: Array, positions: Array, theta: float, scaling: Yarn | None = None) -> Array:
    """Rotary embedding, the halves of a head forming the pairs: x (B, S, heads, head_dim), positions (S,)."""
    half = x.shape[-1] // 2
    frequencies, scale = theta ** -(np.arange(half) / half), 1.0
    if scaling is not None:
        frequencies, scale = scaling.stretched(frequencies, theta), scaling.scale
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)
    cos, sin = (jnp.float32(scale) * f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
