"""Operations over the devices of a mesh."""

from jmoe.parallel.placement import expert_map, experts_on
from jmoe.parallel.tensor import fused_moe, linear, spread_tokens

__all__ = ["expert_map", "experts_on", "fused_moe", "linear", "spread_tokens"]
