"""``DecoderConfig``: what a decoder is made of, read from a model's config.json."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if self.dense_layers and not self.intermediate_size:
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
        for key, allowed in _ALLOWED.items():
            if config.get(key, allowed[0]) not in allowed:
                wanted = " or ".join(map(repr, allowed))
                raise ValueError(f"config has {key}={config[key]!r}, but this decoder is for {wanted}")
        if config.get("model_type") != "qwen3_moe":
            raise ValueError(f"config has model_type={config.get('model_type')!r}, but this decoder is for 'qwen3_moe'")
        known = {field.name: field for field in dataclasses.fields(cls)}
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n != "head_dim"]
        for key in missing:
            if config.get(key) is None:
                raise ValueError(f"config has no {key}, which a qwen3_moe model needs")
        values = {name: config[name] for name in known if config.get(name) is not None}
        values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
        values["rope_theta"] = _rope_theta(config)
        values["dense_layers"] = _dense_layers(config)
        return cls(**values)


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "rope_scaling": (None,),
}


def _rope_theta(config: Mapping[str, Any]) -> float:
    """From ``rope_theta``, or from ``rope_parameters`` as newer files have it."""
    parameters = config.get("rope_parameters") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"config has rope_parameters with rope_type={kind!r}, but this decoder is for 'default'")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    return 10000.0 if theta is None else float(theta)


def _dense_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without experts: those listed, and all but every ``decoder_sparse_step``-th."""
    listed, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return tuple(i for i in range(config["num_hidden_layers"]) if i in listed or (i + 1) % step)
