"""Kernels of our own through Pallas and Triton: plain, e4m3, int8 and four-bit weights, on NVIDIA GPUs.

This file says what they serve, and translates: an OpSpec to static facts and tiles, QTensors to arrays. The kernels
themselves are imported when they are first run, so that importing jmoe takes no Triton.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, TypeGuard

import jax.numpy as jnp
from jax import Array, lax

from jmoe.backends import common, packed, tuned
from jmoe.backends.spec import Accumulation, BatchedArgs, DeviceSpec, LinearArgs, MoEArgs, OpSpec, Plan, Selection
from jmoe.config import config
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe, Scheme
from pallas_kernels.bits import INT32_PRODUCTS
from pallas_kernels.layouts import CANONICAL, PACKED_BFLOAT16, PACKED_E4M3
from pallas_kernels.tuning import table
from pallas_kernels.tuning.heuristics import Operands, matmul_tile
from pallas_kernels.tuning.moe_heuristics import MoETiles, moe_tiles

if TYPE_CHECKING:
    from pallas_kernels.experts import Experts, ExpertsSpec, InputScheme

NAME = "triton"

_MIN_CAPABILITY = 80

_CODES = ("e4m3", "int8")
"""Formats of weights and of activations that its kernels multiply."""


def plan(op: OpSpec, device: DeviceSpec, *, explicit: bool) -> Plan:
    """The plan on that device; ``explicit`` where the user asked for it by name.

    Tiles: "tile" of a linear; "first" and "second" product of experts, and "single" where each slot is matrices times
    vectors (``pallas_kernels.few``).

    Raises:
      NotImplementedError: with the first reason why not.
    """
    for reason in _refusals(op, device):
        raise NotImplementedError(reason)
    accumulation = op.accumulation or "exact"
    workspace = packed.workspace(op, _chunk(op) or op.tokens)
    multiplied = packed.expanded(op) if workspace else op
    # Products with vectors, and shares of K, are for fewer tokens than weights are expanded for.
    measured = tuned.find(multiplied, device, accumulation, few=not workspace)
    tiles, origin = measured or (heuristic_tiles(multiplied, device, accumulation), "heuristic")
    return Plan(
        tiles=tiles,
        tiles_from=origin,
        accumulation=accumulation,
        layout=packed.layout_of(op.recipe),
        note=_note(op, accumulation, workspace),
        workspace=workspace,
    )


def heuristic_tiles(op: OpSpec, device: DeviceSpec, accumulation: Accumulation) -> tuple[tuple[str, Any], ...]:
    """The tiles of a plan where nothing was measured."""
    facts: dict[str, Any] = {
        "batch_invariant": op.batch_invariant,
        "capability": device.compute_capability,
        "sm_count": device.sm_count,
    }
    if packed.is_packed(op.recipe):
        facts["exact"] = accumulation == "exact"
        if op.op == "linear":
            return table.parts(packed.tile_of_linear(op, **facts))
        return table.parts(packed.tiles_of_experts(op, **facts))
    if op.op == "linear":
        tile = matmul_tile(
            op.tokens,
            op.features,
            op.hidden,
            operands=operands_of(op),
            cell=_cell(op.recipe),
            exact=accumulation == "exact",
            **facts,
        )
        return table.parts(tile)
    return table.parts(_tiles_of_experts(op, accumulation == "exact", facts))


def _tiles_of_experts(op: OpSpec, exact: bool, facts: dict[str, Any]) -> MoETiles:
    second = op.second_recipe or op.recipe
    h = second.input
    return moe_tiles(
        op.tokens,
        op.hidden,
        op.intermediate,
        op.experts,
        max(op.top_k, 1),
        operands=operands_of(op),
        halves=2 if op.gated else 1,
        first_cell=_cell(op.recipe),
        second_cell=_cell(second),
        group=h.block[1] if h is not None and h.block[1] != -1 else None,
        exact=exact,
        batched=op.op == "batched_experts",
        global_experts=op.global_experts,
        **facts,
    )


def _note(op: OpSpec, accumulation: str, workspace: int) -> str:
    notes = []
    if workspace:
        often = "every time that so many tokens are taken" if _chunk(op) else "in every call"
        notes.append(f"weights are expanded to e4m3 in a workspace of {workspace:,} bytes, {often}")
    if accumulation == "fast" and operands_of(op) == "fp8" and packed.layout_of(op.recipe) != PACKED_BFLOAT16:
        notes.append("FP8 sums stay in the tensor core for all of K; accumulation='exact' promotes them every 128")
    if chunk := _chunk(op):
        notes.append(f"{chunk} tokens at a time, which bounds temporary memory; jmoe.config(moe_chunk=None) takes all")
    if op.layout != packed.layout_of(op.recipe):
        notes.append("weights are packed for its kernels in every call; jmoe.prepare does it once")
    return "; ".join(notes)


def _refusals(op: OpSpec, device: DeviceSpec) -> list[str]:
    reasons = []
    recipes = [recipe for recipe in (op.recipe, op.second_recipe) if recipe is not None]
    if device.platform != "cuda":
        reasons.append(f"it needs an NVIDIA GPU, and this is {device.name}")
    elif device.compute_capability < _MIN_CAPABILITY:
        reasons.append(f"it needs compute capability 8.0, and {device.name} has {device.compute_capability / 10:.1f}")
    else:
        for recipe in recipes:
            reasons += _capability_refusals(recipe, device)
    if op.mesh:
        axes = ", ".join(f"{axis}={size}" for axis, size in op.mesh)
        reasons.append(
            f"on a mesh ({axes}) XLA would gather the weights to every device without a word; "
            "call it inside jax.shard_map over these axes"
        )
    if op.measures_across:
        axes = ", ".join(dict.fromkeys((*op.shards.rows, *op.shards.columns)))
        reasons.append(f"an activation's scale is measured across the mesh axes {axes}, and its kernels measure on one")
    if op.layout not in (CANONICAL, *((PACKED_BFLOAT16, PACKED_E4M3) if packed.is_packed(op.recipe) else ())):
        reasons.append(f"weights are in the layout {op.layout.name!r}, and its kernels read the canonical one")
    reasons += _recipe_refusals(op, op.recipe, op.hidden)
    if op.op != "linear":
        reasons += _recipe_refusals(op, op.second_recipe or op.recipe, op.intermediate)
    if len({(recipe.weight and recipe.weight.format, recipe.input is None) for recipe in recipes}) > 1:
        reasons.append("w13 and w2 are of two kinds, and its kernels take one")
    return reasons


def _capability_refusals(recipe: Recipe, device: DeviceSpec) -> list[str]:
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


def _recipe_refusals(op: OpSpec, recipe: Recipe, k: int) -> list[str]:
    """Why not, of a product over ``k`` columns."""
    weight, x = recipe.weight, recipe.input
    if weight is None:
        return []
    if packed.is_packed(recipe):
        return packed.refusals(op, recipe)
    if weight.format not in _CODES or weight.global_scale is not None or weight.zero_point:
        return [f"its kernels take plain, e4m3, symmetric int8 and four-bit weights, and these are {weight.describe()}"]
    if x is None:
        return []
    if x.format not in _CODES or x.global_scale is not None or x.zero_point or x.block[0] not in (-1, 1):
        return [
            "its kernels take plain, e4m3 and int8 activations with a scale a tensor, token or group, "
            f"not {x.describe()}"
        ]
    if x.block[0] == -1 and x.block[1] != -1:
        return [f"an activation's scale covers a tensor, a token or a group of a token, not {x.describe()}"]
    if x.scale_dtype not in ("float32", "e8m0"):
        return [f"its kernels measure scales in float32, and an activation's are held in {x.scale_dtype}"]
    if x.format != weight.format:
        return [f"its kernels multiply codes of one format, not {weight.format} and {x.format}"]
    if x.format == "int8" and x.static:
        return ["int8 activations with a given scale have nothing to say of one that is not finite"]
    if x.format == "int8" and _cell(recipe) is None and k > INT32_PRODUCTS:
        return [f"K={k}, and sums of int8 products are sure to fit int32 only up to {INT32_PRODUCTS}"]
    return []


def _is_fp8(scheme: Scheme) -> bool:
    return scheme.format in ("e4m3", "e5m2")


def operands_of(op: OpSpec) -> Operands:
    """What the dots are made of."""
    if op.recipe.input is not None:
        return "int8" if op.recipe.input.format == "int8" else "fp8"
    if op.dtype == "float32":
        return "32bit"
    return "16bit" if op.recipe.weight is None else "w8a16"


def _block(weight: Scheme | None) -> tuple[int, int]:
    return (-1, -1) if weight is None else weight.block


def _cell(recipe: Recipe) -> int | None:
    """Columns of K that share every scale, None where no scale changes along K."""
    extents = [s.block[1] for s in (recipe.weight, recipe.input) if s is not None and s.block[1] != -1]
    return math.gcd(*extents) if extents else None


def linear(op: OpSpec, selection: Selection, args: LinearArgs) -> Array:
    """activation(x w^T + bias), (M, N) in ``op.out_dtype``; its derivatives are xla's."""
    from pallas_kernels import matmul

    scheme = common.input_scheme_of(args.w)
    x, x_scale = _dense_input(args.x, scheme, args.input_scale)
    activation = None if op.activation is None else _ungated_name(op.activation.name)
    if packed.is_packed(op.recipe):
        from pallas_kernels.fourbit import linear as fourbit

        assert isinstance(args.w, QTensor)
        w, how = packed.parts(args.w)
        return fourbit.linear(
            x,
            w,
            packing=how,
            x_scale=x_scale,
            bias=args.bias,
            activation=activation,
            layer=args.layer,
            exact=selection.accumulation == "exact",
            out_dtype=op.out_dtype,
            tile=selection.tile("tile"),
            expands=selection.workspace > 0,
        )
    data, scale = _parts(args.w)
    return matmul.linear(
        x,
        data,
        scale,
        x_scale=x_scale,
        w_block=_block(op.recipe.weight),
        x_group=-1 if scheme is None else scheme.block[1],
        bias=args.bias,
        activation=activation,
        layer=args.layer,
        exact=selection.accumulation == "exact",
        out_dtype=op.out_dtype,
        tile=selection.tile("tile"),
    )


