"""What the selector works on: an operation (``OpSpec``), a device (``DeviceSpec``), and its answer (``Selection``).

All three are frozen, hashable values; a Selection is a static argument of everything compiled.
"""

import dataclasses
import functools
import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import Array

from jmoe.arguments import COMPUTE_DTYPES, check_type, float_dtype
from jmoe.backends.activation import Activation, ActivationParams
from jmoe.config import NOT_SPREAD, Shards
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe
from pallas_kernels.layouts import CANONICAL, Layout

Accumulation = Literal["exact", "fast"]
Op = Literal["linear", "moe", "batched_experts"]


def default_accumulation(recipe: Recipe) -> Accumulation:
    """What a call that asks for nothing gets: "fast" for FP8 operands with one scale over all of K, else "exact".

    MXFP4 weights are such operands, since their scales go into the codes' exponents.
    """
    weight, x = recipe.weight, recipe.input
    if weight is None or x is None or x.format not in ("e4m3", "e5m2"):
        return "exact"
    folded = weight.format == "e2m1" and weight.scale_dtype == "e8m0"
    one = weight.format in ("e4m3", "e5m2") and weight.block[1] == -1
    return "fast" if (one or folded) and x.block[1] == -1 else "exact"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """An operation with static shapes.

    Attributes:
      op: "linear", "moe" (fused_moe) or "batched_experts".
      recipe: how weight and activation are quantized.
      second_recipe: the same for w2 and the intermediate where they differ from w13 and x, else None.
      tokens: rows of x (M or T); rows an expert for batched_experts.
      hidden: K of the (first) product, H.
      features: N of a linear; unused for experts.
      experts: experts whose weights are here, E.
      global_experts: experts that tokens are routed to, E_global; more than ``experts`` where others are elsewhere.
      intermediate: I.
      top_k: slots a token, k.
      gated: w13 has two halves.
      dtype: dtype of x, by name; it is also what the intermediate is rounded to.
      out_dtype: dtype of the result, by name.
      activation: applied to a linear's result (or None), or between the two products.
      bias: any bias is given.
      weight_on_input: the router weight multiplies x before quantisation (k = 1).
      expert_map: ids are mapped to local slots.
      layers: extent of the stacked-layers axis that ``layer`` indexes, or None.
      quantized_input: x comes as a QTensor.
      accumulation: what the call asks for; None is the recipe's default.
      layout: arrangement of the weights.
      mesh: (axis, size) of each mesh axis larger than one over which XLA itself would partition the operation; axes
        that a surrounding shard_map has made manual are not listed.
      batch_invariant: a row's bits may not depend on the number of rows.
      shards: manual mesh axes over which activations are spread; measured scales are those of the whole.
    """

    op: Op
    recipe: Recipe
    tokens: int
    hidden: int
    second_recipe: Recipe | None = None
    features: int = 0
    experts: int = 0
    global_experts: int = 0
    intermediate: int = 0
    top_k: int = 0
    gated: bool = True
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    activation: Activation | None = None
    bias: bool = False
    weight_on_input: bool = False
    expert_map: bool = False
    layers: int | None = None
    quantized_input: bool = False
    accumulation: Accumulation | None = None
    layout: Layout = CANONICAL
    mesh: tuple[tuple[str, int], ...] = ()
    batch_invariant: bool = False
    shards: Shards = NOT_SPREAD

    def __post_init__(self) -> None:
        if self.op not in get_args(Op):
            raise ValueError(f"op={self.op!r} must be one of {', '.join(get_args(Op))}")
        check_type("recipe", self.recipe, Recipe, "a Recipe; jmoe.recipe makes one from its name")
        check_type("second_recipe", self.second_recipe, (Recipe, type(None)), "a Recipe or None")
        if self.accumulation not in (None, *get_args(Accumulation)):
            raise ValueError(f"accumulation={self.accumulation!r} must be 'exact', 'fast' or None")
        for name in ("tokens", "hidden", "features", "experts", "global_experts", "intermediate", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be an int of at least 0")
        for name in ("dtype", "out_dtype"):
            float_dtype(name, getattr(self, name), COMPUTE_DTYPES)

    @property
    def measures_across(self) -> bool:
        """Whether an activation's scale is measured over more than one device holds."""
        is_linear = self.op == "linear"
        schemes = [(self.recipe.input, is_linear)]
        if not is_linear:
            schemes.append(((self.second_recipe or self.recipe).input, True))
        for scheme, columns_are_spread in schemes:
            if scheme is None or scheme.static:
                continue
            of_tensor = scheme.block[0] == -1 or scheme.global_scale == "tensor"
            of_row = scheme.block[1] == -1 or scheme.global_scale is not None
            if (of_tensor and self.shards.rows) or (of_row and columns_are_spread and self.shards.columns):
                return True
        return False

    @property
    def default_accumulation(self) -> Accumulation:
        """What a call that asks for nothing gets: fast only where that is the default of both products."""
        defaults = {default_accumulation(r) for r in (self.recipe, self.second_recipe) if r is not None}
        return "exact" if "exact" in defaults else "fast"

    def replace(self, **changes: Any) -> "OpSpec":
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """One line: operation, recipe and shapes."""
        if self.op == "linear":
            shapes = f"M={self.tokens} N={self.features} K={self.hidden}"
        else:
            shapes = f"T={self.tokens} H={self.hidden} I={self.intermediate} E={self.experts}"
            shapes += f" k={self.top_k}" if self.op == "moe" else ""
        return f"{self.op} {self.recipe.name} {shapes} {self.dtype}"


_PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """The facts about a device that choices depend on.

    Attributes:
      name: what people call it.
      platform: "cpu", "cuda", "rocm", "tpu" or "other".
      compute_capability: CUDA's, times ten (90 for Hopper); 0 elsewhere.
      sm_count: streaming multiprocessors (cores on a CPU).
      memory: bytes.
      bandwidth: bytes/s of that memory, 0 where unknown.
    """

    name: str
    platform: str
    compute_capability: int = 0
    sm_count: int = 1
    memory: int = 0
    bandwidth: float = 0.0

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "what people call the device")
        if self.platform not in _PLATFORMS:
            raise ValueError(f"platform={self.platform!r} must be one of {', '.join(_PLATFORMS)}")
        for name, least in (("compute_capability", 0), ("sm_count", 1), ("memory", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be an int of at least {least}")
        if not isinstance(self.bandwidth, int | float) or not 0 <= self.bandwidth < math.inf:
            raise ValueError(f"bandwidth={self.bandwidth!r} must be bytes a second, finite, 0 where they are unknown")

    @property
    def has_fp8(self) -> bool:
        """Matrix units take FP8 operands."""
        return self.platform == "cuda" and self.compute_capability >= 89

    @property
    def has_fp4(self) -> bool:
        """Matrix units take FP4 operands with block scales."""
        return self.platform == "cuda" and self.compute_capability >= 100

    def describe(self) -> str:
        if self.platform == "cuda":
            return f"{self.name} (sm{self.compute_capability}, {self.sm_count} SMs, {self.memory / 1e9:.0f} GB)"
        return f"{self.name} ({self.sm_count} cores, {self.memory / 1e9:.0f} GB)"

    @classmethod
    def named(cls, name: str) -> "DeviceSpec":
        """A known device, here or not; ``cpu`` is this machine's.

        Raises:
          ValueError: an unknown name; TypeError: none.
        """
        check_type("name", name, str, "the name of a device, such as 'h100'")
        key = {spec.name.lower(): key for key, spec in DEVICES.items()}.get(
            name.lower(), name.lower().replace("-", "_")
        )
        if key == "cpu":
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            return cls(name="cpu", platform="cpu", sm_count=os.cpu_count() or 1, memory=memory)
        if key not in DEVICES:
            raise ValueError(f"device {name!r} is unknown; known devices are cpu, {', '.join(DEVICES)}")
        return DEVICES[key]

    @classmethod
    def of(cls, device: jax.Device) -> "DeviceSpec":
        """The facts that a JAX device tells of itself; memory bandwidth from the table of known devices."""
        if not hasattr(device, "device_kind"):
            raise TypeError(f"device={device!r} must be a JAX device")
        return _facts(device)


@functools.cache
def _facts(device: jax.Device) -> DeviceSpec:
    """Cached, since every call of an operation asks, and a GPU answers ``memory_stats`` slowly."""
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    platform = platform if platform in _PLATFORMS else "other"
    if platform == "cpu":
        return DeviceSpec.named("cpu")
    if platform == "cuda" and "rocm" in getattr(device.client, "platform_version", "").lower():
        platform = "rocm"
    capability = str(getattr(device, "compute_capability", "0.0"))
    major, _, minor = capability.partition(".")
    cc = int(major) * 10 + int(minor or 0) if platform == "cuda" else 0
    stats = device.memory_stats() or {}
    memory = int(stats.get("bytes_reservable_limit") or stats.get("bytes_limit") or 0)
    sm_count = int(getattr(device, "core_count", 1) or 1)
    alike = [d for d in DEVICES.values() if (d.compute_capability, d.sm_count) == (cc, sm_count)]
    nearest = min(alike, key=lambda d: abs(d.memory - memory), default=None)
    return DeviceSpec(
        name=device.device_kind,
        platform=platform,
        compute_capability=cc,
        sm_count=sm_count,
        memory=memory or (nearest.memory if nearest else 0),
        bandwidth=nearest.bandwidth if nearest else 0.0,
    )


def _cuda(name: str, cc: int, sms: int, gigabytes: float, terabytes_per_second: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        platform="cuda",
        compute_capability=cc,
        sm_count=sms,
        memory=int(gigabytes * 1e9),
        bandwidth=terabytes_per_second * 1e12,
    )


DEVICES: dict[str, DeviceSpec] = {
    key: _cuda(*facts)
    for key, facts in {
        "t4": ("NVIDIA T4", 75, 40, 16, 0.320),
        "a100": ("NVIDIA A100 80GB", 80, 108, 80, 2.039),
        "a100_40gb": ("NVIDIA A100 40GB", 80, 108, 40, 1.555),
        "l4": ("NVIDIA L4", 89, 58, 24, 0.300),
        "l40s": ("NVIDIA L40S", 89, 142, 48, 0.864),
        "rtx4090": ("NVIDIA GeForce RTX 4090", 89, 128, 24, 1.008),
        "h20": ("NVIDIA H20", 90, 78, 96, 4.0),
        "h100": ("NVIDIA H100 80GB", 90, 132, 80, 3.35),
        "h200": ("NVIDIA H200", 90, 132, 141, 4.8),
        "b200": ("NVIDIA B200", 100, 148, 180, 8.0),
        "rtx5090": ("NVIDIA GeForce RTX 5090", 120, 170, 32, 1.792),
    }.items()
}
"""Known devices, from their makers' data sheets: SMs, memory in GB, bandwidth in TB/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How an implementation would serve an operation.

    Attributes:
      tiles: (name, value) pairs, the implementation's own.
      tiles_from: what chose these: "heuristic", or what they were "tuned for"; "" where there are none.
      accumulation: "exact" or "fast".
      layout: the arrangement it wants weights in.
      launches: kernels a call launches, or None where XLA decides.
      note: what a user should know (an emulation, a repacking), or "".
      workspace: bytes of temporary memory that weights are expanded into, the most at a time; 0 where they are not.
    """

    tiles: tuple[tuple[str, Any], ...] = ()
    tiles_from: str = ""
    accumulation: Accumulation = "exact"
    layout: Layout = CANONICAL
    launches: int | None = None
    note: str = ""
    workspace: int = 0


@dataclass(frozen=True, slots=True)
class Considered:
    """One implementation that the selector looked at: accepted, or the reason why not."""

    implementation: str
    accepted: bool
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The selector's answer.

    Two are equal where they run the same program; why it was chosen does not count, so that a call compiles once
    whether its implementation was asked for by name or found.

    Attributes:
      implementation: the one taken.
      tiles, tiles_from, accumulation, layout, launches, note, workspace: its ``Plan``.
      considered: every implementation in order, accepted or with the reason why not.
      reason: why this one.
    """

    implementation: str
    reason: str = field(compare=False)
    considered: tuple[Considered, ...] = field(compare=False)
    tiles: tuple[tuple[str, Any], ...] = ()
    tiles_from: str = field(default="", compare=False)
    accumulation: Accumulation = "exact"
    layout: Layout = CANONICAL
    launches: int | None = None
    note: str = ""
    workspace: int = 0

    @property
    def why(self) -> str:
        """The reason, and what a user should know."""
        return "; ".join(filter(None, (self.reason, self.note)))

    def tile(self, name: str) -> Any:
        return dict(self.tiles)[name]


class LinearArgs(NamedTuple):
    """Arrays of a linear. x (M, K) or a QTensor; w (N, K) or QTensor, stacked (L, N, K) with ``layer``; bias (N,)."""

    x: Array | QTensor
    w: Array | QTensor
    bias: Array | None = None
    input_scale: Array | None = None
    layer: Array | None = None


class MoEArgs(NamedTuple):
    """Arrays of fused_moe, as its docstring gives them, with leading axes of x as one, T.

    ``topk_weights`` is float32; ``topk_ids`` and ``expert_map`` are int32 of any value, and ids count experts before
    the map; entries of ``activation_params`` are float32 (E,).
    """

    x: Array | QTensor
    w13: Array | QTensor
    w2: Array | QTensor
    topk_weights: Array
    topk_ids: Array
    b13: Array | None = None
    b2: Array | None = None
    input_scale: Array | None = None
    intermediate_scale: Array | None = None
    expert_map: Array | None = None
    layer: Array | None = None
    activation_params: ActivationParams | None = None


class BatchedArgs(NamedTuple):
    """Arrays of batched_experts, as its docstring gives them."""

    x: Array | QTensor
    counts: Array
    w13: Array | QTensor
    w2: Array | QTensor
    b13: Array | None = None
    b2: Array | None = None
    input_scale: Array | None = None
    intermediate_scale: Array | None = None
    layer: Array | None = None
    activation_params: ActivationParams | None = None
