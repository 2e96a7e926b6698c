"""What a compressed-tensors configuration says: groups of modules, how each is quantized, and which modules are left.

Everything is checked when a checkpoint is opened: keys that are unknown, values that contradict each other, and
settings that nothing here serves. Source of keys, defaults and presets: the compressed-tensors library.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jmoe.checkpoint.methods.base import CheckpointError
from jmoe.scheme import Block, Scheme

_T = TypeVar("_T")

LAYOUTS: Mapping[str, frozenset[str]] = {
    "pack-quantized": frozenset({"packed"}),
    "int-quantized": frozenset({"int"}),
    "float-quantized": frozenset({"float"}),
    "naive-quantized": frozenset({"int", "float"}),
    "nvfp4-pack-quantized": frozenset({"nvfp4"}),
    "mxfp4-pack-quantized": frozenset({"mxfp4"}),
    "mxfp8-quantized": frozenset({"float"}),
}
"""The formats that are read, and how their tensors may lie (`compressed_tensors.Layout`)."""

_KEYS = frozenset(
    {
        "config_groups",
        "dequantize",
        "format",
        "global_compression_ratio",
        "ignore",
        "kv_cache_scheme",
        "quant_method",
        "quantization_status",
        "run_compressed",
        "sparsity_config",
        "transform_config",
        "version",
    }
)
_GROUP_KEYS = frozenset({"format", "input_activations", "output_activations", "targets", "weights"})
_ARGS_KEYS = frozenset(
    {
        "actorder",
        "block_structure",
        "dynamic",
        "group_size",
        "num_bits",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "scale_format",
        "strategy",
        "symmetric",
        "type",
        "zp_dtype",
    }
)
_MOST = 2**31  # no extent of a block reaches it
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_SCALE_KINDS = {
    "torch.uint8": "e8m0",
    "torch.float8_e8m0fnu": "e8m0",
    "torch.float8_e4m3fn": "e4m3",
    "torch.float32": "float",
    "torch.bfloat16": "float",
    "torch.float16": "float",
}


@dataclass(frozen=True)
class Args:
    """How weights or activations of a group are quantized.

    Attributes:
      where: the key that says so, for errors.
      kind: "int" or "float".
      bits: of an element.
      symmetric: without zero points.
      strategy: which elements share a scale, by its name.
      block: the same as (rows, columns), -1 for a whole extent; of a "token" or "attn_head" strategy (1, -1).
      dynamic: scales are measured (True), given (False), or measured under a global scale that is given ("local").
      ordered: columns find their group through an index (``actorder`` "group").
      scale: what scales are held in, "e8m0", "e4m3" or "float"; None where it is left open.
    """

    where: str
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    block: Block
    dynamic: bool | str
    ordered: bool
    scale: str | None

    def describe(self) -> str:
        return f"{self.kind} of {self.bits} bits with strategy {self.strategy!r}"


@dataclass(frozen=True)
class Group:
    """One of the ``config_groups``.

    Attributes:
      name: its key.
      targets: entries for the modules that it is for.
      weights: how they are quantized; None leaves them alone.
      input: how their activations are.
      format: the format that it or the whole configuration has; None where tensors decide.
    """

    name: str
    targets: tuple[str, ...]
    weights: Args | None
    input: Scheme | None
    format: str | None


class Entries(Generic[_T]):
    """Entries that mean modules, each with a value.

    An entry is the name of a module or its last components, ``re:`` and a regular expression that the beginning of the
    name matches, or the name of a class. Files do not say a module's class: what ends in Linear means every module
    with a weight, what begins with Embedding those whose name has "embed" in its last component, and others none.

    Args:
      key: where they stand in the configuration, for errors.
      entries: the entries with their values. Names come before patterns and these before classes; the first one wins.
    """

    def __init__(self, key: str, entries: Iterable[tuple[str, _T]]) -> None:
        self._names: dict[str, _T] = {}
        self._patterns: list[tuple[re.Pattern[str], str, _T]] = []
        self._classes: list[tuple[str, _T]] = []
        for entry, value in entries:
            if entry.startswith("re:"):
                try:
                    self._patterns.append((re.compile(entry[3:]), entry, value))
                except re.error as error:
                    raise CheckpointError(f"has {key} {entry!r}, which is no regular expression: {error}") from error
            elif is_class(entry):
                self._classes.append((entry, value))
            else:
                self._names.setdefault(entry, value)

    def find(self, module: str) -> tuple[str, _T] | None:
        """The entry that means this module, with its value."""
        parts = module.split(".")
        for i in range(len(parts)):
            if (name := ".".join(parts[i:])) in self._names:
                return name, self._names[name]
        for pattern, entry, value in self._patterns:
            if pattern.match(module):
                return entry, value
        for entry, value in self._classes:
            if entry.endswith("Linear") or (entry.startswith("Embedding") and "embed" in parts[-1]):
                return entry, value
        return None


def is_class(entry: str) -> bool:
    """Whether an entry is the name of a class and not that of a module."""
    return re.fullmatch(r"[A-Z]\w*", entry) is not None


def parse(config: Mapping[str, Any]) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """The groups and the ``ignore`` entries of a configuration.

    Raises:
      CheckpointError: a key that is unknown, a value that no such key has, or a setting that is not served; the
        sentence begins with "has", after whatever says where the configuration is.
    """
    _check_keys("", config, _KEYS)
    if (status := config.get("quantization_status")) not in (None, "compressed", "frozen"):
        raise CheckpointError(f"has quantization_status {status!r}, expected 'compressed'")
    for key, inner in (("sparsity_config", "format"), ("transform_config", "config_groups")):
        settings = config.get(key) or {}
        if not isinstance(settings, dict):
            raise CheckpointError(f"has {key} {settings!r}, expected an object")
        if settings.get(inner) not in (None, "dense", {}) or (settings and inner not in settings):
            raise CheckpointError(f"has {key} {settings!r}, expected none: such weights are not supported")
    _check_kv_cache(config.get("kv_cache_scheme"))
    whole = _format("format", config.get("format"), mixed=True)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"has config_groups {groups!r}, expected an object of groups")
    parsed = tuple(_group(name, group, whole) for name, group in groups.items())
    return parsed, _names("ignore", config.get("ignore") or [])


def _group(name: str, group: object, whole: str | None) -> Group:
    key = f"config_groups.{name}"
    if isinstance(group, list):
        group = {"targets": group, **_preset(key, name)}
    if not isinstance(group, dict):
        raise CheckpointError(f"has {key} {group!r}, expected an object, or a list of targets under a preset's name")
    _check_keys(f"{key}.", group, _GROUP_KEYS)
    targets = _names(f"{key}.targets", group.get("targets"))
    if group.get("output_activations") is not None:
        raise CheckpointError(f"has {key}.output_activations, expected none: outputs are not quantized here")
    weights = _weights(f"{key}.weights", group.get("weights"))
    given = group.get("input_activations")
    if given is not None and weights is None:
        raise CheckpointError(f"has {key}.input_activations without weights, expected both or weights alone")
    scheme = None if given is None else _input(_args(f"{key}.input_activations", given))
    if weights is not None and weights.ordered and scheme is not None:
        raise CheckpointError(f"has {key}.weights.actorder 'group' with input_activations, expected weights alone")
    own = _format(f"{key}.format", group.get("format"), mixed=False)
    return Group(name, targets, weights, scheme, own or whole)


def _weights(key: str, settings: object) -> Args | None:
    if settings is None:
        return None
    args = _args(key, settings)
    if args.dynamic is not False:
        raise CheckpointError(f"has {key}.dynamic {args.dynamic!r}, expected false for weights")
    if args.strategy in ("token", "attn_head"):
        raise CheckpointError(f"has {key}.strategy {args.strategy!r}, which no weight has")
    if args.kind == "float":
        if args.bits == 4:
            if (args.strategy, args.block[1]) not in (("tensor_group", 16), ("group", 32)):
                raise CheckpointError(
                    f"has {key} {args.describe()} and groups of {args.block[1]}, expected 'tensor_group' and 16 "
                    "(NVFP4) or 'group' and 32 (MXFP4)"
                )
        elif args.bits != 8:
            raise CheckpointError(f"has {key}.num_bits {args.bits} of type 'float', expected 4 or 8")
        elif args.strategy == "tensor_group":
            raise CheckpointError(f"has {key} {args.describe()}, expected that strategy only with 4 bits")
        if not args.symmetric:
            raise CheckpointError(f"has {key}.symmetric false with type 'float', expected true")
    elif args.strategy == "tensor_group":
        raise CheckpointError(f"has {key} {args.describe()}, expected that strategy only with type 'float'")
    elif not args.symmetric and args.strategy not in ("channel", "group"):
        raise CheckpointError(
            f"has {key}.symmetric false with strategy {args.strategy!r}, expected 'channel' or 'group'"
        )
    if args.ordered and (args.kind, args.strategy) != ("int", "group"):
        raise CheckpointError(f"has {key}.actorder 'group' with {args.describe()}, expected it with groups of integers")
    return args


def _input(args: Args) -> Scheme:
    """The scheme of activations."""
    key = args.where
    fmt = {("float", 8): "e4m3", ("int", 8): "int8", ("float", 4): "e2m1"}.get((args.kind, args.bits))
    if fmt is None:
        raise CheckpointError(f"has {key} {args.describe()}, which no operation takes: expected 8 bits, or float of 4")
    if not args.symmetric:
        raise CheckpointError(f"has {key}.symmetric false, expected true: activations have no zero points here")
    if args.ordered:
        raise CheckpointError(f"has {key}.actorder 'group', expected it only for weights")
    if fmt == "e2m1":
        if (args.strategy, args.block[1], args.dynamic) == ("tensor_group", 16, "local"):
            return Scheme(format=fmt, block=(1, 16), scale_dtype="e4m3", global_scale="tensor", static=True)
        if (args.strategy, args.block[1], args.dynamic) == ("group", 32, True):
            return Scheme(format=fmt, block=(1, 32), scale_dtype="e8m0")
    elif args.strategy == "tensor" and isinstance(args.dynamic, bool):
        return Scheme(format=fmt, block=(-1, -1), static=args.dynamic is False)
    elif args.strategy == "token" and args.dynamic is True:
        return Scheme(format=fmt, block=(1, -1))
    elif args.strategy == "group" and args.dynamic is True:
        return Scheme(format=fmt, block=args.block, scale_dtype="e8m0" if args.scale == "e8m0" else "float32")
    raise CheckpointError(
        f"has {key} {args.describe()}, block {args.block[0]}x{args.block[1]} and dynamic {args.dynamic!r}, which no "
        "operation takes"
    )


def _args(key: str, settings: object) -> Args:
    if not isinstance(settings, dict):
        raise CheckpointError(f"has {key} {settings!r}, expected an object")
    _check_keys(f"{key}.", settings, _ARGS_KEYS)
    kind = settings.get("type", "int")
    if kind not in ("int", "float"):
        raise CheckpointError(f"has {key}.type {kind!r}, expected 'int' or 'float'")
    bits = settings.get("num_bits", 8)
    if type(bits) is not int or not 1 <= bits <= 8:
        raise CheckpointError(f"has {key}.num_bits {bits!r}, expected 1 to 8")
    symmetric, dynamic = settings.get("symmetric", True), settings.get("dynamic", False)
    if not isinstance(symmetric, bool):
        raise CheckpointError(f"has {key}.symmetric {symmetric!r}, expected true or false")
    if not isinstance(dynamic, bool) and dynamic != "local":
        raise CheckpointError(f"has {key}.dynamic {dynamic!r}, expected true, false or 'local'")
    actorder = settings.get("actorder")
    if actorder not in (None, True, False, "group", "dynamic", "weight", "static"):
        raise CheckpointError(f"has {key}.actorder {actorder!r}, expected 'group', 'weight', 'static' or none")
    strategy, block = _block(key, settings)
    return Args(
        where=key,
        kind=kind,
        bits=bits,
        symmetric=symmetric,
        strategy=strategy,
        block=block,
        dynamic=dynamic,
        ordered=actorder in (True, "group", "dynamic"),
        scale=_scale(key, settings),
    )


def _block(key: str, settings: Mapping[str, Any]) -> tuple[str, Block]:
    """The strategy, which may follow from ``group_size``, and the block that it means."""
    size, strategy = settings.get("group_size"), settings.get("strategy")
    if size is not None and not (type(size) is int and (size == -1 or 0 < size < _MOST)):
        raise CheckpointError(f"has {key}.group_size {size!r}, expected a positive number, -1 or none")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in _STRATEGIES:
        raise CheckpointError(f"has {key}.strategy {strategy!r}, expected one of {', '.join(_STRATEGIES)}")
    if strategy == "group" and size == -1:
        strategy = "channel"
    if strategy in ("group", "tensor_group"):
        if size is None or size < 0:
            raise CheckpointError(f"has {key}.strategy {strategy!r} with group_size {size!r}, expected a positive one")
        return strategy, (1, size)
    if size is not None and size > 0:
        raise CheckpointError(f"has {key}.strategy {strategy!r} with group_size {size!r}, expected 'group' with it")
    if strategy != "block":
        return strategy, (-1, -1) if strategy == "tensor" else (1, -1)
    block = settings.get("block_structure")
    if isinstance(block, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", block):
        block = [int(extent) for extent in block.split("x")]
    if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and 0 < b < _MOST for b in block):
        raise CheckpointError(f"has {key}.block_structure {block!r}, expected two positive numbers (rows, columns)")
    return strategy, (block[0], block[1])


def _scale(key: str, settings: Mapping[str, Any]) -> str | None:
    dtype = settings.get("scale_dtype")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in _SCALE_KINDS):
        raise CheckpointError(f"has {key}.scale_dtype {dtype!r}, expected one of {', '.join(_SCALE_KINDS)} or none")
    return None if dtype is None else _SCALE_KINDS[dtype]


def _format(key: str, value: object, *, mixed: bool) -> str | None:
    if value is None or (mixed and value == "mixed-precision"):
        return None
    if not isinstance(value, str) or value not in LAYOUTS:
        raise CheckpointError(f"has {key} {value!r}, which is not supported; known are {', '.join(LAYOUTS)}")
    return value


def _check_kv_cache(settings: object) -> None:
    """A scheme of the KV cache says nothing of weights, but has to be one whose scales can be left aside."""
    if settings is None:
        return
    args = _args("kv_cache_scheme", settings)
    known = (args.kind, args.bits, args.symmetric, args.dynamic) == ("float", 8, True, False)
    if not known or args.strategy not in ("tensor", "attn_head"):
        raise CheckpointError(
            f"has kv_cache_scheme {args.describe()}, symmetric {args.symmetric} and dynamic {args.dynamic!r}, expected "
            "symmetric static float of 8 bits with strategy 'tensor' or 'attn_head'"
        )


def _check_keys(prefix: str, settings: Mapping[str, Any], known: frozenset[str]) -> None:
    for key in settings:
        if key not in known:
            raise CheckpointError(
                f"has the key {prefix}{key}, which is not known; known are {', '.join(sorted(known))}"
            )


def _names(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise CheckpointError(f"has {key} {value!r}, expected a list of names")
    return tuple(value)


def _integers(bits: int, activation: dict[str, Any] | None = None, *, symmetric: bool = True) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128, "symmetric": symmetric}
    return {"weights": weights, "input_activations": activation}


def _floats(bits: int, strategy: str, **options: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, **options}


_INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_INT8 = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "input_activations": _INT8_TOKEN}
_FP8_TOKEN = _floats(8, "token", dynamic=True)
_MX = {"group_size": 32, "scale_dtype": "torch.uint8"}
_NVFP4 = _floats(4, "tensor_group", group_size=16)

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "UNQUANTIZED": {},
    **{f"W{bits}A16": _integers(bits) for bits in range(2, 8)},
    **{f"W{bits}A8": _integers(bits, _INT8_TOKEN) for bits in range(2, 8)},
    "W4A16_ASYM": _integers(4, symmetric=False),
    "W4AFP8": _integers(4, _FP8_TOKEN),
    "W8A8": _INT8,
    "INT8": _INT8,
    "FP8": {"weights": _floats(8, "tensor"), "input_activations": _floats(8, "tensor")},
    "FP8_DYNAMIC": {"weights": _floats(8, "channel"), "input_activations": _FP8_TOKEN},
    "FP8_BLOCK": {
        "weights": _floats(8, "block", block_structure=[128, 128]),
        "input_activations": _floats(8, "group", group_size=128, dynamic=True),
    },
    "NVFP4A16": {"weights": _NVFP4},
    "NVFP4": {"weights": _NVFP4, "input_activations": {**_NVFP4, "dynamic": "local"}},
    "MXFP4A16": {"weights": _floats(4, "group", **_MX)},
    "MXFP4": {"weights": _floats(4, "group", **_MX), "input_activations": _floats(4, "group", dynamic=True, **_MX)},
    "MXFP8A16": {"weights": _floats(8, "group", **_MX)},
    "MXFP8": {"weights": _floats(8, "group", **_MX), "input_activations": _floats(8, "group", dynamic=True, **_MX)},
}


def _preset(key: str, name: str) -> Mapping[str, Any]:
    """The settings of a group that is given as a list of targets, under the name of a preset."""
    if name.upper() == "W8A16":
        raise CheckpointError(
            f"has {key} under the preset 'W8A16', which versions of the library read as one scale a row or as groups "
            "of 128: expected its settings in full"
        )
    if name.upper() not in _PRESETS:
        raise CheckpointError(f"has {key} as a list, but no preset has that name; known are {', '.join(_PRESETS)}")
    return _PRESETS[name.upper()]
