"""``DecoderConfig``: what a decoder is made of, read from a model's config.json."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jmoe.arguments import type_of
from jmoe.backends.activation import Activation, swiglu
from jmoe.models.rope import Yarn
from jmoe.ops import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The shapes and constants of a decoder with experts; names are those of config.json.

    Attributes:
      vocab_size, hidden_size: V and H.
      num_hidden_layers: decoder layers.
      num_attention_heads, num_key_value_heads: query heads, and key and value heads that groups of them share.
      head_dim: width of one head.
      moe_intermediate_size: I of an expert.
      num_experts, num_experts_per_tok, norm_topk_prob: the router: softmax over all, top k, renormalised or not.
      model_type: "qwen3_moe", "mixtral" or "gpt_oss": how files name the tensors. gpt-oss's router takes the top k
        logits first, and softmax over these.
      moe_bias: the router and the experts have biases.
      swiglu_limit: None: experts compute silu(g) u. A number L: g sigmoid(1.702 g) (u + 1), with g clamped to at most L
        and u to -L .. L (gpt-oss).
      intermediate_size: width of the plain MLP in layers that have no experts.
      dense_layers: those layers.
      rms_norm_eps: added to the mean square.
      rope_theta: base of the rotary embedding's wavelengths.
      rope_scaling: how these are stretched, or None.
      attention_bias: q, k, v and o projections have biases.
      attention_sinks: every query head has one more logit in its softmax, whose weight goes to nothing.
      qk_norm: queries and keys are normalised.
      sliding_window: how many tokens one attends to at most, itself included, in ``sliding_layers``.
      sliding_layers: those layers; in others one attends to all before it.
      tie_word_embeddings: logits use the embedding instead of a weight of their own.

    Raises:
      ValueError: a field of another type, an extent that is not positive, or fields that do not fit each other. (Never
        TypeError: fields come from files.)
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False
    model_type: str = "qwen3_moe"
    moe_bias: bool = False
    swiglu_limit: float | None = None
    intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Yarn | None = None
    attention_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = True
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name), field.type))
        for name in ("dense_layers", "sliding_layers"):
            layers = getattr(self, name)
            if outside := [i for i in layers if not 0 <= i < self.num_hidden_layers]:
                raise ValueError(f"{name}={layers} names layer {outside[0]} of {self.num_hidden_layers}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if self.dense_layers and self.intermediate_size < 1:
            raise ValueError(f"dense_layers={self.dense_layers} need an intermediate_size")
        if self.sliding_layers and self.sliding_window < 1:
            raise ValueError(f"sliding_layers={self.sliding_layers} need a sliding_window")
        if self.rope_scaling is not None and self.rope_theta <= 1:
            raise ValueError(f"rope_theta={self.rope_theta} must be more than 1 with a rope_scaling")

    @property
    def routing(self) -> Routing:
        if self.model_type == "gpt_oss":
            return Routing(top_k=self.num_experts_per_tok, order="topk_score")
        return Routing(top_k=self.num_experts_per_tok, renormalize=self.norm_topk_prob)

    @property
    def activation(self) -> Activation:
        """What experts compute between their two products."""
        return swiglu() if self.swiglu_limit is None else swiglu(1.702, 1.0, self.swiglu_limit)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """From the contents of a config.json of model_type "qwen3_moe", "mixtral" or "gpt_oss".

        Raises:
          ValueError: another model_type, or a key with a value that this decoder does not have, by name.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"config is {type_of(config)}, but it is the object that config.json holds")
        for key, allowed in _ALLOWED.items():
            if config.get(key, allowed[0]) not in allowed:
                wanted = " or ".join(map(repr, allowed))
                raise ValueError(f"config has {key}={config[key]!r}, but this decoder is for {wanted}")
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in _FAMILIES:
            wanted = " or ".join(map(repr, _FAMILIES))
            raise ValueError(f"config has model_type={model_type!r}, but this decoder is for {wanted}")
        family = _FAMILIES[model_type]
        config = {**family.defaults, **{k: v for k, v in _with_num_experts(config).items() if v is not None}}
        for key in (*_NEEDED, *family.needed):
            if key not in config:
                raise ValueError(f"config has no {key}, which a {model_type} model needs")
        values = {key: config[key] for key in (*_NEEDED, *_OPTIONAL, *family.keys) if key in config}
        values.update({field: config[key] for field, key in family.renamed.items()})
        if "head_dim" not in values:
            hidden, heads = (_checked(key, values[key], int) for key in ("hidden_size", "num_attention_heads"))
            values["head_dim"] = hidden // heads
        if model_type == "gpt_oss" and "rope_parameters" not in config and "rope_scaling" not in config:
            raise ValueError("config has no rope_scaling, which a gpt_oss model needs")
        values["rope_theta"], values["rope_scaling"] = _rope(config)
        if model_type == "qwen3_moe":
            values["dense_layers"] = _dense_layers(config)
        elif "sliding_window" in config:
            values["sliding_window"] = config["sliding_window"]
            values["sliding_layers"] = _sliding_layers(config, alternate=model_type == "gpt_oss")
        return cls(model_type=model_type, **values, **family.always)