def _ungated_name(name: str) -> str:
    return "silu" if name == "swiglu" else name


def _parts(w: Array | QTensor) -> tuple[Array, Array | None]:
    return (w.data, w.scale) if isinstance(w, QTensor) else (w, None)


def _dense_input(x: Array | QTensor, scheme: Scheme | None, scale: Array | None) -> tuple[Array, Array | None]:
    """X as codes and scales where the weight asks for these, by one kernel."""
    from pallas_kernels import quantize

    if isinstance(x, QTensor) or scheme is None:
        return _parts(x)
    if scheme.static:
        assert scale is not None  # validated
        return quantize.quantize_static(x, scale)
    if scheme.block == (-1, -1):
        return quantize.quantize_tensor(x, codes=scheme.fmt.storage, power_of_two=scheme.power_of_two)
    if scheme.block == (1, -1):
        return quantize.quantize_tokens(x, codes=scheme.fmt.storage, power_of_two=scheme.power_of_two)
    return quantize.quantize_groups(x, scheme.block[1], codes=scheme.fmt.storage, power_of_two=scheme.power_of_two)


def fused_moe(op: OpSpec, selection: Selection, args: MoEArgs) -> Array:
    """The weighted sum of each token's experts, (T, H) in ``op.out_dtype``; reference.fused_moe is the formula."""
    from pallas_kernels import moe

    x, weights = args.x, args.topk_weights
    if op.weight_on_input:
        ids = common.local_ids(args.topk_ids, args.expert_map, op.experts)
        x, weights = common.weighted_input(x, weights, ids), jnp.ones_like(weights)
    codes, x_scale = _parts(x)
    layer = functools.partial(
        moe.fused_moe, experts=_experts(args), spec=_experts_spec(op, selection, args), expert_map=args.expert_map
    )
    size = _chunk(op)
    if size is None:
        return layer(codes, topk_weights=weights, topk_ids=args.topk_ids, x_scale=x_scale)
    results: list[Array] = []
    for start in range(0, op.tokens, size):
        here = slice(start, start + size)
        scale = x_scale if x_scale is None or x_scale.shape[0] == 1 else x_scale[here]
        arrays = codes[here], weights[here], args.topk_ids[here], scale
        if results:  # one after the other, so that they take the same temporary memory
            arrays, results[-1] = lax.optimization_barrier((arrays, results[-1]))
        results.append(layer(arrays[0], topk_weights=arrays[1], topk_ids=arrays[2], x_scale=arrays[3]))
    return jnp.concatenate(results)


