"""Which device has which expert.

Every device has the same number of slots, ceil(E / devices); where these are more than the experts, some are spare.
"""

import numbers
from typing import Literal

import numpy as np

Strategy = Literal["linear", "round_robin"]


def experts_on(experts: int, devices: int, *, strategy: Strategy = "linear") -> np.ndarray:
    """The expert in each slot, int32 (devices, slots), -1 in a spare one.

    Stacking ``w13[experts_on(...).reshape(-1)]``, with zeros for -1, gives the weights in the order that
    ``jmoe.parallel.fused_moe`` takes them in, together with ``expert_map``.

    Args:
      experts: E.
      devices: how many devices they are spread over.
      strategy: "linear" fills one device after the other with successive experts; "round_robin" deals them out.

    Raises:
      ValueError: no experts or devices, or an unknown strategy; TypeError: numbers that are no integers.
    """
    for name, value in (("experts", experts), ("devices", devices)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}={value!r} must be an integer")
    if experts < 1 or devices < 1:
        raise ValueError(f"experts={experts} and devices={devices} must both be at least 1")
    slots = -(-experts // devices)
    order = np.arange(devices * slots, dtype=np.int32)
    order[order >= experts] = -1
    if strategy == "linear":
        return order.reshape(devices, slots)
    if strategy == "round_robin":
        return np.ascontiguousarray(order.reshape(slots, devices).T)
    raise ValueError(f"strategy={strategy!r} must be 'linear' or 'round_robin'")


def expert_map(experts: int, devices: int, *, strategy: Strategy = "linear") -> np.ndarray:
    """The slot of each expert among those of all devices, int32 (E,); arguments as for ``experts_on``."""
    placed = experts_on(experts, devices, strategy=strategy).reshape(-1)
    slots = np.empty((experts,), np.int32)
    slots[placed[placed >= 0]] = np.flatnonzero(placed >= 0)
    return slots
