"""What is in a checkpoint, module by module: values that a command line can print."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jmoe.scheme import Recipe

Kind = Literal["linear", "experts", "embedding", "other"]


@dataclass(frozen=True)
class ModuleSummary:
    """One module, or all experts of a layer: ``<prefix>.w13`` (E, 2, I, H) and ``<prefix>.w2`` (E, H, I).

    Attributes:
      name: the module's name in the checkpoint.
      kind: "linear" for a matrix, "experts", "embedding", or "other" (norms and whatever is no matrix).
      recipe: how weight and activation are quantized; None where there is no weight.
      shape: the logical shape of the weight, or of the largest tensor where there is none.
      nbytes: bytes of all its tensors in the files, scales and biases included.
      tensors: how many tensors these are.
    """

    name: str
    kind: Kind
    recipe: Recipe | None
    shape: tuple[int, ...]
    nbytes: int
    tensors: int

    @property
    def parameters(self) -> int:
        """Elements of the weight, without scales."""
        return math.prod(self.shape)

    @property
    def quantized(self) -> bool:
        return self.recipe is not None and self.recipe.weight is not None


@dataclass(frozen=True)
class Summary:
    """A whole checkpoint.

    Attributes:
      path: its folder.
      model_type: of the language model, empty if the configuration has none.
      method: the name of the quantization method, "none" without one.
      modules: every module, in the order of the files.
      kv_scales: names of the scales that belong to a KV cache.
    """

    path: Path
    model_type: str
    method: str
    modules: tuple[ModuleSummary, ...]
    kv_scales: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all modules' tensors."""
        return sum(module.nbytes for module in self.modules)

    @property
    def parameters(self) -> int:
        return sum(module.parameters for module in self.modules)

    @property
    def unquantized(self) -> tuple[ModuleSummary, ...]:
        """The modules that are not quantized: what remains at 16 bits or more."""
        return tuple(module for module in self.modules if not module.quantized)

    def by_recipe(self) -> dict[str, tuple[ModuleSummary, ...]]:
        """The modules by the name of their recipe, in the order of first appearance; ``""`` where there is none."""
        groups: dict[str, list[ModuleSummary]] = {}
        for module in self.modules:
            groups.setdefault(module.recipe.name if module.recipe else "", []).append(module)
        return {name: tuple(group) for name, group in groups.items()}
