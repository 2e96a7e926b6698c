"""Quantising activations to e4m3 or int8: one scale a token group, a token, or a tensor.

    scale = max(amax, floor) * (1/448),  code = e4m3(x * (1/scale))
    scale = max(amax, 1e-10) * (1/127),  code = int8(x * (1/scale))

``amax`` is over the finite elements that share the scale, ``floor`` is 1e-10 for groups, 1/512 for tokens and 1e-12 for
a tensor; in power-of-two mode the scale is the least power of two not below amax / 448 (or 127). The reciprocal is
rounded correctly and taken once a scale, so codes are those of any other implementation of these formulas. A non-finite
element becomes e4m3's NaN and changes no other; int8 has none, so its scale becomes NaN.

Each function also exists as the jobs it launches, for callers with something else to launch beside them.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import body, launch, lowering
from pallas_kernels.align import local_expert
from pallas_kernels.lowering import arange, load, store

ScaleDtype = Literal["float32", "e8m0"]

GROUP_FLOOR, TOKEN_FLOOR, TENSOR_FLOOR = 1e-10, 1 / 512, 1e-12

_TILE = 4096
"""Elements a program holds in registers: 16 a thread with 8 warps."""
_LARGEST_ROW = 8192
"""A row up to here is read once and kept; a longer one is read twice."""
_PARTIALS = 1024
_SMALL_TENSOR = 1 << 15
"""A tensor up to here is measured by every program for itself, which saves a launch."""
_F32_TINY = np.finfo(np.float32).tiny


def quantize_groups(
    x: Array,
    group: int,
    *,
    codes: DTypeLike = body.F8,
    power_of_two: bool = False,
    scale_dtype: ScaleDtype = "float32",
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Codes (M, K) of x (M, K), one scale for each ``group`` of a row's elements, in one launch.

    Args:
      x: bfloat16, float16 or float32.
      group: elements of K that share a scale, 1 to 8192; the last group may be ragged.
      codes: their dtype, float8_e4m3fn or int8.
      power_of_two: scales are powers of two.
      scale_dtype: "float32", or "e8m0" (uint8, and powers of two always).
      interpret: compute with XLA on any device, for tests.

    Returns:
      Codes (M, K); scales (M, ceil(K/group)).

    Raises:
      ValueError: ``group`` is out of range.
    """
    job = groups_job(x, group, codes=codes, power_of_two=power_of_two, scale_dtype=scale_dtype)
    if not x.size:
        return _zeros(job)
    [(code, scale)] = launch.run("quantize_groups", job, interpret=interpret)
    return code, scale


