"""``DecoderConfig``: what a decoder is made of, read from a model's config.json."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jmoe.arguments import type_of
from jmoe.ops import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The shapes and constants of a Qwen3-MoE decoder; names are those of config.json.

    Attributes:
      vocab_size, hidden_size: V and H.
      num_hidden_layers: decoder layers.
      num_attention_heads, num_key_value_heads: query heads, and key and value heads that groups of them share.
      head_dim: width of one head.
      moe_intermediate_size: I of an expert.
      num_experts, num_experts_per_tok, norm_topk_prob: the router: softmax over all, top k, renormalised or not.
      intermediate_size: width of the plain MLP in layers that have no experts.
      dense_layers: those layers.
      rms_norm_eps: added to the mean square.
      rope_theta: base of the rotary embedding's wavelengths.
      attention_bias: q, k, v and o projections have biases.
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
    intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name), field.type))
        outside = [i for i in self.dense_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            raise ValueError(f"dense_layers={self.dense_layers} names layer {outside[0]} of {self.num_hidden_layers}")
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

    @property
    def routing(self) -> Routing:
        return Routing(top_k=self.num_experts_per_tok, renormalize=self.norm_topk_prob)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """From the contents of a config.json of model_type "qwen3_moe".

        Raises:
          ValueError: another model_type, or a key with a value that this decoder does not have, by name.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"config is {type_of(config)}, but it is the object that config.json holds")
        for key, allowed in _ALLOWED.items():
            if config.get(key, allowed[0]) not in allowed:
                wanted = " or ".join(map(repr, allowed))
                raise ValueError(f"config has {key}={config[key]!r}, but this decoder is for {wanted}")
        if config.get("model_type") != "qwen3_moe":
            raise ValueError(f"config has model_type={config.get('model_type')!r}, but this decoder is for 'qwen3_moe'")
        config = _with_num_experts(config)
        known = {field.name: field for field in dataclasses.fields(cls)}
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n != "head_dim"]
        for key in missing:
            if config.get(key) is None:
                raise ValueError(f"config has no {key}, which a qwen3_moe model needs")
        values = {name: config[name] for name in known if config.get(name) is not None}
        if "head_dim" not in values:
            hidden, heads = (_checked(key, values[key], int) for key in ("hidden_size", "num_attention_heads"))
            values["head_dim"] = hidden // heads
        values["rope_theta"] = _rope_theta(config)
        values["dense_layers"] = _dense_layers(config)
        return cls(**values)


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
}


def _checked(name: str, value: Any, kind: Any) -> Any:
    """``value`` as the field ``name`` holds it: int, float, bool, or a tuple of ints."""
    if kind is int:
        least = 0 if name == "intermediate_size" else 1
        if _is_integer(value) and value >= least:
            return int(value)
        wanted = f"an integer of at least {least}"
    elif kind is float:
        if not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf:
            return float(value)
        wanted = "a positive number"
    elif kind is bool:
        if isinstance(value, bool):
            return value
        wanted = "true or false"
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


def _rope_theta(config: Mapping[str, Any]) -> float:
    """From ``rope_theta``, or from ``rope_parameters`` as newer files have it."""
    parameters = config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"config has rope_parameters={parameters!r}, but it is an object")
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"config has rope_parameters with rope_type={kind!r}, but this decoder is for 'default'")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return 10000.0 if theta is None else _checked("rope_theta", theta, float)


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those listed, and all but every ``decoder_sparse_step``-th."""
    layers = _checked("num_hidden_layers", config["num_hidden_layers"], int)
    listed, step = config.get("mlp_only_layers"), config.get("decoder_sparse_step")
    listed = _checked("mlp_only_layers", () if listed is None else listed, tuple)
    step = _checked("decoder_sparse_step", 1 if step is None else step, int)
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)
