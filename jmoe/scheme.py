"""How an array is quantized (``Scheme``) and how a product's two operands are (``Recipe``): frozen, hashable values."""

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jmoe.arguments import check_type
from jmoe.numerics import FORMATS, SCALE_DTYPES, Format

Block = tuple[int, int]


def _is_extent(value: Any) -> bool:
    """Whether it is an extent of a block: -1, or positive and no more than an array's extent can be."""
    return type(value) is int and (value == -1 or 0 < value < 2**31)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """One way to quantize an array (..., N, K).

    Attributes:
      format: element format, a key of ``numerics.FORMATS``.
      block: (rows, cols) that share one scale; -1 is the whole extent. (-1, -1) is per tensor, (1, -1) per channel or
        token, (1, g) a group, (128, 128) a block. Blocks never span leading axes; the last one may be ragged.
      scale_dtype: what scales are held in, a key of ``numerics.SCALE_DTYPES``.
      power_of_two: scales are rounded up to powers of two (always so for e8m0).
      scale_rounding: for e2m1 with e8m0 scales, how the shared exponent is found: "even" rounds the block's largest
        magnitude to e2m1's precision first, "floor" (OCP MX) truncates it.
      global_scale: a second float32 multiplier: None, one a "tensor" (matrix), or one a "token" (row).
      zero_point: codes are unsigned and value = (code - zero_point) * scale.
      static: for activations: the (global) scale is given, not measured.
    """

    format: str
    block: Block
    scale_dtype: str = "float32"
    power_of_two: bool = False
    scale_rounding: Literal["even", "floor"] = "even"
    global_scale: Literal["tensor", "token"] | None = None
    zero_point: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        if self.format not in tuple(FORMATS):
            raise ValueError(f"format={self.format!r} is unknown; known formats are {', '.join(FORMATS)}")
        if self.scale_dtype not in tuple(SCALE_DTYPES):
            raise ValueError(f"scale_dtype={self.scale_dtype!r} is unknown; it is one of {', '.join(SCALE_DTYPES)}")
        pair = isinstance(self.block, tuple) and len(self.block) == 2
        if not pair or not all(map(_is_extent, self.block)):
            raise ValueError(
                f"block={self.block!r} must be two ints (rows, cols), each positive or -1 for the whole extent, and "
                "below 2^31"
            )
        for name in ("power_of_two", "zero_point", "static"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.scale_rounding not in ("even", "floor"):
            raise ValueError(f"scale_rounding={self.scale_rounding!r} must be 'even' or 'floor'")
        if self.global_scale not in (None, "tensor", "token"):
            raise ValueError(f"global_scale={self.global_scale!r} must be None, 'tensor' or 'token'")
        if self.scale_dtype == "e8m0":
            object.__setattr__(self, "power_of_two", True)
        self._check_combination()

    def _check_combination(self) -> None:
        if (self.scale_dtype == "e4m3") != (self.global_scale is not None):
            raise ValueError(
                f"scale_dtype={self.scale_dtype!r} with global_scale={self.global_scale!r}: "
                "e4m3 scales come with a global scale, and only they do"
            )
        if self.format == "e2m1" and self.scale_dtype not in ("e8m0", "e4m3"):
            raise ValueError(f"e2m1 codes have e8m0 or e4m3 scales, not {self.scale_dtype}")
        if self.scale_rounding == "floor" and (self.format, self.scale_dtype) != ("e2m1", "e8m0"):
            raise ValueError(f"scale_rounding='floor' is for e2m1 codes with e8m0 scales, not {self.describe()}")
        if self.power_of_two and self.global_scale is not None:
            raise ValueError("power_of_two=True is for scales without a global scale")
        if self.zero_point and self.format not in ("int4", "int8"):
            raise ValueError(f"zero_point=True needs an integer format, not {self.format}")
        if self.zero_point and (self.power_of_two or self.global_scale is not None):
            raise ValueError("zero_point=True needs scales that are neither powers of two nor under a global scale")
        if self.global_scale is not None and self.block[0] != 1 and (self.static or self.global_scale == "token"):
            raise ValueError(
                f"block={self.block}: a global scale that is given, or one a token, needs blocks of one row"
            )
        if self.static and self.global_scale is None:
            if self.block not in ((-1, -1), (1, -1)):
                raise ValueError(
                    f"static=True needs one scale a tensor or a row, or a global scale, not block={self.block}"
                )
            if self.scale_dtype != "float32" or self.power_of_two or self.zero_point:
                raise ValueError(f"static=True takes a plain float32 scale, not {self.describe()}")

    @property
    def fmt(self) -> Format:
        return FORMATS[self.format]

    @property
    def weight_bits(self) -> int:
        """Bits of one element, without its share of scales."""
        return self.fmt.bits

    def replace(self, **changes: Any) -> "Scheme":
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """A short phrase such as ``e4m3 128x128 float32`` or ``int4 1x128 bfloat16 zero_point``."""
        rows, cols = ("all" if b == -1 else str(b) for b in self.block)
        parts = [self.format, "per tensor" if self.block == (-1, -1) else f"{rows}x{cols}", self.scale_dtype]
        if self.global_scale:
            parts.append(f"global per {self.global_scale}")
        parts += [flag for flag in ("power_of_two", "zero_point", "static") if getattr(self, flag)]
        if self.format == "e2m1" and self.scale_rounding == "floor":
            parts.append("floor")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a product's weight and activation are quantized; ``input`` None is weight-only, both None is unquantized."""

    name: str
    weight: Scheme | None
    input: Scheme | None = None

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "the recipe's name")
        for operand in ("weight", "input"):
            how = "a Scheme or None; jmoe.recipe makes a recipe from its name"
            check_type(operand, getattr(self, operand), (Scheme, type(None)), how)
        if self.weight is None and self.input is not None:
            raise ValueError(f"recipe {self.name!r} quantizes the activation but not the weight")
        if self.weight is not None and self.weight.static:
            raise ValueError(f"recipe {self.name!r}: static=True is for activations; a weight has its scale")

    def describe(self) -> str:
        if self.weight is None:
            return "unquantized"
        return f"{self.weight.describe()} x {self.input.describe() if self.input else 'unquantized activation'}"


