"""Operations over the devices of a mesh."""

from jmoe.parallel.axes import spread_tokens
from jmoe.parallel.placement import expert_map, experts_on
from jmoe.parallel.tensor import fused_moe, linear

__all__ = ["expert_map", "experts_on", "fused_moe", "linear", "spread_tokens"]