def _chunk(op: OpSpec) -> int | None:
    """Tokens that a layer takes at a time; None is all, also where one scale is measured over all of them."""
    size = config.moe_chunk
    inputs = (op.recipe.input, (op.second_recipe or op.recipe).input)
    measured = any(x is not None and not x.static and x.block == (-1, -1) for x in inputs)
    return None if size is None or op.op != "moe" or op.tokens <= size or measured else size


def batched_experts(op: OpSpec, selection: Selection, args: BatchedArgs) -> Array:
    """Each expert's own rows, x (E, T, H) of which counts[e] are valid -> (E, T, H); rows beyond are zero."""
    from pallas_kernels import moe

    codes, x_scale = _parts(args.x)
    if x_scale is not None:  # one a row, also where an expert's rows share one
        x_scale = jnp.broadcast_to(x_scale, (*codes.shape[:2], x_scale.shape[-1]))
    return moe.batched_experts(
        codes, args.counts, _experts(args), spec=_experts_spec(op, selection, args), x_scale=x_scale
    )


def _experts(args: MoEArgs | BatchedArgs) -> "Experts":
    from pallas_kernels.activation import ActivationParams
    from pallas_kernels.experts import Experts

    params = args.activation_params or ()
    w13: Any
    w2: Any
    (w13, w13_scale), (w2, w2_scale) = _parts(args.w13), _parts(args.w2)
    if _is_packed(args.w13) and _is_packed(args.w2):
        (w13, _), (w2, _) = packed.parts(args.w13), packed.parts(args.w2)
        w13_scale = w2_scale = None
    return Experts(
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        b13=args.b13,
        b2=args.b2,
        input_scale=args.input_scale,
        intermediate_scale=args.intermediate_scale,
        activation_params=ActivationParams(*params),
        layer=args.layer,
    )


