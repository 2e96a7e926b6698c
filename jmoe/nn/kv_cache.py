"""``KVCache``: the keys and values of past tokens, as a pytree of fixed shape."""

from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec

from jmoe.arguments import COMPUTE_DTYPES, as_array, float_dtype
from jmoe.config import config
from jmoe.nn import options
from jmoe.sharding import automatic_inside, spec_of


def _specs(_: "KVCache", cache: "KVCache", *__: Array, **___: Array) -> "KVCache":
    """How an updated cache is sharded: as it was."""
    held = (cache.keys, cache.values, cache.position)
    return KVCache(*(PartitionSpec(*spec_of(leaf)) for leaf in held))  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one attention layer; ``update`` returns another one.

    Attributes:
      keys: (B, S_max, heads, head_dim) bfloat16, float16 or float32; entries from ``position`` on are not valid.
      values: the same.
      position: int32 (), how many tokens are held.
    """

    keys: Array
    values: Array
    position: Array

    @classmethod
    def init(
        cls,
        batch: int,
        max_len: int,
        heads: int,
        head_dim: int,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ) -> Self:
        """An empty cache for ``max_len`` tokens.

        Raises:
          TypeError: a dtype that is neither bfloat16, float16 nor float32, or an extent that is no integer;
          ValueError: one that is negative, or no heads.
        """
        dtype = float_dtype("dtype", dtype, COMPUTE_DTYPES)
        shape = (
            options.extent("batch", batch, least=0),
            options.extent("max_len", max_len, least=0),
            options.extent("heads", heads),
            options.extent("head_dim", head_dim),
        )
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32))

    @property
    def max_len(self) -> int:
        return self.keys.shape[1]

    @automatic_inside(_specs)
    def update(self, keys: Array, values: Array) -> Self:
        """The cache with S more tokens.

        Args:
          keys, values: (B, S, heads, head_dim), cast to the cache's dtype.

        Raises:
          ValueError: shapes that do not fit, or S > S_max. That there is room left can only be checked at run time, and
            is under ``jmoe.config(check=True)``; without it, tokens beyond S_max overwrite the last ones. TypeError:
            what is no array.
        """
        keys, values = as_array("keys", keys), as_array("values", values)
        batch, max_len, heads, head_dim = self.keys.shape
        for name, new in (("keys", keys), ("values", values)):
            if new.ndim != 4 or (new.shape[0], *new.shape[2:]) != (batch, heads, head_dim) or new.shape[1] > max_len:
                expected = f"({batch}, S <= {max_len}, {heads}, {head_dim})"
                raise ValueError(f"{name} has shape {tuple(new.shape)}, but this cache takes {expected}")
        if keys.shape != values.shape:
            raise ValueError(f"keys has shape {keys.shape} and values {values.shape}, but they are of the same tokens")
        end = self.position + jnp.int32(keys.shape[1])
        if config.check:
            checkify.check(end <= max_len, f"the cache holds {max_len} tokens, and is asked to hold more")
        zero = jnp.int32(0)
        start = (zero, self.position, zero, zero)
        return replace(
            self,
            keys=lax.dynamic_update_slice(self.keys, keys.astype(self.keys.dtype), start),
            values=lax.dynamic_update_slice(self.values, values.astype(self.values.dtype), start),
            position=end,
        )

    def mask(self, queries: int) -> Array:
        """Which entries each of the last ``queries`` tokens may attend to, itself included: bool (queries, S_max).

        Raises:
          ValueError: a negative number; TypeError: no integer.
        """
        queries = options.extent("queries", queries, least=0)
        query = self.position - jnp.int32(queries) + jnp.arange(queries, dtype=jnp.int32)
        return jnp.arange(self.max_len, dtype=jnp.int32) <= query[:, None]
