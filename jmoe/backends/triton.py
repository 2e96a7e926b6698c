"""The rules of the Triton implementation: what it will serve, and on which devices.

Its kernels are not part of this version, so after all the rules that it states, the plan ends in that one.
"""

from jmoe.backends.spec import DeviceSpec, OpSpec, Plan
from jmoe.scheme import Recipe, Scheme

NAME = "triton"

_MIN_CAPABILITY = 80


def plan(op: OpSpec, device: DeviceSpec, *, explicit: bool) -> Plan:
    """The plan on that device; ``explicit`` where the user asked for it by name.

    Raises:
      NotImplementedError: with the first reason why not.
    """
    for reason in _refusals(op, device):
        raise NotImplementedError(reason)
    raise NotImplementedError("its kernels are not available yet in this version of jmoe")


def _refusals(op: OpSpec, device: DeviceSpec) -> list[str]:
    reasons = []
    if device.platform != "cuda":
        reasons.append(f"it needs an NVIDIA GPU, and {device.name} is a {device.platform} device")
    elif device.compute_capability < _MIN_CAPABILITY:
        reasons.append(f"it needs compute capability 8.0, and {device.name} has {device.compute_capability / 10:.1f}")
    else:
        for recipe in (op.recipe, op.second_recipe):
            reasons += [] if recipe is None else _recipe_refusals(recipe, device)
    if op.mesh:
        axes = ", ".join(f"{axis}={size}" for axis, size in op.mesh)
        reasons.append(
            f"on a mesh ({axes}) XLA would gather the weights to every device without a word; "
            "call it inside jax.shard_map over these axes"
        )
    if op.dtype not in ("bfloat16", "float16", "float32"):
        reasons.append(f"x is {op.dtype}, and it takes bfloat16, float16 or float32")
    return reasons


def _recipe_refusals(recipe: Recipe, device: DeviceSpec) -> list[str]:
    weight, x = recipe.weight, recipe.input
    if weight is None or x is None:
        return []
    if x.format == "e2m1" and not device.has_fp4:
        return [f"FP4 activations need FP4 matrix units (compute capability 10.0), and {device.name} has none"]
    if _is_fp8(x) and not device.has_fp8:
        kind, instead = ("W8A8 FP8", "W8A16 (fp8_w8a16)") if _is_fp8(weight) else ("an FP8 activation", "weight-only")
        return [
            f"{kind} needs compute capability 8.9, and {device.name} has {device.compute_capability / 10:.1f}; "
            f"{instead} recipes work there"
        ]
    return []


def _is_fp8(scheme: Scheme) -> bool:
    return scheme.format in ("e4m3", "e5m2")