def _fp8(block: Block, **options: Any) -> Scheme:
    return Scheme(format="e4m3", block=block, **options)


def _mx(fmt: str, **options: Any) -> Scheme:
    return Scheme(format=fmt, block=(1, 32), scale_dtype="e8m0", power_of_two=True, **options)


def _nvfp4(**options: Any) -> Scheme:
    return Scheme(format="e2m1", block=(1, 16), scale_dtype="e4m3", **options)


_TOKEN_FP8 = _fp8((1, -1))
_TOKEN_INT8 = Scheme(format="int8", block=(1, -1))


def _square(block: int | Block) -> Block:
    return (block, block) if isinstance(block, int) else block


def _fp8_block(
    block: int | Block = 128, power_of_two: bool = False, scale_dtype: str = "float32"
) -> tuple[Scheme, Scheme]:
    rows_cols = _square(block)
    weight = _fp8(rows_cols, power_of_two=power_of_two or scale_dtype == "e8m0", scale_dtype=scale_dtype)
    return weight, _fp8((1, rows_cols[1]), power_of_two=weight.power_of_two)


def _fp8_w8a16(block: int | Block = 128, scale_dtype: str = "float32") -> tuple[Scheme, None]:
    return _fp8(_square(block), power_of_two=scale_dtype == "e8m0", scale_dtype=scale_dtype), None


def _int(fmt: str, group: int, zero_point: bool, scale_dtype: str) -> Scheme:
    if not _is_extent(group):
        raise ValueError(
            f"group={group!r} must be a positive int, or -1 for one group over the whole of K, and below 2^31"
        )
    return Scheme(format=fmt, block=(1, group), zero_point=zero_point, scale_dtype=scale_dtype)


def _int4(group: int = 128, zero_point: bool = False, scale_dtype: str = "float32") -> tuple[Scheme, None]:
    return _int("int4", group, zero_point, scale_dtype), None


def _int4_with(input_scheme: Scheme) -> Callable[..., tuple[Scheme, Scheme]]:
    def build(group: int = 128, zero_point: bool = False, scale_dtype: str = "float32") -> tuple[Scheme, Scheme]:
        return _int("int4", group, zero_point, scale_dtype), input_scheme

    return build


def _int8_w8a16(group: int = -1, zero_point: bool = False, scale_dtype: str = "float32") -> tuple[Scheme, None]:
    return _int("int8", group, zero_point, scale_dtype), None


def _mxfp4_with(input_scheme: Scheme | None) -> Callable[..., tuple[Scheme, Scheme | None]]:
    def build(scale_rounding: str = "even") -> tuple[Scheme, Scheme | None]:
        return _mx("e2m1", scale_rounding=scale_rounding), input_scheme

    return build


def _fixed(weight: Scheme | None, input_scheme: Scheme | None) -> Callable[[], tuple[Scheme | None, Scheme | None]]:
    return lambda: (weight, input_scheme)


_NVFP4_WEIGHT = _nvfp4(global_scale="tensor")

