"""The public operations: validate, select, call."""

from jmoe.ops.explain import explain
from jmoe.ops.linear import linear
from jmoe.ops.moe import batched_experts, fused_moe
from jmoe.ops.prepare import prepare
from jmoe.ops.routing import Routed, Routing, route
from jmoe.ops.warmup import warmup

__all__ = ["Routed", "Routing", "batched_experts", "explain", "fused_moe", "linear", "prepare", "route", "warmup"]