def groups_job(
    x: Array,
    group: int,
    *,
    codes: DTypeLike = body.F8,
    power_of_two: bool = False,
    scale_dtype: ScaleDtype = "float32",
) -> launch.Job:
    """The job of ``quantize_groups``, of an x that is not empty."""
    _check(x)
    m, k = x.shape
    if not 1 <= group <= _LARGEST_ROW:
        raise ValueError(f"group={group} must be between 1 and {_LARGEST_ROW}")
    width = body.pow2_at_least(group)
    groups = pl.cdiv(k, group)
    cols = min(body.pow2_at_least(groups), max(1, _TILE // width))
    rows = min(body.pow2_at_least(m), max(1, _TILE // (width * cols)))
    scale_type = jnp.uint8 if scale_dtype == "e8m0" else jnp.float32
    return launch.Job(
        kernel=_groups_kernel,
        programs=pl.cdiv(m, rows) * pl.cdiv(groups, cols),
        inputs=(x,),
        outputs=(jax.ShapeDtypeStruct((m, k), codes), jax.ShapeDtypeStruct((m, groups), scale_type)),
        static={
            "group": group,
            "tile": (rows, cols, width),
            "power_of_two": power_of_two or scale_dtype == "e8m0",
        },
    )


def _groups_kernel(
    program: Array,
    x_ref: Any,
    code_ref: Any,
    scale_ref: Any,
    *,
    group: int,
    tile: tuple[int, int, int],
    power_of_two: bool,
) -> None:
    m, k = x_ref.shape
    rows, cols, width = tile
    across = pl.cdiv(scale_ref.shape[1], cols)
    row = body.div(program, across) * rows + arange(rows)
    block = body.rem(program, across) * cols + arange(cols)
    lane = arange(width)
    column = block[:, None] * group + lane[None, :]
    inside = (row < m)[:, None, None] & ((lane < group)[None, :] & (column < k))[None, :, :]
    x = load(x_ref, (row[:, None, None], column[None, :, :]), mask=inside, other=0)
    code, scale = body.quantize_tile(
        x.astype(jnp.float32), 2, codes=code_ref.dtype, floor=GROUP_FLOOR, power_of_two=power_of_two
    )
    store(code_ref, (row[:, None, None], column[None, :, :]), code, mask=inside)
    if scale_ref.dtype == jnp.uint8:
        scale = body.encode_e8m0(scale)
    live = (row < m)[:, None] & (block < scale_ref.shape[1])[None, :]
    store(scale_ref, (row[:, None], block[None, :]), scale, mask=live)


def quantize_tokens(
    x: Array, *, codes: DTypeLike = body.F8, power_of_two: bool = False, interpret: bool = False
) -> tuple[Array, Array]:
    """Codes (M, K), e4m3 or int8, of x (M, K) and one float32 scale a row, (M, 1), in one launch."""
    if not x.size:
        _check(x)
        return jnp.zeros(x.shape, codes), _scale_of_nothing((x.shape[0], 1), codes, TOKEN_FLOOR, power_of_two)
    job = tokens_job(x, codes=codes, power_of_two=power_of_two)
    [(code, scale)] = launch.run("quantize_tokens", job, interpret=interpret)
    return code, scale


def tokens_job(x: Array, *, codes: DTypeLike = body.F8, power_of_two: bool = False) -> launch.Job:
    """The job of ``quantize_tokens``, of an x that is not empty."""
    _check(x)
    m, k = x.shape
    width = min(body.pow2_at_least(k), _LARGEST_ROW)
    rows = min(body.pow2_at_least(m), max(1, _TILE // width))
    return launch.Job(
        kernel=_tokens_kernel,
        programs=pl.cdiv(m, rows),
        inputs=(x,),
        outputs=(jax.ShapeDtypeStruct((m, k), codes), jax.ShapeDtypeStruct((m, 1), jnp.float32)),
        static={"tile": (rows, width), "power_of_two": power_of_two},
    )


def _tokens_kernel(
    program: Array, x_ref: Any, code_ref: Any, scale_ref: Any, *, tile: tuple[int, int], power_of_two: bool
) -> None:
    m, k = x_ref.shape
    rows, width = tile
    row = program * rows + arange(rows)
    steps = pl.cdiv(k, width)

    def measure(step: Array | int, amax: Array) -> Array:
        part = _Part.of(x_ref, row, step * width + arange(width))
        return jnp.maximum(amax, jnp.max(part.magnitude(code_ref.dtype), axis=1))

    def scale_of(amax: Array) -> Array:
        scale, inverse = body.code_scale(amax, code_ref.dtype, floor=TOKEN_FLOOR, power_of_two=power_of_two)
        store(scale_ref, (row, 0), scale, mask=row < m)
        return inverse[:, None]

    if steps == 1:
        part = _Part.of(x_ref, row, arange(width))
        part.write(code_ref, scale_of(jnp.max(part.magnitude(code_ref.dtype), axis=1)))
        return

    inverse = scale_of(lowering.loop(steps, measure, jnp.zeros((rows,), jnp.float32)))

    def write(step: Array, carry: None) -> None:
        _Part.of(x_ref, row, step * width + arange(width)).write(code_ref, inverse)

    lowering.loop(steps, write, None)


def quantize_tensor(
    x: Array,
    *,
    codes: DTypeLike = body.F8,
    power_of_two: bool = False,
    amax: Array | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Codes (M, K) of x (M, K) and its one float32 scale, (1, 1); one launch for a small tensor, else two.

    Args:
      x: bfloat16, float16 or float32.
      codes: their dtype, float8_e4m3fn or int8.
      power_of_two: the scale is a power of two.
      amax: float32 (n,), the largest ``body.magnitude`` of parts of x, whose maximum is taken instead of measuring x;
        then it is one launch, and parts of x that they leave out may hold anything.
      interpret: compute with XLA on any device, for tests.
    """
    if not x.size:
        _check(x)
        return jnp.zeros(x.shape, codes), _scale_of_nothing((1, 1), codes, TENSOR_FLOOR, power_of_two)
    chain = tensor_chain(x, codes=codes, power_of_two=power_of_two, amax=amax)
    [(code, scale)] = launch.run_chains("quantize_tensor", chain, interpret=interpret)
    return code, scale


class Choices(NamedTuple):
    """The experts that rows go to; arrays outside a kernel, refs inside.

    Attributes:
      ids: int32 (M, k), any value; a row of which none is an expert's here counts for no scale.
      expert_map: int32 (E_global,), the slot here of each expert or -1; or None.
    """

    ids: Any
    expert_map: Any | None = None


def tensor_chain(
    x: Array,
    *,
    codes: DTypeLike = body.F8,
    power_of_two: bool = False,
    amax: Array | None = None,
    choices: Choices | None = None,
    experts: int = 0,
) -> launch.Chain:
    """The jobs of ``quantize_tensor``, of an x that is not empty.

    With ``choices`` the scale is that of the rows that go to one of the ``experts`` here; the others may hold anything,
    and so may their codes.
    """
    _check(x)
    m, k = x.shape
    tiles = _tiles(m, k)

    def job(partials: Array | None = None) -> launch.Job:
        # Every program reads all of the partials: where these are many, programs are few.
        share = 1 if partials is None or partials.size <= _PARTIALS else pl.cdiv(tiles, _PARTIALS)
        return launch.Job(
            kernel=_tensor_kernel,
            programs=pl.cdiv(tiles, share),
            inputs=(x, partials, choices if partials is None else None),
            outputs=(jax.ShapeDtypeStruct((m, k), codes), jax.ShapeDtypeStruct((1, 1), jnp.float32)),
            static={"share": share, "power_of_two": power_of_two, "experts": experts},
        )

    if amax is not None:
        return [lambda: job(amax)]
    if m * k <= _SMALL_TENSOR:
        return [job]
    parts = min(_PARTIALS, tiles)
    measure = launch.Job(
        kernel=_amax_kernel,
        programs=parts,
        inputs=(x, choices),
        outputs=(jax.ShapeDtypeStruct((parts,), jnp.float32),),
        static={"parts": parts, "experts": experts, "codes": jnp.dtype(codes)},
    )
    return [lambda: measure, job]


def _amax_kernel(
    program: Array, x_ref: Any, choices: Choices | None, amax_ref: Any, *, parts: int, experts: int, codes: Any
) -> None:
    amax = _amax(x_ref, choices, experts, codes, program, parts, pl.cdiv(_tiles(*x_ref.shape), parts))
    store(amax_ref, (program,), amax)


def _tensor_kernel(
    program: Array,
    x_ref: Any,
    partials_ref: Any | None,
    choices: Choices | None,
    code_ref: Any,
    scale_ref: Any,
    *,
    share: int,
    power_of_two: bool,
    experts: int,
) -> None:
    if partials_ref is None:
        amax = _amax(x_ref, choices, experts, code_ref.dtype, jnp.int32(0), 1, _tiles(*x_ref.shape))
    else:
        amax = largest(partials_ref)
    scale, inverse = body.code_scale(amax, code_ref.dtype, floor=TENSOR_FLOOR, power_of_two=power_of_two)

    def write(i: Array, carry: None) -> None:
        _Part.of(x_ref, *_tile_at(x_ref.shape, program * share + i)).write(code_ref, inverse)

    lowering.loop(share, write, None)

    @pl.when(program == 0)
    def _() -> None:
        store(scale_ref, (0, 0), scale)


def quantize_static(x: Array, scale: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    """e4m3 codes (M, K) of x (M, K) with given scales, and these, in one launch.

    Args:
      x: bfloat16, float16 or float32.
      scale: float32, () for all of x or (M, 1) for its rows; finite and positive. A subnormal scale counts as the
        smallest normal number.
      interpret: compute with XLA on any device, for tests.

    Returns:
      Codes float8_e4m3fn (M, K); float32 scales (1, 1) or (M, 1).

    Raises:
      ValueError: ``scale`` has another shape.
    """
    _check(x)
    m, k = x.shape
    if scale.shape not in ((), (m, 1)):
        raise ValueError(f"scale has shape {scale.shape}, but it is () or (M, 1) = {(m, 1)}")
    scale = scale.astype(jnp.float32).reshape(-1, 1)
    if not x.size:
        return jnp.zeros((m, k), body.F8), jnp.maximum(scale, _F32_TINY)
    [(codes, scale)] = launch.run("quantize_static", static_job(x, scale), interpret=interpret)
    return codes, scale


def static_job(x: Array, scale: Array) -> launch.Job:
    """The job of ``quantize_static``, of an x that is not empty and scales (1, 1) or (M, 1)."""
    _check(x)
    return launch.Job(
        kernel=_static_kernel,
        programs=_tiles(*x.shape),
        inputs=(x, scale),
        outputs=(jax.ShapeDtypeStruct(x.shape, body.F8), jax.ShapeDtypeStruct(scale.shape, jnp.float32)),
    )


def _static_kernel(program: Array, x_ref: Any, given_ref: Any, code_ref: Any, scale_ref: Any) -> None:
    m = given_ref.shape[0]
    row, column = _tile_at(x_ref.shape, program)
    line = jnp.minimum(row, m - 1)
    scale = jnp.maximum(load(given_ref, (line, 0)), _F32_TINY)
    _Part.of(x_ref, row, column).write(code_ref, lowering.reciprocal(scale)[:, None], saturates=True)
    # Programs that share a row write the same value.
    store(scale_ref, (line, 0), scale)


def largest(partials_ref: Any) -> Array:
    """In a kernel: the maximum of float32 (n,), none of it negative."""
    parts = partials_ref.shape[0]
    width = min(body.pow2_at_least(parts), _TILE)

    def step(i: Array, amax: Array) -> Array:
        lane = i * width + arange(width)
        return jnp.maximum(amax, load(partials_ref, (lane,), mask=lane < parts, other=0))

    return jnp.max(lowering.loop(pl.cdiv(parts, width), step, jnp.zeros((width,), jnp.float32)))


class _Part(NamedTuple):
    """A tile of x, float32 and 0 past the end, which of it exists, and where it lies."""

    x: Array
    inside: Array
    where: tuple[Array, Array]

    @classmethod
    def of(cls, x_ref: Any, row: Array, column: Array) -> "_Part":
        m, k = x_ref.shape
        where = (row[:, None], column[None, :])
        inside = (where[0] < m) & (where[1] < k)
        return cls(load(x_ref, where, mask=inside, other=0).astype(jnp.float32), inside, where)

    def magnitude(self, codes: DTypeLike) -> Array:
        """What a scale of such codes is measured by."""
        return body.magnitude(self.x, codes)

    def write(self, code_ref: Any, inverse: Array, *, saturates: bool = False) -> None:
        """Stores the codes that ``inverse``, the scale's reciprocal, gives."""
        code = body.codes_of(self.x, inverse, code_ref.dtype, saturates=saturates)
        store(code_ref, self.where, code, mask=self.inside)


def _tile_shape(m: int, k: int) -> tuple[int, int]:
    width = min(body.pow2_at_least(k), _TILE)
    return min(body.pow2_at_least(m), _TILE // width), width


def _tiles(m: int, k: int) -> int:
    rows, width = _tile_shape(m, k)
    return pl.cdiv(m, rows) * pl.cdiv(k, width)


def _tile_at(shape: tuple[int, int], tile: Array) -> tuple[Array, Array]:
    """Rows and columns of a tile; a tile past the last has rows past the last."""
    rows, width = _tile_shape(*shape)
    across = pl.cdiv(shape[1], width)
    return body.div(tile, across) * rows + arange(rows), body.rem(tile, across) * width + arange(width)


def _amax(
    x_ref: Any, choices: Choices | None, experts: int, codes: DTypeLike, first: Array, stride: int, count: int
) -> Array:
    """The largest magnitude in tiles first, first + stride, ..., ``count`` of them, of rows that count."""

    def step(i: Array, amax: Array) -> Array:
        row, column = _tile_at(x_ref.shape, first + i * stride)
        magnitude = _Part.of(x_ref, row, column).magnitude(codes)
        if choices is not None:
            magnitude = jnp.where(_is_chosen(choices, experts, row)[:, None], magnitude, 0)
        return jnp.maximum(amax, jnp.max(magnitude))

    return lowering.loop(count, step, jnp.float32(0))


def _is_chosen(choices: Choices, experts: int, row: Array) -> Array:
    """Whether any of a row's experts is here; False for rows past the last."""
    m, k = choices.ids.shape
    choice = arange(body.pow2_at_least(k))
    inside = (row < m)[:, None] & (choice < k)[None, :]
    ids = load(choices.ids, (row[:, None], choice[None, :]), mask=inside, other=-1)
    return jnp.max(local_expert(ids, choices.expert_map, experts), axis=1) >= 0


def _zeros(job: launch.Job) -> tuple[Array, Array]:
    codes, scale = (jnp.zeros(out.shape, out.dtype) for out in job.outputs)
    return codes, scale


def _check(x: Array) -> None:
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"x is {x.dtype} of shape {x.shape}, but it is (M, K) of bfloat16, float16 or float32")


def _scale_of_nothing(shape: tuple[int, int], codes: DTypeLike, floor: float, power_of_two: bool) -> Array:
    return jnp.broadcast_to(body.code_scale(jnp.float32(0), codes, floor=floor, power_of_two=power_of_two)[0], shape)
