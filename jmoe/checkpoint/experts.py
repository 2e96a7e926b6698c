"""How families of models name the tensors of their experts, and where a checkpoint has experts.

Source: the published checkpoints' own tensor names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jmoe.checkpoint.methods import CheckpointError
from jmoe.checkpoint.safetensors_header import show


@dataclass(frozen=True)
class ExpertNames:
    """The projections of one expert, below ``<prefix>.<expert>``.

    Attributes:
      gate: the gate projection, or None in an ungated expert.
      up: the up projection.
      down: the down projection.
    """

    gate: str | None
    up: str
    down: str

    @property
    def halves(self) -> tuple[str, ...]:
        """The projections that make up w13, gate first."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.halves, self.down)


FAMILIES: tuple[ExpertNames, ...] = (
    ExpertNames("gate_proj", "up_proj", "down_proj"),  # Qwen, DeepSeek-V2 and V3, GLM, Kimi, Llama 4, OLMoE, gpt-oss
    ExpertNames("w1", "w3", "w2"),  # Mixtral, MiniMax, DeepSeek-V4
    ExpertNames(None, "up_proj", "down_proj"),  # Nemotron-H
)
"""What is known, a gated family before the ungated one whose names it contains."""

_EXPERT = re.compile(r"(?P<prefix>(?:.+\.)?experts)\.(?P<expert>[0-9]+)\.(?P<projection>[^.]+)")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,6}")


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
      prefix: what comes before the expert's number, such as ``model.layers.0.mlp.experts``.
      count: E; experts are numbered 0 to E - 1.
      names: how their projections are called.
    """

    prefix: str
    count: int
    names: ExpertNames

    def module(self, expert: int, projection: str) -> str:
        """The module of one projection of one expert."""
        return f"{self.prefix}.{expert}.{projection}"

    def modules(self) -> Iterable[str]:
        """All modules, expert by expert."""
        return (self.module(e, projection) for e in range(self.count) for projection in self.names.projections)


def expert_prefix(module: str) -> str | None:
    """What precedes the expert's number in the name of an expert's projection; None for other modules."""
    match = _EXPERT.fullmatch(module)
    return match["prefix"] if match else None


def group_experts(modules: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Prefix to expert to projections, of the modules whose names are those of experts.

    Raises:
      CheckpointError: a number that is written with leading zeros, or that no expert has.
    """
    found: dict[str, dict[int, set[str]]] = {}
    for module in modules:
        if match := _EXPERT.fullmatch(module):
            if _NUMBER.fullmatch(match["expert"]) is None:
                raise CheckpointError(
                    f"{show(module)} is an expert of number {match['expert'][:20]}, expected one below ten million, "
                    "without leading zeros"
                )
            found.setdefault(match["prefix"], {}).setdefault(int(match["expert"]), set()).add(match["projection"])
    return found


def family_of(found: Mapping[int, set[str]]) -> ExpertNames | None:
    """The family whose projections are all among those of the experts of a layer; None if there is none."""
    everything = set().union(*found.values())
    return next((family for family in FAMILIES if set(family.projections) <= everything), None)


def experts_of(where: str, prefix: str, found: Mapping[int, set[str]]) -> Experts:
    """The experts below a prefix, every one with the same projections and none missing.

    Args:
      where: the checkpoint, for errors.
      prefix: as in `Experts`.
      found: expert to projections, as `group_experts` has it.

    Raises:
      CheckpointError: a projection or an expert is missing, or the names are of no known family.
    """
    everything = set().union(*found.values())
    names = family_of(found)
    if names is None:
        known = "; ".join(", ".join(family.projections) for family in FAMILIES)
        raise CheckpointError(
            f"{where}: the experts of {prefix} have {', '.join(sorted(everything))}, expected one of {known}"
        )
    if unknown := sorted(everything - set(names.projections)):
        raise CheckpointError(
            f"{where}: the experts of {prefix} have {unknown[0]} beside {', '.join(names.projections)}, "
            "which is not known"
        )
    count = max(found) + 1
    for expert in range(count):
        if expert not in found:
            raise CheckpointError(f"{where}: {prefix}.{expert} is missing, though there is {prefix}.{max(found)}")
        if lacking := [projection for projection in names.projections if projection not in found[expert]]:
            raise CheckpointError(f"{where}: {prefix}.{expert}.{lacking[0]} is missing, though other experts have it")
    return Experts(prefix, count, names)
