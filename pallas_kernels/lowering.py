"""The seam between kernels and Pallas-Triton: launching, and the operations that Pallas has no public name for.

This is the only file that imports ``jax.experimental.pallas.triton`` or ``jax._src``. Kernels are written against the
functions here, which mean the same in interpret mode (plain XLA, any device) and in Triton, on every JAX release that
is supported. What they add to Pallas:

- ``load`` and ``store`` address with 64 bits where an array is that large, and only there (scalar indices are widened,
  a tile's offsets are not unless they must be). In interpret mode, reading or writing outside the array without a mask
  gives NaN, so that tests see it; masked lanes may point anywhere.
- ``dot`` says how much of K the tensor core may sum before promotion to float32, the one switch that decides FP8
  speed on Hopper.
- ``reciprocal`` rounds correctly, ``erfc`` exists, ``round_to`` is not elided, ``histogram`` and ``gather`` stay in
  registers.

Two differences between the modes remain and kernels must not depend on them: ``jnp.maximum``, ``jnp.minimum`` and
reductions drop a NaN operand in Triton, and division by a non-constant is good to 2 ulp there.
"""

import functools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src.pallas import core as pallas_core
from jax._src.pallas.triton import lowering as tl
from jax._src.pallas.triton import pallas_call_registration
from jax._src.state import discharge
from jax._src.state.types import ReadEffect, WriteEffect
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend import core as jex
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as math_dialect
from jaxlib.triton import dialect as tt

WHOLE_K = 1 << 30
"""``max_num_imprecise_acc`` of a dot that leaves its whole K to the tensor core's accumulator."""

_INT32_MAX = 2**31 - 1
_DEPRECATION = "The Pallas Triton backend is deprecated"

Index = int | Array
Ref = Any


@dataclass(frozen=True)
class _TritonParams(plgpu.CompilerParams):
    """Pallas chooses a lowering by the exact type of these, so ours is in force for our kernels and no others."""


# catch_warnings changes a global of the process; kernels may be lowered in several threads.
_warnings_lock = threading.RLock()


def _lower_call(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Any:
    """Pallas-Triton's own lowering, without its notice of deprecation: this file is where a successor would go."""
    with _warnings_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_DEPRECATION, category=DeprecationWarning)
        return pallas_call_registration.pallas_call_lowering(ctx, *args, **params)


pallas_core.register_lowering_rule(_TritonParams, _lower_call, "gpu")


def compiler_params(num_warps: int, num_stages: int) -> plgpu.CompilerParams:
    """Parameters that choose Triton whatever Pallas' default is: warps a program and stages of the loads' pipeline."""
    return _TritonParams(num_warps=num_warps, num_stages=num_stages)


def kernel_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    interpret: bool = False,
    overwrites: bool = False,
    **static: Any,
) -> Callable[..., Any]:
    """A function of arrays (or trees) that launches ``kernel`` over ``grid``; inputs and outputs are whole arrays.

    Args:
      kernel: takes the inputs and then the outputs as refs, and ``static`` as keywords.
      name: of the kernel, as profilers show it.
      grid: programs along up to three axes, each at least 1.
      out_shape: ``jax.ShapeDtypeStruct``, or a tree of them.
      num_warps, num_stages: see ``compiler_params``.
      interpret: compute with XLA on any device, for tests.
      overwrites: the last input is what the outputs hold before, and where: what is not stored stays as it was.
      **static: the kernel's static arguments.
    """

    def aliases(arrays: tuple[Any, ...]) -> dict[int, int]:
        if not overwrites:
            return {}
        inputs, outputs = len(jax.tree.leaves(arrays)), len(jax.tree.leaves(out_shape))
        return {inputs - outputs + i: i for i in range(outputs)}

    call = functools.partial(
        pl.pallas_call,
        functools.partial(kernel, **static),
        grid=grid,
        compiler_params=compiler_params(num_warps, num_stages),
        interpret=interpret,
        name=name,
    )
    return lambda *arrays: call(out_shape=_varying_like(arrays, out_shape), input_output_aliases=aliases(arrays))(
        *arrays
    )


def _varying_like(arrays: Any, out_shape: Any) -> Any:
    """``out_shape`` saying, for shard_map, that it differs along the mesh axes along which any input does."""
    axes = frozenset[Any]().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays)))
    kind = jax.sharding.ManualAxisType(varying=axes)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=kind), out_shape)


