"""``Decoder``: a decoder with experts on jmoe's modules, so that a whole checkpoint can be judged."""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType

from jmoe.arguments import COMPUTE_DTYPES, as_array, check_type, float_dtype
from jmoe.backends.select import current_device
from jmoe.models.config import DecoderConfig
from jmoe.models.rope import rotate
from jmoe.nn import FusedMoE, KVCache, Linear
from jmoe.nn.options import extent
from jmoe.nn.param import split_axes
from jmoe.nn.rules import Rules as Rules
from jmoe.nn.rules import check_rules, decide, decide_all, first_match
from jmoe.scheme import Recipe
from jmoe.sharding import AxisName

ShardingRules = Sequence[tuple[str, Sequence[AxisName]]]
"""(regular expression on the whole module path, mesh axes) pairs; the first that matches decides."""


@dataclass(frozen=True, slots=True)
class MoENames:
    """How files of a family name a layer of experts.

    Attributes:
      layer: the module that holds it, "mlp" in this decoder.
      router: the router in it.
      gate, up, down: an expert's projections.
    """

    layer: str
    router: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


MOE_NAMES = {
    "qwen3_moe": MoENames("mlp", "gate"),
    "mixtral": MoENames("block_sparse_moe", "gate", "w1", "w3", "w2"),
    "gpt_oss": MoENames("mlp", "router"),
}
"""By ``DecoderConfig.model_type``; gpt-oss's experts as a checkpoint shows them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint's tensor lives in a model.

    Attributes:
      path: the module, e.g. "layers.0.mlp".
      name: its variable (or weight), e.g. "w13".
      index: the part of the variable's leading axes that the tensor is, e.g. (expert, half); () is all of it.
    """

    path: str
    name: str
    index: tuple[int, ...] = ()


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x**2) + eps) * weight over the last axis, in float32."""

    def __init__(self, features: int, eps: float, *, param_dtype: jax.typing.DTypeLike) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((features,), param_dtype))

    def __call__(self, x: Array) -> Array:
        h = x.astype(jnp.float32)
        h = h * lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + jnp.float32(self.eps))
        return (h * self.weight.get_value().astype(jnp.float32)).astype(x.dtype)


class Embedding(nnx.Module):
    """Rows of ``weight`` (V, H)."""

    def __init__(
        self, vocab: int, features: int, *, param_dtype: jax.typing.DTypeLike, rngs: nnx.Rngs | None = None
    ) -> None:
        shape = (vocab, features)
        init = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(
            jnp.zeros(shape, param_dtype) if rngs is None else init(rngs.params(), shape, param_dtype)
        )

    def __call__(self, tokens: Array) -> Array:
        return jnp.take(self.weight.get_value(), tokens, axis=0, mode="clip")

    def attend(self, x: Array) -> Array:
        """float32 logits x w^T."""
        return _dot("...h,vh->...v", x, self.weight.get_value().astype(x.dtype))


class Attention(nnx.Module):
    """Causal attention with grouped key and value heads and rotary embeddings.

    Queries and keys may be normalised, one may attend to a window of the last tokens only, and each query head may have
    a sink: a logit that takes part in its softmax, and whose weight goes to no value.
    """

    def __init__(
        self, config: DecoderConfig, *, window: int | None, linear: Any, param_dtype: jax.typing.DTypeLike
    ) -> None:
        self.head_dim = config.head_dim
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling
        self.window = window
        q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = linear("q_proj", config.hidden_size, q)
        self.k_proj = linear("k_proj", config.hidden_size, kv)
        self.v_proj = linear("v_proj", config.hidden_size, kv)
        self.o_proj = linear("o_proj", q, config.hidden_size)
        for name in ("q_proj", "k_proj", "v_proj"):
            _check_heads(name, getattr(self, name), config.num_key_value_heads)
        self.q_norm = self.k_norm = self.sinks = nnx.data(None)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, param_dtype=param_dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, param_dtype=param_dtype)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros((config.num_attention_heads,), param_dtype))

    def __call__(self, x: Array, cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
        """Attends from x (B, S, H) to itself, or to all that ``cache`` then holds."""
        batch, length, _ = x.shape
        q, k, v = (
            p(x).reshape(batch, length, p.out_features // self.head_dim, self.head_dim)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = jnp.arange(length, dtype=jnp.int32)
        if cache is None:
            mask = positions <= positions[:, None]
        else:
            positions = positions + cache.position
        q = rotate(q if self.q_norm is None else self.q_norm(q), positions, self.theta, self.scaling)
        k = rotate(k if self.k_norm is None else self.k_norm(k), positions, self.theta, self.scaling)
        if cache is not None:
            cache = cache.update(k, v)
            k, v, mask = cache.keys, cache.values, cache.mask(length)
        if self.window is not None:
            mask &= jnp.arange(k.shape[1], dtype=jnp.int32) > positions[:, None] - jnp.int32(self.window)
        q = q.reshape(batch, length, k.shape[2], q.shape[2] // k.shape[2], self.head_dim)
        scores = _dot("bqhgd,bkhd->bhgqk", q, k.astype(q.dtype)) * jnp.float32(self.head_dim**-0.5)
        weights = self._softmax(jnp.where(mask, scores, -jnp.inf)).astype(x.dtype)
        y = _dot("bhgqk,bkhd->bqhgd", weights, v.astype(x.dtype)).astype(x.dtype)
        return self.o_proj(y.reshape(batch, length, self.o_proj.in_features)), cache

    def _softmax(self, scores: Array) -> Array:
        """Over the last axis of float32 scores (B, heads, groups, queries, keys), and the sinks."""
        if self.sinks is None:
            return jax.nn.softmax(scores, axis=-1)
        _, heads, groups, _, _ = scores.shape
        sinks = self.sinks.get_value().astype(jnp.float32).reshape(heads, groups, 1, 1)
        column = jnp.sum(jnp.zeros_like(scores), axis=-1, keepdims=True) + sinks  # sharded as scores are
        with_sinks = jnp.concatenate([scores, column], axis=-1)
        return jax.nn.softmax(with_sinks, axis=-1)[..., :-1]


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), in the layers that have no experts."""

    def __init__(self, config: DecoderConfig, *, linear: Any) -> None:
        self.gate_proj = linear("gate_proj", config.hidden_size, config.intermediate_size)
        self.up_proj = linear("up_proj", config.hidden_size, config.intermediate_size)
        self.down_proj = linear("down_proj", config.intermediate_size, config.hidden_size)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        attention: Attention,
        mlp: nnx.Module,
        param_dtype: jax.typing.DTypeLike,
    ) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.mlp = mlp

    def __call__(self, x: Array, cache: KVCache | None = None) -> tuple[Array, KVCache | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """A decoder with experts, Qwen3-MoE, Mixtral or gpt-oss: tokens to the logits of what follows.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmoe.models import Decoder, DecoderConfig
      ...
      >>> config = DecoderConfig(
      ...     vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
      ...     head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
      >>> model = Decoder(config, recipe="int8", rngs=nnx.Rngs(0))
      >>> tokens = jnp.asarray([[7, 3, 5]])
      >>> model(tokens).shape
      (1, 3, 256)
      >>> model.generate(tokens, 4).shape
      (1, 4)

    Module paths are a checkpoint's without "model.": ``layers.0.self_attn.q_proj``, ``layers.0.mlp`` (a FusedMoE, or in
    a layer without experts ``gate_proj``, ``up_proj`` and ``down_proj``), ``embed_tokens``, ``norm``, ``lm_head``;
    ``parameter_places`` says where each tensor of a checkpoint goes. Norms, softmax, router and rotary embeddings are
    float32.

    Args:
      config: shapes and constants.
      recipe: how the layers' projections and experts are quantized, a Recipe or its name (default: ``"bf16"``, not at
        all). Embedding and lm_head are not.
      rules: (regular expression, recipe or None) pairs on module paths, which decide before ``recipe`` does, as for
        ``jmoe.nn.quantize_model``; the only way to quantize lm_head.
      dtype: what is computed in (default: param_dtype).
      param_dtype: dtype of weights that are not quantized (default: bfloat16).
      sharding: (regular expression, mesh axes) pairs on module paths: the axes over which (out, in) of a linear layer,
        or (experts, intermediate, hidden) of a layer of experts, are sharded. The first that matches decides; where
        none does, every device has all.
      implementation: of the products, by name (default: the selector's choice).
      rngs: rng key; None leaves weights zero, to be filled. ``nnx.eval_shape(lambda: Decoder(config))`` makes one
        without any memory.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        recipe: Recipe | str = "bf16",
        rules: Rules = (),
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
        sharding: ShardingRules = (),
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        check_type("config", config, DecoderConfig, "a DecoderConfig")
        check_rules(rules)
        patterns = _checked_sharding(sharding)
        self.config = config
        param_dtype = float_dtype("param_dtype", param_dtype, COMPUTE_DTYPES)
        self.dtype = param_dtype if dtype is None else float_dtype("dtype", dtype, COMPUTE_DTYPES)
        paths = []

        def choose(path: str, default: Recipe | str) -> Recipe | str:
            paths.append(path)
            decision = decide(rules, path)
            return default if decision.rule is None else decision.recipe or "bf16"

        def axes_of(path: str, unsharded: Sequence[AxisName]) -> Sequence[AxisName]:
            index = first_match(patterns, path)
            return unsharded if index is None else sharding[index][1]

        def linear(path: str, in_features: int, out_features: int, default: Recipe | str, **options: Any) -> Linear:
            return Linear(
                in_features,
                out_features,
                recipe=choose(path, default),
                param_dtype=param_dtype,
                sharding=axes_of(path, (None, None)),
                implementation=implementation,
                rngs=rngs,
                **options,
            )

        def layer(i: int) -> DecoderLayer:
            path = f"layers.{i}"

            def child(parent: str, use_bias: bool) -> Any:
                return lambda name, k, n: linear(f"{path}.{parent}.{name}", k, n, recipe, use_bias=use_bias)

            attention = Attention(
                config,
                window=config.sliding_window if i in config.sliding_layers else None,
                linear=child("self_attn", config.attention_bias),
                param_dtype=param_dtype,
            )
            if i in config.dense_layers:
                mlp: nnx.Module = MLP(config, linear=child("mlp", False))
            else:
                mlp = FusedMoE(
                    config.hidden_size,
                    config.moe_intermediate_size,
                    config.num_experts,
                    config.routing,
                    recipe=choose(f"{path}.mlp", recipe),
                    activation=config.activation,
                    use_bias=config.moe_bias,
                    router_bias=config.moe_bias,
                    param_dtype=param_dtype,
                    router_dtype=param_dtype,
                    sharding=axes_of(f"{path}.mlp", (None, None, None)),
                    implementation=implementation,
                    rngs=rngs,
                )
            return DecoderLayer(config, attention=attention, mlp=mlp, param_dtype=param_dtype)

        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, param_dtype=param_dtype, rngs=rngs)
        self.layers = nnx.List([layer(i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        self.lm_head = nnx.data(None)
        if not config.tie_word_embeddings:
            self.lm_head = linear(
                "lm_head", config.hidden_size, config.vocab_size, "bf16", preferred_element_type=jnp.float32
            )
        decide_all(rules, [(path,) for path in paths])  # raises where a rule is of no use
        used = {first_match(patterns, path) for path in paths}
        if unused := [index for index in range(len(patterns)) if index not in used]:
            shown = ", ".join(map(repr, paths[:6]))
            raise ValueError(
                f"sharding rule {unused[0]} ({patterns[unused[0]]!r}) decides nothing: it must match a whole path that "
                f"no earlier rule matches, and layers are {shown} and {len(paths) - 6} more"
            )

    def __call__(self, tokens: Array) -> Array:
        """float32 logits (B, S, V) of integer tokens (B, S): entry s is about token s + 1; B and S may be 0.

        Raises:
          ValueError: another shape; TypeError: another dtype.
        """
        tokens = _checked_tokens(tokens, "(B, S)")
        x = self.embed_tokens(tokens).astype(self.dtype)
        for layer in self.layers:
            x, _ = layer(x)
        return self._logits(x)

    def _logits(self, x: Array) -> Array:
        x = self.norm(x)
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)

    def init_cache(self, batch: int, max_len: int) -> tuple[KVCache, ...]:
        """An empty cache of each layer, for ``max_len`` tokens."""
        heads, head_dim = self.config.num_key_value_heads, self.config.head_dim
        return tuple(KVCache.init(batch, max_len, heads, head_dim, self.dtype) for _ in self.layers)

    def decode_step(self, token: Array, cache: tuple[KVCache, ...]) -> tuple[Array, tuple[KVCache, ...]]:
        """One more token.

        Args:
          token: (B,), or (B, S) to read several at once.
          cache: of each layer, from ``init_cache`` or an earlier step.

        Returns:
          float32 logits (B, V) of what follows the last token, and the cache with it.

        Raises:
          ValueError: no token, another shape, or caches of other shapes; TypeError: tokens of another dtype.
        """
        if jnp.ndim(token) == 1:
            token = jnp.expand_dims(token, 1)
        token = _checked_tokens(token, "(B,) or (B, S)", least=1)
        if not isinstance(cache, tuple | list) or len(cache) != len(self.layers):
            raise ValueError(f"cache is one KVCache for each of {len(self.layers)} layers, as init_cache makes them")
        x = self.embed_tokens(token).astype(self.dtype)
        updated = []
        for layer, before in zip(self.layers, cache, strict=True):
            x, after = layer(x, before)
            assert after is not None  # a layer that is given a cache returns one
            updated.append(after)
        return self._logits(x[:, -1]), tuple(updated)

    def generate(self, tokens: Array, steps: int) -> Array:
        """The ``steps`` most likely next tokens, int32 (B, steps), after tokens (B, S); compiled once a shape.

        Raises:
          ValueError: steps below 0, or more than the device's memory has a cache for, tokens of another shape, S = 0,
            or an id outside the vocabulary (which can be seen outside ``jax.jit`` only); TypeError: other types.
        """
        tokens = _checked_tokens(tokens, "(B, S)", least=1)
        if not isinstance(tokens, jax.core.Tracer):
            _check_vocabulary(np.asarray(tokens), self.config.vocab_size)
        steps = extent("steps", steps, least=0)
        cache = jax.eval_shape(lambda: self.init_cache(tokens.shape[0], tokens.shape[1] + steps))
        size, device = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)), current_device()
        if size > device.memory > 0:
            raise ValueError(
                f"steps={steps} after {tokens.shape[1]} tokens need a cache of {size / 1e9:,.0f} GB, and {device.name} "
                f"has {device.memory / 1e9:,.0f} GB"
            )
        return _generate(*nnx.split(self), tokens, steps)

    def token_losses(self, tokens: Array) -> Array:
        """float32 (B, S - 1): -log p of tokens 1 .. S - 1 given those before, in nats.

        A token outside the vocabulary has no probability; ``evaluate`` refuses it, and here its loss is NaN.

        Raises:
          ValueError: another shape, or S = 0; TypeError: another dtype.
        """
        tokens = _checked_tokens(tokens, "(B, S)", least=1)
        logits = self(tokens)[:, :-1]
        targets = tokens[:, 1:]
        known = (targets >= 0) & (targets < self.config.vocab_size)
        chosen = jnp.take_along_axis(logits, jnp.where(known, targets, 0)[..., None], axis=-1)[..., 0]
        chosen = jnp.where(known, chosen, jnp.nan)
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    def loss(self, tokens: Array) -> Array:
        """The mean of ``token_losses``, for training.

        Raises:
          ValueError: another shape, less than two tokens a row, or no row; TypeError: another dtype.
        """
        tokens = _checked_tokens(tokens, "(B, S)", least=2)
        if not tokens.shape[0]:
            raise ValueError("tokens has no row, and a mean of no losses is nothing")
        return jnp.mean(self.token_losses(tokens))

    def parameter_places(self) -> dict[str, Place]:
        """Where each tensor of an unquantized checkpoint goes: its name there, and its place here.

        A quantized checkpoint names its tensors after the same ones ("...q_proj.weight_scale"), so that what comes
        before the last dot finds their place too.
        """
        names = MOE_NAMES[self.config.model_type]
        places = {}
        for keys, module in nnx.iter_modules(self):
            path = ".".join(map(str, keys))
            prefix = "" if path.startswith("lm_head") else "model."
            if isinstance(module, FusedMoE):
                layer = f"{prefix}{path.removesuffix('mlp')}{names.layer}"
                places.update(_moe_places(module, path, layer, names))
            elif isinstance(module, Linear | RMSNorm | Embedding):
                places[f"{prefix}{path}.weight"] = Place(path, "weight")
                if getattr(module, "bias", None) is not None:
                    places[f"{prefix}{path}.bias"] = Place(path, "bias")
            elif isinstance(module, Attention) and module.sinks is not None:
                places[f"{prefix}{path}.sinks"] = Place(path, "sinks")
        return places


def _moe_places(module: FusedMoE, path: str, layer: str, names: MoENames) -> dict[str, Place]:
    """The places of a layer of experts, which the model has at ``path`` and a file below ``layer``."""
    places = {f"{layer}.{names.router}.weight": Place(path, "router_weight")}
    if module.router_bias is not None:
        places[f"{layer}.{names.router}.bias"] = Place(path, "router_bias")
    for e in range(module.num_experts):
        for projection, weight, bias, index in (
            (names.gate, "w13", "b13", (e, 0)),
            (names.up, "w13", "b13", (e, 1)),
            (names.down, "w2", "b2", (e,)),
        ):
            places[f"{layer}.experts.{e}.{projection}.weight"] = Place(path, weight, index)
            if getattr(module, bias) is not None:
                places[f"{layer}.experts.{e}.{projection}.bias"] = Place(path, bias, index)
    return places


def _check_heads(name: str, module: Linear, heads: int) -> None:
    """Raises where devices along explicit mesh axes would hold parts of a key and value head, or of its queries."""
    mesh = jax.sharding.get_abstract_mesh()
    out, _ = split_axes(module.weight, 2)
    explicit = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    count = math.prod(mesh.shape[axis] for axis in out if axis in explicit)
    if heads % count:
        raise ValueError(
            f"sharding splits {name} over {count} devices along {', '.join(out)}, but they must divide the {heads} key "
            "and value heads, except on axes of AxisType.Auto"
        )


def _checked_sharding(sharding: ShardingRules) -> list[str]:
    """The expressions of rules of sharding; raises TypeError or ValueError where one is none."""
    wanted = "a list of (regular expression, mesh axes) pairs"
    if isinstance(sharding, str) or not isinstance(sharding, Sequence):
        raise TypeError(f"sharding={sharding!r} must be {wanted}")
    for index, rule in enumerate(sharding):
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
            raise TypeError(f"sharding rule {index} is {rule!r}, but sharding is {wanted}")
        try:
            re.compile(rule[0])
        except re.error as error:
            raise ValueError(f"sharding rule {index} ({rule[0]!r}) is not a regular expression: {error}") from error
    return [pattern for pattern, _ in sharding]


def _check_vocabulary(tokens: np.ndarray, vocabulary: int) -> None:
    outside = np.argwhere((tokens < 0) | (tokens >= vocabulary))
    if len(outside):
        at = tuple(map(int, outside[0]))
        place = ", ".join(map(str, at))
        raise ValueError(f"tokens[{place}]={tokens[at]} is no id of the model's; they are 0 to {vocabulary - 1}")


def evaluate(model: Decoder, tokens: np.ndarray, *, window: int = 256, batch: int = 16) -> float:
    """Mean -log p, in nats a token, over windows of ``window`` tokens that do not overlap, each read on its own.

    All tokens of a window but its first are scored; a last window that is not full is left out. The sum is float64.

    Args:
      model: the decoder.
      tokens: integers (n,).
      window: tokens a window.
      batch: windows computed at once; every batch is computed at this size, so that one compilation serves.

    Raises:
      ValueError: less than one window of tokens, a window of less than two, no batch, or an id that the model has not;
      TypeError: tokens that are no integers, or a model that is no Decoder.
    """
    check_type("model", model, Decoder, "a Decoder, as jmoe.checkpoint.load_model gives it")
    tokens, vocabulary = np.asarray(tokens), model.config.vocab_size
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"tokens has dtype {tokens.dtype}, but token ids are integers")
    if tokens.ndim != 1:
        raise ValueError(f"tokens has shape {tokens.shape}, but it is (n,)")
    _check_vocabulary(tokens, vocabulary)
    window, batch = extent("window", window, least=2), extent("batch", batch)
    windows = len(tokens) // window
    if not windows:
        raise ValueError(f"{len(tokens)} tokens in windows of {window}: it takes one window")
    rows = tokens[: windows * window].reshape(windows, window).astype(np.int32)
    graphdef, state = nnx.split(model)
    total = 0.0
    for start in range(0, windows, batch):
        part = rows[start : start + batch]
        padded = np.concatenate([part, np.repeat(part[-1:], batch - len(part), axis=0)])
        losses = np.asarray(_token_losses(graphdef, state, padded))
        total += losses[: len(part)].sum(dtype=np.float64)
    return total / (windows * (window - 1))


@functools.partial(jax.jit, static_argnums=0)
def _token_losses(graphdef: nnx.GraphDef, state: nnx.State, tokens: Array) -> Array:
    return nnx.merge(graphdef, state).token_losses(tokens)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _generate(graphdef: nnx.GraphDef, state: nnx.State, tokens: Array, steps: int) -> Array:
    model = nnx.merge(graphdef, state)
    cache = model.init_cache(tokens.shape[0], tokens.shape[1] + steps)
    logits, cache = model.decode_step(tokens, cache)

    def step(carry: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], Array]:
        token, cache = carry
        logits, cache = model.decode_step(token, cache)
        return (_most_likely(logits), cache), token

    _, generated = lax.scan(step, (_most_likely(logits), cache), length=steps)
    return generated.T


def _checked_tokens(tokens: Array, axes: str, *, least: int = 0) -> Array:
    """Token ids as an integer array (B, S), S of at least ``least``; ``axes`` says what the caller takes."""
    tokens = as_array("tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens has dtype {tokens.dtype}, but token ids are integers")
    if tokens.ndim != 2:
        raise ValueError(f"tokens has shape {tokens.shape}, but it is {axes}")
    if tokens.shape[1] < least:
        raise ValueError(f"tokens has shape {tokens.shape}, but here it takes S of at least {least}")
    return tokens


def _most_likely(logits: Array) -> Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    """An einsum with float32 sums, and float32 operands taken as such."""
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
