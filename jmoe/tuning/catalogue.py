"""Layers of published models by their shapes, for tuning and benchmarks; sizes as in each model's config.json."""

from collections.abc import Iterable
from dataclasses import dataclass

from jmoe.backends.activation import as_activation
from jmoe.backends.spec import OpSpec
from jmoe.scheme import Recipe


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """Of one layer of a model.

    Attributes:
      hidden, intermediate, experts, top_k: H, I, E and k of its experts.
      linears: (N, K) of its linear layers, as inference engines fuse them: q with k and v, gate with up.
      activation: of its experts.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    linears: tuple[tuple[int, int], ...]
    activation: str = "silu"


MODELS: dict[str, ModelShapes] = {
    "dsv3": ModelShapes(
        hidden=7168,
        intermediate=2048,
        experts=256,
        top_k=8,
        linears=((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048)),
    ),
    "dsv3-tp8": ModelShapes(
        hidden=7168,
        intermediate=256,
        experts=256,
        top_k=8,
        linears=((2112, 7168), (3072, 1536), (7168, 2048), (512, 7168), (7168, 256)),
    ),
    "qwen3-30b": ModelShapes(hidden=2048, intermediate=768, experts=128, top_k=8, linears=((5120, 2048), (2048, 4096))),
    "qwen3-235b": ModelShapes(
        hidden=4096, intermediate=1536, experts=128, top_k=8, linears=((9216, 4096), (4096, 8192))
    ),
    "mixtral": ModelShapes(hidden=4096, intermediate=14336, experts=8, top_k=2, linears=((6144, 4096), (4096, 4096))),
    "gpt-oss-20b": ModelShapes(
        hidden=2880,
        intermediate=2880,
        experts=32,
        top_k=4,
        linears=((5120, 2880), (2880, 4096)),
        activation="swigluoai",
    ),
    "gpt-oss-120b": ModelShapes(
        hidden=2880,
        intermediate=2880,
        experts=128,
        top_k=4,
        linears=((5120, 2880), (2880, 4096)),
        activation="swigluoai",
    ),
    "glm-4.5": ModelShapes(
        hidden=5120, intermediate=1536, experts=160, top_k=8, linears=((14336, 5120), (5120, 12288))
    ),
    "llama4-scout": ModelShapes(
        hidden=5120, intermediate=8192, experts=16, top_k=1, linears=((7168, 5120), (5120, 5120))
    ),
}
"""Names to shapes; tp8: an eighth of every expert, as eight GPUs hold it."""


def model(name: str) -> ModelShapes:
    """The shapes of that name; raises ValueError for an unknown one."""
    if name not in MODELS:
        raise ValueError(f"model {name!r} is unknown; known are {', '.join(MODELS)}")
    return MODELS[name]


def experts(shapes: ModelShapes, recipe: Recipe, tokens: int) -> OpSpec:
    """A model's layer of experts under a recipe, for so many tokens."""
    return OpSpec(
        op="moe",
        recipe=recipe,
        tokens=tokens,
        hidden=shapes.hidden,
        intermediate=shapes.intermediate,
        experts=shapes.experts,
        global_experts=shapes.experts,
        top_k=shapes.top_k,
        activation=as_activation(shapes.activation),
    )


def linear(features: int, hidden: int, recipe: Recipe, tokens: int) -> OpSpec:
    """A linear layer (N, K) = (features, hidden) under a recipe, for so many tokens."""
    return OpSpec(op="linear", recipe=recipe, tokens=tokens, hidden=hidden, features=features)


def operations(shapes: ModelShapes, recipe: Recipe, tokens: Iterable[int]) -> list[OpSpec]:
    """Experts and linear layers of a model, each for every number of tokens."""
    rows = list(tokens)
    found = [experts(shapes, recipe, t) for t in rows]
    return found + [linear(n, k, recipe, t) for n, k in shapes.linears for t in rows]