_RECIPES: dict[str, Callable[..., tuple[Scheme | None, Scheme | None]]] = {
    "bf16": _fixed(None, None),
    "fp8_tensor": _fixed(_fp8((-1, -1)), _fp8((-1, -1))),
    "fp8_tensor_static": _fixed(_fp8((-1, -1)), _fp8((-1, -1), static=True)),
    "fp8_channel": _fixed(_fp8((1, -1)), _TOKEN_FP8),
    "fp8_block": _fp8_block,
    "fp8_w8a16": _fp8_w8a16,
    "mxfp8": _fixed(_mx("e4m3"), _mx("e4m3")),
    "mxfp4": _mxfp4_with(None),
    "mxfp4_a8": _mxfp4_with(_TOKEN_FP8),
    "mxfp4_mxfp8": _mxfp4_with(_mx("e4m3")),
    "mxfp4_a4": _mxfp4_with(_mx("e2m1")),
    "nvfp4": _fixed(_NVFP4_WEIGHT, _nvfp4(global_scale="tensor", static=True)),
    "nvfp4_per_token": _fixed(_NVFP4_WEIGHT, _nvfp4(global_scale="token")),
    "nvfp4_w4a16": _fixed(_NVFP4_WEIGHT, None),
    "int8": _fixed(Scheme(format="int8", block=(1, -1)), _TOKEN_INT8),
    "int8_w8a16": _int8_w8a16,
    "int4": _int4,
    "int4_fp8": _int4_with(_TOKEN_FP8),
    "int4_int8": _int4_with(_TOKEN_INT8),
}

RECIPES: tuple[str, ...] = tuple(_RECIPES)
"""The names that ``recipe`` knows."""


def _options(name: str) -> dict[str, Any]:
    code = _RECIPES[name].__code__
    return dict(zip(code.co_varnames[: code.co_argcount], _RECIPES[name].__defaults__ or (), strict=True))


def recipe(name: str, **options: Any) -> Recipe:
    """The recipe of that name, weight x activation; on a command line ``int4:group=32,zero_point``.

    Args:
      name: one of ``RECIPES``, optionally followed by ``:option=value,...`` (a bare option means True).
      **options: what the recipe lets one choose: ``group``, ``zero_point``, ``scale_dtype`` (int4*, int8_w8a16; group
        -1 is one group over K), ``block``, ``power_of_two``, ``scale_dtype`` (fp8_block), ``block``, ``scale_dtype``
        (fp8_w8a16; a block is (rows, cols) or one number for both), ``scale_rounding`` (mxfp4*).

    Raises:
      ValueError: an unknown name or option, an option given twice in the text, or a value that the scheme does not
        allow; TypeError: a name that is no string.
    """
    check_type("name", name, str, "a recipe's name, such as 'int4:group=32'")
    base, _, text = name.partition(":")
    if base not in _RECIPES:
        raise ValueError(f"recipe {base!r} is unknown; known recipes are {', '.join(RECIPES)}")
    known = _options(base)
    options = {**_parse(base, text), **options}
    for key in options:
        if key not in known:
            choice = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ValueError(f"recipe {base!r} has no option {key!r}; {choice}")
    weight, input_scheme = _RECIPES[base](**options)
    changed = [f"{k}={_text(options[k])}" for k in known if k in options and _text(options[k]) != _text(known[k])]
    return Recipe(name=base + (":" + ",".join(changed) if changed else ""), weight=weight, input=input_scheme)


def _parse(base: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, has_value, value = (part.strip() for part in item.partition("="))
        if key in options:
            raise ValueError(f"recipe {base!r} is given its option {key!r} twice, in {text!r}")
        options[key] = _value(value) if has_value else True
    return options


# Longer ones are no extents; Python refuses to read very long ones.
_INT = r"-?[0-9]{1,18}"


def _value(text: str) -> Any:
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if pair := re.fullmatch(f"({_INT})x({_INT})", text):
        return int(pair[1]), int(pair[2])
    return int(text) if re.fullmatch(_INT, text) else text


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return str(value[0]) if value[0] == value[1] else f"{value[0]}x{value[1]}"
    return str(value)


@functools.cache
def recipe_of(weight: Scheme | None, input_scheme: Scheme | None) -> Recipe:
    """The recipe with these two schemes: by its known name, with options, where it has one, else by a description."""
    if weight is None and input_scheme is not None:
        raise ValueError(f"a weight that is not quantized takes no quantized activation ({input_scheme.describe()})")
    for name in RECIPES:
        options = {} if weight is None else _options_of(weight, _options(name))
        try:
            known = recipe(name, **options)
        except ValueError:
            continue  # these options do not go with that name
        if (known.weight, known.input) == (weight, input_scheme):
            return known
    assert weight is not None  # bf16 is a known name
    name = weight.describe() + (f" x {input_scheme.describe()}" if input_scheme else " weight-only")
    return Recipe(name=name, weight=weight, input=input_scheme)


def _options_of(weight: Scheme, known: dict[str, Any]) -> dict[str, Any]:
    """The options among ``known`` that would give such a weight."""
    rows, cols = weight.block
    values = {
        "group": cols,
        "block": rows if rows == cols else weight.block,
        "zero_point": weight.zero_point,
        "scale_dtype": weight.scale_dtype,
        "power_of_two": weight.power_of_two and weight.scale_dtype != "e8m0",
        "scale_rounding": weight.scale_rounding,
    }
    return {key: values[key] for key in known}


def as_recipe(value: "Recipe | str") -> Recipe:
    """``value`` itself if it is a recipe, else the recipe it names."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str):
        return recipe(value)
    raise TypeError(f"recipe={value!r} must be a Recipe or the name of one")
