"""What the Triton kernels serve of four-bit weights, and their arrays and static facts."""

from typing import Any

from jmoe.backends.spec import OpSpec
from jmoe.config import config
from jmoe.qtensor import QTensor, packing_of
from jmoe.scheme import Recipe, Scheme, recipe_of
from pallas_kernels.fourbit.packing import Packed, Packing, supports_group
from pallas_kernels.layouts import CANONICAL, PACKED_BFLOAT16, PACKED_E4M3, Layout
from pallas_kernels.tuning.fourbit import Kind, linear_tile, moe_tiles
from pallas_kernels.tuning.heuristics import MatmulTile
from pallas_kernels.tuning.moe_heuristics import MoETiles

_LINEAR_ROWS = 1024
"""Fewest rows of x for which expanding the weights of a linear takes less time than it saves."""

_EXPERT_ROWS = 768
"""The same for the rows of an expert, on average."""


def is_packed(recipe: Recipe) -> bool:
    """Whether the kernels want such weights packed."""
    return recipe.weight is not None and recipe.weight.fmt.bits == 4


def layout_of(recipe: Recipe) -> Layout:
    """The layout that kernels want a weight of that recipe in."""
    if not is_packed(recipe):
        return CANONICAL
    assert recipe.weight is not None
    return PACKED_BFLOAT16 if recipe.input is None or recipe.weight.format == "int4" else PACKED_E4M3


def refusals(op: OpSpec, recipe: Recipe) -> list[str]:
    """Why products with such four-bit weights are not served."""
    weight, x = recipe.weight, recipe.input
    assert weight is not None
    reasons = []
    if x is not None:
        codes = {"int4": ("e4m3", "int8"), "e2m1": ("e4m3",)}[weight.format]
        folds = weight.format == "int4" or weight.scale_dtype == "e8m0"
        plain = x.block in ((1, -1), (-1, -1)) and x.global_scale is None and not x.zero_point
        if not folds or x.format not in codes or not plain:
            return [
                "with quantised activations its kernels take int4 weights, and e2m1 ones with e8m0 scales, with e4m3 "
                "codes, int4 also with int8 ones, that have a scale a tensor or token, "
                f"not {weight.describe()} with {x.describe()}"
            ]
        if x.scale_dtype not in ("float32", "e8m0"):
            reasons.append(f"its kernels measure scales in float32, and an activation's are held in {x.scale_dtype}")
        if x.format == "int8" and x.static:
            reasons.append("int8 activations with a given scale have nothing to say of one that is not finite")
    elif op.dtype != "bfloat16":
        reasons.append(
            f"its kernels multiply four-bit weights with bfloat16 activations, and would have to round {op.dtype} ones"
        )
    rows, group = weight.block
    if weight.format == "int4":
        if rows != 1 or not supports_group(group):
            reasons.append(
                "its int4 groups are of 16, 32, 64, a multiple of 128, or all columns of one row, "
                f"not {weight.describe()}"
            )
        elif x is not None and group == 16:
            reasons.append("with quantised activations its int4 groups are of 32 columns or more, not 16")
    elif weight.block != {"e8m0": (1, 32), "e4m3": (1, 16)}[weight.scale_dtype]:
        reasons.append(f"its e2m1 blocks are 1x32 with e8m0 and 1x16 with e4m3 scales, not {weight.describe()}")
    return reasons


def tile_of_linear(op: OpSpec, **facts: Any) -> MatmulTile:
    """The heuristic's tile."""
    how = _packing(op.recipe, op.features, op.hidden)
    kind = Kind(operand=how.operand, words=how.words_a_tile, codes=how.codes, scales_sums=_scales_sums(op.recipe))
    return linear_tile(op.tokens, op.features, op.hidden, kind=kind, **facts)


def tiles_of_experts(op: OpSpec, **facts: Any) -> MoETiles:
    """The heuristic's tiles."""
    first = _packing(op.recipe, op.intermediate, op.hidden)
    second = _packing(op.second_recipe or op.recipe, op.hidden, op.intermediate)
    words = max(first.words_a_tile, second.words_a_tile)
    scales_sums = _scales_sums(op.recipe) or _scales_sums(op.second_recipe or op.recipe)
    kind = Kind(operand=first.operand, words=words, codes=first.codes, scales_sums=scales_sums)
    return moe_tiles(
        op.tokens,
        op.hidden,
        op.intermediate,
        op.experts,
        max(op.top_k, 1),
        kind=kind,
        halves=2 if op.gated else 1,
        batched=op.op == "batched_experts",
        global_experts=op.global_experts,
        **facts,
    )


def workspace(op: OpSpec, tokens: int) -> int:
    """Bytes that the operation's weights are expanded into, the most at a time; 0 where they are not.

    They are where ``jmoe.config.workspace`` has room and rows are so many that it pays. w13 is no longer needed when w2
    is expanded. ``tokens`` are those that a layer takes at a time.
    """
    second = op.second_recipe or op.recipe
    if op.batch_invariant or {layout_of(op.recipe), layout_of(second)} != {PACKED_E4M3}:
        return 0
    if op.op == "linear":
        rows, least = tokens, _LINEAR_ROWS
        needed = _packing(op.recipe, op.features, op.hidden).expanded_bytes
    else:
        experts = max(op.experts, op.global_experts, 1)
        rows, least = tokens if op.op == "batched_experts" else tokens * op.top_k // experts, _EXPERT_ROWS
        first = _packing(op.recipe, op.intermediate, op.hidden).expanded_bytes
        needed = op.experts * max(
            (2 if op.gated else 1) * first, _packing(second, op.hidden, op.intermediate).expanded_bytes
        )
        assert second.input is not None
        if second.input.block[0] == -1 and not second.input.static:  # measured by programs of other tiles
            return 0
    empty = not (op.hidden and (op.features if op.op == "linear" else op.intermediate and op.experts))
    return 0 if empty or rows < least or needed > config.workspace else needed


def expanded(op: OpSpec) -> OpSpec:
    """The operation as one on the expanded weights: e4m3 codes with a scale a row."""
    weight = Scheme(format="e4m3", block=(1, -1))
    recipe = recipe_of(weight, op.recipe.input)
    second = None if op.second_recipe is None else recipe_of(weight, op.second_recipe.input)
    return op.replace(recipe=recipe, second_recipe=second, layout=CANONICAL)


def parts(w: QTensor) -> tuple[Packed, Packing]:
    """A packed weight's arrays, and how it is packed."""
    return Packed(w.data, w.scale, w.zero_point, w.global_scale), packing_of(w.scheme, w.layout, w.shape)


def _scales_sums(recipe: Recipe) -> bool:
    """Whether scales of int4's groups multiply sums, as they do for activations that are codes."""
    weight = recipe.weight
    return weight is not None and weight.format == "int4" and recipe.input is not None and weight.block[1] != -1


def _packing(recipe: Recipe, n: int, k: int) -> Packing:
    assert recipe.weight is not None
    return packing_of(recipe.weight, layout_of(recipe), (n, k))