_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads") + (
    "num_experts",
    "num_experts_per_tok",
)
_OPTIONAL = ("head_dim", "rms_norm_eps", "tie_word_embeddings")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "swiglu_alpha": (1.702, None),
    "use_sliding_window": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """How a family of models writes its config.json.

    Attributes:
      needed: keys that it must have, beside those of all families.
      keys: keys that are read, beside those of all families.
      renamed: field to key, where names differ.
      defaults: of keys that a file may leave out.
      always: fields that all its models share.
    """

    needed: tuple[str, ...]
    keys: tuple[str, ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    always: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_FAMILIES = {
    "qwen3_moe": _Family(
        needed=("moe_intermediate_size",),
        keys=("moe_intermediate_size", "intermediate_size", "norm_topk_prob", "attention_bias"),
    ),
    "mixtral": _Family(
        needed=("intermediate_size",),
        renamed={"moe_intermediate_size": "intermediate_size"},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        always={"norm_topk_prob": True, "qk_norm": False},
    ),
    "gpt_oss": _Family(
        needed=("intermediate_size",),
        keys=("attention_bias", "swiglu_limit"),
        renamed={"moe_intermediate_size": "intermediate_size"},
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "sliding_window": 128,
        },
        always={"qk_norm": False, "attention_sinks": True, "moe_bias": True},
    ),
}


def _checked(name: str, value: Any, kind: Any) -> Any:
    """``value`` as the field ``name`` holds it."""
    if kind is int:
        least = 0 if name in ("intermediate_size", "sliding_window") else 1
        if _is_integer(value) and value >= least:
            return int(value)
        wanted = f"an integer of at least {least}"
    elif kind is float or kind == float | None:
        if value is None and kind is not float:
            return None
        if not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf:
            return float(value)
        wanted = "a positive number"
    elif kind is bool:
        if isinstance(value, bool):
            return value
        wanted = "true or false"
    elif kind is str:
        if value in _FAMILIES:
            return value
        wanted = " or ".join(map(repr, _FAMILIES))
    elif kind == Yarn | None:
        if value is None or isinstance(value, Yarn):
            return value
        wanted = "a jmoe.models.rope.Yarn, or None"
    else:
        if isinstance(value, list | tuple) and all(map(_is_integer, value)):
            return tuple(map(int, value))
        wanted = "integers"
    raise ValueError(f"{name}={value!r} must be {wanted}")


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def _with_num_experts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``num_experts`` under that name; newer files call it ``num_local_experts``."""
    old, new = config.get("num_experts"), config.get("num_local_experts")
    if old is None or new is None:
        return {**config, "num_experts": new if old is None else old}
    if old != new:
        raise ValueError(f"config has num_experts={old!r} and num_local_experts={new!r}, two names of one number")
    return config


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Base and stretching, from ``rope_theta`` and ``rope_scaling``, or both from ``rope_parameters`` (newer files)."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    parameters = config.get(key, {})
    if not isinstance(parameters, Mapping):
        raise ValueError(f"config has {key}={parameters!r}, but it is an object")
    theta = _checked("rope_theta", parameters.get("rope_theta", config.get("rope_theta", 10000.0)), float)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"config has {key} with rope_type={kind!r}, but this decoder is for 'default' or 'yarn'")
    known = {field.name for field in dataclasses.fields(Yarn)}
    given = {k: v for k, v in parameters.items() if v is not None and k not in ("rope_type", "type", "rope_theta")}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"config has {key} with {unknown[0]}={given[unknown[0]]!r}, which this decoder does not know")
    if "original_max_position_embeddings" not in given and "max_position_embeddings" in config:
        given["original_max_position_embeddings"] = config["max_position_embeddings"]
    for name in ("factor", "original_max_position_embeddings"):
        if name not in given:
            raise ValueError(f"config has {key} without {name}, which rope_type 'yarn' needs")
    try:
        return theta, Yarn(**given)
    except ValueError as error:
        raise ValueError(f"config has {key} in which {error}") from None


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those listed, and all but every ``decoder_sparse_step``-th."""
    layers = _checked("num_hidden_layers", config["num_hidden_layers"], int)
    listed = _checked("mlp_only_layers", config.get("mlp_only_layers", ()), tuple)
    step = _checked("decoder_sparse_step", config.get("decoder_sparse_step", 1), int)
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def _sliding_layers(config: Mapping[str, Any], *, alternate: bool) -> tuple[int, ...]:
    """Layers with a sliding window: as ``layer_types`` says; without it all, or every second one from the first on."""
    layers = _checked("num_hidden_layers", config["num_hidden_layers"], int)
    types = config.get("layer_types")
    if types is None:
        return tuple(range(0, layers, 2 if alternate else 1))
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise ValueError(f"config has layer_types={types!r}, but it is a list of {layers}, one for each layer")
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            wanted = "'sliding_attention' or 'full_attention'"
            raise ValueError(f"config has layer_types with {kind!r}, but this decoder is for {wanted}")
    return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