def arange(n: int) -> Array:
    """0, 1, ..., n - 1 as int32, also under jax_enable_x64; ``n`` is a power of two."""
    return lax.iota(jnp.int32, n)


def loop(stop: Index, body: Callable[[Array, Any], Any], init: Any, *, start: Index = 0) -> Any:
    """``lax.fori_loop`` with an int32 counter; bounds may be dynamic."""
    lower, upper = (np.int32(b) if isinstance(b, int) else b for b in (start, stop))
    # A loop of one turn hands its body a counter of the default dtype.
    return lax.fori_loop(lower, upper, lambda i, carry: body(jnp.asarray(i, jnp.int32), carry), init)


def _primitive(
    name: str, meaning: Callable[..., Array], aval: Callable[..., ShapedArray], rule: Callable[..., Any]
) -> jex.Primitive:
    """A primitive computed by ``meaning`` outside Triton and lowered by ``rule`` in it."""
    primitive = jex.Primitive(name)
    primitive.def_impl(meaning)
    primitive.def_abstract_eval(aval)
    mlir.register_lowering(primitive, mlir.lower_fun(meaning, multiple_results=False))
    tl.register_lowering(primitive)(rule)
    return primitive


def _dot_meaning(a: Array, b: Array, acc: Array, *, max_num_imprecise_acc: int) -> Array:
    wide = jnp.int32 if acc.dtype == jnp.int32 else jnp.float32
    product = lax.dot_general(
        a.astype(wide),
        b.astype(wide),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    return acc + product


def _dot_aval(a: ShapedArray, b: ShapedArray, acc: ShapedArray, *, max_num_imprecise_acc: int) -> ShapedArray:
    if a.dtype != b.dtype or jnp.issubdtype(a.dtype, jnp.unsignedinteger):
        raise TypeError(f"dot of {a.dtype} and {b.dtype}: Triton's operands share a dtype that is not unsigned")
    if (a.shape[0], b.shape[0]) != acc.shape or a.shape[1] != b.shape[1]:
        raise ValueError(f"dot of {a.shape} and {b.shape} transposed does not add to an accumulator {acc.shape}")
    if min(*acc.shape, a.shape[1]) < 16:
        raise ValueError(f"dot of {a.shape} and {b.shape} transposed: no extent may be below 16")
    return ShapedArray(acc.shape, acc.dtype)


def _dot_rule(ctx: tl.LoweringRuleContext, a: Any, b: Any, acc: Any, *, max_num_imprecise_acc: int) -> Any:
    a_aval, _, acc_aval = ctx.avals_in
    precision = tt.InputPrecision.IEEE if a_aval.dtype == jnp.float32 else None
    acc = tl._bcast_to(tl._ensure_ir_value(acc, acc_aval), acc_aval.shape)
    return tt.dot(a, tt.trans(b, (1, 0)), acc, input_precision=precision, max_num_imprecise_acc=max_num_imprecise_acc)


_dot_p = _primitive("jmoe_dot", _dot_meaning, _dot_aval, _dot_rule)


def dot(a: Array, b: Array, acc: Array | None = None, *, max_num_imprecise_acc: int = WHOLE_K) -> Array:
    """``acc + a @ b.T`` on the tensor cores: a (M, K), b (N, K) of one dtype, acc (M, N) float32 (int32 for int8).

    Args:
      a, b: float8, bfloat16, float16, float32 (never TF32) or int8; every extent at least 16.
      acc: what to add to; zeros by default.
      max_num_imprecise_acc: for FP8 on Hopper, how much of K the tensor core sums (in about 22 bits) before the sum is
        promoted to float32. No other dtype and no other GPU has such a limit.
    """
    if acc is None:
        acc = jnp.zeros((a.shape[0], b.shape[0]), jnp.int32 if a.dtype == jnp.int8 else jnp.float32)
    return _dot_p.bind(a, b, acc, max_num_imprecise_acc=max_num_imprecise_acc)


_histogram_p = _primitive(
    "jmoe_histogram",
    lambda x, live, *, bins: (
        ((x[:, None] == arange(bins)[None]) & live[:, None]).astype(jnp.int32).sum(0, dtype=jnp.int32)
    ),
    lambda x, live, *, bins: ShapedArray((bins,), jnp.dtype(jnp.int32)),
    lambda ctx, x, live, *, bins: tt.histogram(
        ir.RankedTensorType.get([bins], ir.IntegerType.get_signless(32)), x, mask=live
    ),
)


def histogram(x: Array, live: Array, bins: int) -> Array:
    """How often each of 0..bins-1 occurs among the ``live`` entries of ``x`` (n,), int32 (bins,), in registers.

    Live entries are in range; ``n`` and ``bins`` are powers of two.
    """
    return _histogram_p.bind(x, live, bins=bins)


_gather_p = _primitive(
    "jmoe_gather",
    lambda table, index: table.at[index].get(mode="clip"),
    lambda table, index: ShapedArray(index.shape, table.dtype),
    lambda ctx, table, index: tt.gather(table, index, 0),
)


def gather(table: Array, index: Array) -> Array:
    """``table[index]`` between registers: table (n,), index (m,) int32, in range in every lane."""
    return _gather_p.bind(table, index)


_reciprocal_p = _primitive(
    "jmoe_reciprocal",
    lambda x: 1 / x,
    lambda x: ShapedArray(x.shape, x.dtype),
    lambda ctx, x: tt.precise_divf(tl._ones_like(x), x) if ctx.avals_in[0].shape else _scalar_reciprocal(x),
)


def _scalar_reciprocal(x: Any) -> Any:
    one = tl._full(ir.RankedTensorType.get([1], x.type), 1)
    quotient = tt.precise_divf(one, tl._splat(x, [1]))
    return tt.unsplat(quotient)


def reciprocal(x: Array) -> Array:
    """1/x of float32 ``x``, correctly rounded (a plain division in Triton is not)."""
    return _reciprocal_p.bind(x)


_fma_p = _primitive(
    "jmoe_fma",
    lambda a, b, c: a * b + c,
    lambda a, b, c: ShapedArray(c.shape, c.dtype),
    lambda ctx, a, b, c: math_dialect.fma(a, b, c),
)


def fma(a: Array, b: Array, c: Array) -> Array:
    """``a * b + c`` of float32 tiles, rounded once in Triton, which does not contract the two by itself.

    ``a`` and ``b`` broadcast to ``c``.
    """
    a, b = (jnp.broadcast_to(x, c.shape) for x in (a, b))
    return _fma_p.bind(a, b, c)


_times_or_nan_p = _primitive(
    "jmoe_times_or_nan",
    lambda x, factor, zero: jnp.where(jnp.abs(x) < np.float32(np.inf), x * factor, np.float32(np.nan)),
    lambda x, factor, zero: ShapedArray(x.shape, x.dtype),
    lambda ctx, x, factor, zero: math_dialect.fma(x, factor, arith.mulf(x, zero)),
)


def times_or_nan(x: Array, factor: Array) -> Array:
    """``x * factor`` of a float32 tile, NaN where ``x`` is not finite; ``factor``, finite, broadcasts to ``x``.

    In Triton x times 0 is added, which is NaN there, and else a zero of the product's sign: half of what it takes to
    compare and to choose.
    """
    return _times_or_nan_p.bind(x, jnp.broadcast_to(factor, x.shape), jnp.zeros_like(x))


_erfc_p = _primitive(
    "jmoe_erfc",
    lax.erfc,
    lambda x: ShapedArray(x.shape, x.dtype),
    tl._make_dispatch_table(
        "erfc",
        cuda=[tl._Extern([jnp.float32], "__nv_erfcf", jnp.float32)],
        rocm=[tl._Extern([jnp.float32], "__ocml_erfc_f32", jnp.float32)],
    ),
)


def erfc(x: Array) -> Array:
    """The complementary error function of float32 ``x``."""
    return _erfc_p.bind(x)


def _round_meaning(x: Array, *, dtype: Any) -> Array:
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def _round_rule(ctx: tl.LoweringRuleContext, x: Any, *, dtype: Any) -> Any:
    return tl._cast(tl._cast(x, jnp.float32, dtype), dtype, jnp.float32)


_round_p = _primitive("jmoe_round", _round_meaning, lambda x, *, dtype: ShapedArray(x.shape, x.dtype), _round_rule)


def round_to(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """float32 ``x`` rounded to the precision of bfloat16 or float16, still float32; nothing may elide it."""
    dtype = jnp.dtype(dtype)
    return x if dtype == jnp.float32 else _round_p.bind(x, dtype=dtype)


def _ptx_rule(ctx: tl.LoweringRuleContext, *args: Any, meaning: Any, dtype: Any, ptx: str, pack: int) -> Any:
    [aval] = ctx.avals_out
    inputs = sum(pack * a.dtype.itemsize // 4 for a in ctx.avals_in)
    constraints = ",".join(["=r"] * (pack * aval.dtype.itemsize // 4) + ["r"] * inputs)
    element = tl._dtype_to_ir_type(aval.dtype)
    result = ir.RankedTensorType.get(aval.shape, element) if aval.shape else element
    return tt.elementwise_inline_asm(
        [result], ptx, constraints=constraints, pure=True, packed_element=pack, args=list(args)
    )


_ptx_p = _primitive(
    "jmoe_ptx",
    lambda *args, meaning, dtype, ptx, pack: meaning(*args),
    lambda x, *others, meaning, dtype, ptx, pack: ShapedArray(x.shape, jnp.dtype(dtype)),
    _ptx_rule,
)


def packed_ptx(x: Array, meaning: Callable[..., Array], ptx: str, *others: Array, pack: int, dtype: Any) -> Array:
    """An elementwise function written in PTX for ``pack`` elements at a time, and ``meaning``, its jnp twin.

    Interpret mode runs ``meaning``, a GPU runs ``ptx``: tests on a GPU hold them to agree.

    Args:
      x: a tile of at least ``pack`` elements a thread.
      meaning: a module-level function of ``x`` and ``others``, or a partial of one that is made once.
      ptx: ``$0``, ``$1``, ... are the 32-bit registers of the result, then those of x, elements from the low bits up,
        then those of each of the others.
      *others: tiles of x's shape.
      pack: elements, a whole number of 32-bit registers of every tile.
      dtype: of the result.
    """
    return _ptx_p.bind(x, *others, meaning=meaning, dtype=jnp.dtype(dtype), ptx=ptx, pack=pack)


def _unchanged(x: Array, when: Array) -> Array:
    return x


def anew(values: Any, when: Array) -> Any:
    """int32 tiles and scalars as they are, of which compilers know neither that nor anything before scalar ``when``.

    What is computed of them is computed then, and not kept in registers from where the same was computed before.
    ``values`` is a tree, whose Python ints stay.
    """

    def one(x: Array | int) -> Array | int:
        if isinstance(x, int):
            return x
        return packed_ptx(x, _unchanged, "mov.b32 $0, $1;", jnp.broadcast_to(when, x.shape), pack=1, dtype=x.dtype)

    return jax.tree.map(one, values)


def _join_rule(ctx: tl.LoweringRuleContext, a: Any, b: Any) -> Any:
    [aval] = ctx.avals_out
    return tt.join(ir.RankedTensorType.get(aval.shape, tl._dtype_to_ir_type(aval.dtype)), a, b)


_join_p = _primitive(
    "jmoe_join",
    lambda a, b: jnp.stack([a, b], axis=-1),
    lambda a, b: ShapedArray((*a.shape, 2), a.dtype),
    _join_rule,
)


def join(a: Array, b: Array) -> Array:
    """``jnp.stack([a, b], axis=-1)`` of two tiles of one shape and dtype, without moving data between threads."""
    return _join_p.bind(a, b)


@dataclass(frozen=True)
class _Operands:
    """How a memory operation's flat operands are grouped: the ref, ``indices`` indices, then what is there."""

    indices: int
    value: bool
    mask: bool
    other: bool

    def split(self, flat: Sequence[Any]) -> tuple[Any, tuple[Any, ...], Any, Any, Any]:
        """Ref, indices, value, mask and other, the last three None where absent."""
        rest = list(flat[1 + self.indices :])
        value, mask, other = (rest.pop(0) if there else None for there in (self.value, self.mask, self.other))
        return flat[0], tuple(flat[1 : 1 + self.indices]), value, mask, other


def load(ref: Ref, indices: Sequence[Index], *, mask: Array | None = None, other: float | None = None) -> Array:
    """``ref[indices]``, gathered.

    Args:
      ref: a kernel's argument, of any size.
      indices: one int32 index an axis (or Python int), not negative; they broadcast together to the result's shape.
      mask: bool, broadcasts to the result's shape; lanes where it is False are not read.
      other: the value of lanes that are not read; undefined where it is None.
    """
    operands, how = _flatten(ref, indices, None, mask, other)
    return _load_p.bind(*operands, how=how)


def store(ref: Ref, indices: Sequence[Index], value: Array, *, mask: Array | None = None) -> None:
    """Writes ``value`` to ``ref[indices]``; see ``load``. Lanes where ``mask`` is False are not written."""
    operands, how = _flatten(ref, indices, value, mask, None)
    _store_p.bind(*operands, how=how)


def _flatten(
    ref: Ref, indices: Sequence[Index], value: Array | None, mask: Array | None, other: float | None
) -> tuple[list[Any], _Operands]:
    if len(indices) != len(ref.shape):
        raise ValueError(f"{len(indices)} indices for a ref of shape {ref.shape}: there is one an axis")
    if other is not None and mask is None:
        raise ValueError(f"other={other} is given without a mask")
    operands = [ref, *(jnp.int32(i) if isinstance(i, int) else i for i in indices)]
    extra = (value, mask, None if other is None else jnp.asarray(other, ref.dtype))
    return [*operands, *(e for e in extra if e is not None)], _Operands(len(indices), *(e is not None for e in extra))


def _access_shape(avals: Sequence[ShapedArray], how: _Operands) -> tuple[int, ...]:
    _, indices, _, mask, _ = how.split(avals)
    if any(i.dtype != jnp.int32 for i in indices):
        raise TypeError(f"indices have dtypes {[str(i.dtype) for i in indices]}, but they are int32")
    shape = np.broadcast_shapes(*(i.shape for i in indices))
    if mask is not None and np.broadcast_shapes(mask.shape, shape) != shape:
        raise ValueError(f"mask of shape {mask.shape} does not broadcast to {shape}")
    return shape


def _load_aval(*avals: Any, how: _Operands) -> tuple[ShapedArray, set[Any]]:
    return ShapedArray(_access_shape(avals, how), avals[0].dtype), {ReadEffect(0)}


def _store_aval(*avals: Any, how: _Operands) -> tuple[list[ShapedArray], set[Any]]:
    shape, value = _access_shape(avals, how), how.split(avals)[2]
    if value.dtype != avals[0].dtype or value.shape != shape:
        raise TypeError(f"a value {value.str_short()} does not fit indices of shape {shape} in {avals[0].str_short()}")
    return [], {WriteEffect(0)}


_load_p = jex.Primitive("jmoe_load")
_load_p.def_effectful_abstract_eval(_load_aval)
_store_p = jex.Primitive("jmoe_store")
_store_p.multiple_results = True
_store_p.def_effectful_abstract_eval(_store_aval)


def _poison(dtype: Any) -> Any:
    return np.asarray(np.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min, dtype)


def _in_bounds(ref: Array, indices: Sequence[Array]) -> Array:
    return functools.reduce(jnp.logical_and, [(i >= 0) & (i < n) for i, n in zip(indices, ref.shape, strict=True)])


def _discharge_load(operands: Sequence[Any], how: _Operands) -> tuple[list[Any], Array]:
    ref, indices, _, mask, other = how.split(operands)
    shape = np.broadcast_shapes(*(i.shape for i in indices))
    live = jnp.broadcast_to(True if mask is None else mask, shape)
    good = _in_bounds(ref, indices)
    found = ref[tuple(jnp.where(good, i, 0) for i in indices)]
    found = jnp.where(good, found, _poison(ref.dtype))
    return [None] * len(operands), jnp.where(live, found, _poison(ref.dtype) if other is None else other)


def _discharge_store(operands: Sequence[Any], how: _Operands) -> tuple[list[Any], list[Any]]:
    ref, indices, value, mask, _ = how.split(operands)
    live = jnp.broadcast_to(True if mask is None else mask, value.shape)
    good = _in_bounds(ref, indices)
    where = [jnp.where(live & good, i, n) for i, n in zip(indices, ref.shape, strict=True)]
    written = ref.at[tuple(where)].set(value, mode="drop")
    astray = jnp.any(live & ~good)
    return [jnp.where(astray, _poison(ref.dtype), written), *[None] * (len(operands) - 1)], []


if jax.__version_info__ < (0, 11):

    @discharge.register_discharge_rule(_load_p)
    def _discharge_load_rule(in_avals: Any, out_avals: Any, *operands: Any, how: _Operands) -> Any:
        return _discharge_load(operands, how)

    @discharge.register_discharge_rule(_store_p)
    def _discharge_store_rule(in_avals: Any, out_avals: Any, *operands: Any, how: _Operands) -> Any:
        return _discharge_store(operands, how)

else:

    @discharge.register_discharge_rule(_load_p)
    def _discharge_load_rule(ctx: Any, *operands: Any, how: _Operands) -> Any:
        return _discharge_load(operands, how)

    @discharge.register_discharge_rule(_store_p)
    def _discharge_store_rule(ctx: Any, *operands: Any, how: _Operands) -> Any:
        return _discharge_store(operands, how)


def _scaled(index: Any, stride: int, wide: bool) -> Any:
    """``index * stride``, in 64 bits where ``wide``."""
    if wide:
        index = tl._ir_cast(index, ir.IntegerType.get_signless(64), signed=True)
    return index if stride == 1 else tl._mul(index, tl._full(index.type, stride))


def _pointers(ctx: tl.LoweringRuleContext, pointer: Any, indices: Sequence[Any], shape: Sequence[int]) -> Any:
    """Pointers to ``ref[indices]``, broadcast to ``shape``.

    Scalar indices move the base, in 64 bits where the array needs them; the others make offsets, in 32 bits unless
    one axis alone reaches beyond.
    """
    block = ctx.block_infos[0]
    assert block is not None  # a ref has one
    full = block.full_shape_dtype.shape
    avals = ctx.avals_in[1 : 1 + len(indices)]
    axes = []
    given = iter(zip(indices, avals, strict=True))
    for axis, extent in enumerate(block.block_shape):
        stride = math.prod(full[axis + 1 :])
        if isinstance(extent, pallas_core.Squeezed):  # an axis that vmap added
            index, index_shape = block.start_indices[axis], ()
        else:
            index, aval = next(given)
            index, index_shape = tl._ensure_ir_value(index, aval), aval.shape
        axes.append((index, index_shape, stride, (full[axis] - 1) * stride > _INT32_MAX))
    wide_base = math.prod(full) - 1 > _INT32_MAX
    for index, index_shape, stride, _ in axes:
        if not index_shape:
            pointer = tl._add(pointer, _scaled(index, stride, wide_base))
    tiles = [a for a in axes if a[1]]
    for index, index_shape, stride, wide in tiles:
        if wide:
            pointer = tl._add(tl._bcast_to(pointer, index_shape), _scaled(index, stride, True))
    narrow = [tl._bcast_to(_scaled(index, stride, False), shape) for index, _, stride, wide in tiles if not wide]
    pointer = tl._bcast_to(pointer, shape)
    return tl._add(pointer, functools.reduce(tl._add, narrow)) if narrow else pointer


def _load_rule(ctx: tl.LoweringRuleContext, *operands: Any, how: _Operands) -> Any:
    pointer, indices, _, mask, other = how.split(operands)
    *_, mask_aval, other_aval = how.split(ctx.avals_in)
    shape = ctx.avals_out[0].shape
    tl._check_tensor_size(shape)
    if mask is not None:
        mask = tl._bcast_to(tl._ensure_ir_value(mask, mask_aval), shape)
    if other is not None:
        other = tl._bcast_to(tl._ensure_ir_value(other, other_aval), shape)
    return tl._load(_pointers(ctx, pointer, indices, shape), mask=mask, other=other)


def _store_rule(ctx: tl.LoweringRuleContext, *operands: Any, how: _Operands) -> list[Any]:
    pointer, indices, value, mask, _ = how.split(operands)
    _, _, value_aval, mask_aval, _ = how.split(ctx.avals_in)
    shape = value_aval.shape
    tl._check_tensor_size(shape)
    value = tl._bcast_to(tl._ensure_ir_value(value, value_aval), shape)
    if mask is not None:
        mask = tl._bcast_to(tl._ensure_ir_value(mask, mask_aval), shape)
    tl._store(_pointers(ctx, pointer, indices, shape), value, mask=mask)
    return []


tl.register_lowering(_load_p)(_load_rule)
tl.register_lowering(_store_p)(_store_rule)