def _is_packed(w: Array | QTensor) -> TypeGuard[QTensor]:
    return isinstance(w, QTensor) and w.layout != CANONICAL


def _experts_spec(op: OpSpec, selection: Selection, args: MoEArgs | BatchedArgs) -> "ExpertsSpec":
    from pallas_kernels.activation import Activation
    from pallas_kernels.experts import ExpertsSpec

    assert op.activation is not None
    second = op.second_recipe or op.recipe
    return ExpertsSpec(
        tiles=MoETiles(first=selection.tile("first"), second=selection.tile("second"), single=selection.tile("single")),
        dtype=op.dtype,
        out_dtype=op.out_dtype,
        activation=Activation(**dataclasses.asdict(op.activation)),
        w13_block=_block(op.recipe.weight),
        w2_block=_block(second.weight),
        input_scheme=_input_scheme(op.recipe.input),
        intermediate_scheme=_input_scheme(second.input),
        exact=selection.accumulation == "exact",
        w13_packing=packed.parts(args.w13)[1] if _is_packed(args.w13) else None,
        w2_packing=packed.parts(args.w2)[1] if _is_packed(args.w2) else None,
        expands=selection.workspace > 0,
    )


def _input_scheme(scheme: Scheme | None) -> "InputScheme | None":
    from pallas_kernels.experts import InputScheme

    if scheme is None:
        return None
    if scheme.static:
        return InputScheme(scale="static")
    options: dict[str, Any] = {"power_of_two": scheme.power_of_two, "format": scheme.format}
    if scheme.block[1] == -1:
        return InputScheme(scale="tensor" if scheme.block[0] == -1 else "token", **options)
    return InputScheme(scale="group", group=scheme.block[1], **options)
