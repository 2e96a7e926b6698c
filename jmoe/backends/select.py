"""The selector: a pure function from (operation, device, settings) to an implementation and the reasons."""

from types import ModuleType

import jax

from jmoe.arguments import check_type
from jmoe.backends import reference, triton, xla
from jmoe.backends.spec import Considered, DeviceSpec, OpSpec, Plan, Selection
from jmoe.config import config

IMPLEMENTATIONS: dict[str, ModuleType] = {module.NAME: module for module in (triton, xla, reference)}
"""In order of preference."""


def current_device() -> DeviceSpec:
    """The device to select for: ``jmoe.config.device``, else JAX's default device, else its first one."""
    if config.device is not None:
        try:
            return as_device(config.device)
        except (ValueError, TypeError) as error:
            raise type(error)(f"jmoe.config.device (or JMOE_DEVICE): {error}") from error
    default = getattr(jax.config, "jax_default_device", None)
    if default is None or isinstance(default, str):
        default = jax.devices(default)[0]
    return DeviceSpec.of(default)


def as_device(device: DeviceSpec | jax.Device | str | None) -> DeviceSpec:
    """A DeviceSpec from itself, a JAX device, a known name (``"h100"``), or None for the current one."""
    if device is None:
        return current_device()
    if isinstance(device, DeviceSpec):
        return device
    if isinstance(device, str):
        return DeviceSpec.named(device)
    if isinstance(device, jax.Device):
        return DeviceSpec.of(device)
    raise TypeError(f"device={device!r} must be a DeviceSpec, a JAX device, the name of a known one, or None")


def select(
    op_spec: OpSpec,
    device: DeviceSpec | jax.Device | str | None = None,
    *,
    implementation: str | None = None,
) -> Selection:
    """The implementation for an operation on a device, here or not.

    Args:
      op_spec: the operation.
      device: a DeviceSpec, a JAX device, a known name such as ``"h100"``, or None for the current one.
      implementation: take this one or fail; None is ``jmoe.config.implementation``, or else the first that can.

    Returns:
      The Selection; ``considered`` lists every implementation in order with the reason why not.

    Raises:
      TypeError: ``op_spec`` is none, or ``device`` no device.
      ValueError: an unknown name.
      NotImplementedError: the one asked for cannot serve, with its reason.
      ExceptionGroup: none can serve; it holds every reason.
    """
    check_type("op_spec", op_spec, OpSpec, "an OpSpec; jmoe.explain shows those of a function's calls")
    spec = as_device(device)
    if op_spec.accumulation is None:
        op_spec = op_spec.replace(accumulation=op_spec.default_accumulation)
    asked = implementation if implementation is not None else config.implementation
    if asked is not None and asked not in tuple(IMPLEMENTATIONS):
        origin = "" if implementation is not None else "; it is set by jmoe.config or JMOE_IMPLEMENTATION"
        raise ValueError(
            f"implementation={asked!r} is unknown; it is one of {', '.join(IMPLEMENTATIONS)}, or None{origin}"
        )
    plans: dict[str, Plan] = {}
    refusals: dict[str, NotImplementedError] = {}
    for name, module in IMPLEMENTATIONS.items():
        try:
            plans[name] = module.plan(op_spec, spec, explicit=name == asked)
        except NotImplementedError as refusal:
            # Without its traceback, whose frames would keep the callers' arrays alive until a garbage collection.
            refusals[name] = refusal.with_traceback(None)
    considered = tuple(
        Considered(name, name in plans, "" if name in plans else str(refusals[name])) for name in IMPLEMENTATIONS
    )
    if asked is not None:
        if asked in refusals:
            able = f"; {' and '.join(plans)} can" if plans else ""
            raise NotImplementedError(
                f"implementation={asked!r} cannot serve {op_spec.describe()} on {spec.describe()}: "
                f"{refusals[asked]}{able}"
            )
        return _selection(asked, "asked for by name", plans[asked], considered)
    if not plans:
        raise ExceptionGroup(
            f"no implementation serves {op_spec.describe()} on {spec.describe()}",
            [NotImplementedError(f"{name}: {refusal}") for name, refusal in refusals.items()],
        )
    chosen = next(iter(plans))
    passed_over = [f"{c.implementation}: {c.reason}" for c in considered[: list(IMPLEMENTATIONS).index(chosen)]]
    reason = "first in order that can" + (f" ({'; '.join(passed_over)})" if passed_over else "")
    return _selection(chosen, reason, plans[chosen], considered)


def _selection(name: str, reason: str, plan: Plan, considered: tuple[Considered, ...]) -> Selection:
    return Selection(
        implementation=name,
        reason=reason,
        considered=considered,
        tiles=plan.tiles,
        tiles_from=plan.tiles_from,
        accumulation=plan.accumulation,
        layout=plan.layout,
        launches=plan.launches,
        note=plan.note,
        workspace=plan.workspace,
    )
