"""Activation scales of a checkpoint, measured with its own model over some text."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jmoe.checkpoint.load import load_model
from jmoe.checkpoint.reader import Checkpoint
from jmoe.models import Decoder
from jmoe.nn import FusedMoE
from jmoe.nn.calibrate import calibrate
from jmoe.numerics import E4M3
from jmoe.scheme import Scheme

WINDOW = 256
_BATCH = 8


@dataclass(frozen=True)
class Measured:
    """Scales by the names of a checkpoint.

    Attributes:
      inputs: module to the scale of its input; none where none was asked for.
      kv_cache: ``<attention>.k_scale`` and ``.v_scale``, of keys and values as a cache in e4m3 holds them.
    """

    inputs: dict[str, float]
    kv_cache: dict[str, float]


def measure(checkpoint: Checkpoint, scheme: Scheme | None, tokens: np.ndarray, *, kv_cache: bool) -> Measured:
    """Runs the checkpoint's model over windows of tokens, each on its own; a last one that is not full is left out.

    The whole model is held in memory, in the dtype of its files. All projections of an expert's input share a scale; an
    expert that got no token takes the largest of its layer's, with a warning.

    Args:
      checkpoint: unquantized, of a model that ``load_model`` knows.
      scheme: of the activations whose scales are measured; None measures none.
      tokens: ids (n,).
      kv_cache: whether keys and values are measured too.

    Raises:
      ValueError: less than a window of tokens, or ids outside the vocabulary; CheckpointError: as for ``load_model``.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"calibration has shape {tokens.shape} and dtype {tokens.dtype}, but it is integer ids (n,)")
    if len(tokens) < WINDOW:
        raise ValueError(f"calibration has {len(tokens)} tokens, but it takes at least one window of {WINDOW}")
    model = load_model(checkpoint, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    vocabulary = model.config.vocab_size
    if outside := sorted({*tokens[(tokens < 0) | (tokens >= vocabulary)].tolist()}):
        raise ValueError(f"calibration holds the token {outside[0]}, but the model's are 0 to {vocabulary - 1}")
    inputs = {} if scheme is None else _input_scales(model, scheme, tokens)
    return Measured(inputs, _cache_scales(model, tokens) if kv_cache else {})


def _batches(tokens: np.ndarray) -> Iterator[Array]:
    """Windows, all batches of one size so that one compilation serves: the last is filled up with windows again."""
    windows = tokens[: len(tokens) // WINDOW * WINDOW].reshape(-1, WINDOW).astype(np.int32)
    size = min(_BATCH, len(windows))
    for start in range(0, len(windows), size):
        yield jnp.asarray(windows[min(start, len(windows) - size) :][:size])


def _input_scales(model: Decoder, scheme: Scheme, tokens: np.ndarray) -> dict[str, float]:
    measured = calibrate(model, _batches(tokens))
    modules = {".".join(map(str, keys)): module for keys, module in nnx.iter_modules(model)}
    intermediates = {
        path: np.asarray(measured.intermediate_scale(path, scheme))
        for path, module in modules.items()
        if isinstance(module, FusedMoE)
    }
    scales: dict[str, float] = {}
    for name, place in model.parameter_places().items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or place.path not in measured.inputs or place.name not in ("weight", "w13", "w2"):
            continue
        if place.name == "w2":
            scales[module] = float(intermediates[place.path][place.index])
        else:
            scales[module] = float(measured.input_scale(place.path, scheme))
    return scales


def _cache_scales(model: Decoder, tokens: np.ndarray) -> dict[str, float]:
    graphdef, state = nnx.split(model)
    amax = np.zeros((len(model.layers), 2), np.float32)
    for batch in _batches(tokens):
        amax = np.maximum(amax, np.asarray(_cache_amax(graphdef, state, batch)))
    if not np.isfinite(amax).all():
        raise ValueError("calibration met keys or values that are not finite")
    scales = np.where(amax > 0, amax * (np.float32(1) / np.float32(E4M3.max)), np.float32(1))
    attention = [
        name.removesuffix(".k_proj.weight") for name in model.parameter_places() if name.endswith(".k_proj.weight")
    ]
    return {
        f"{prefix}.{leaf}": float(scale)
        for prefix, pair in zip(attention, scales, strict=True)
        for leaf, scale in zip(("k_scale", "v_scale"), pair, strict=True)
    }


@functools.partial(jax.jit, static_argnums=0)
def _cache_amax(graphdef: nnx.GraphDef, state: nnx.State, tokens: Array) -> Array:
    """The largest magnitudes (layers, 2) of the keys and the values that a cache holds after these tokens."""
    model = nnx.merge(graphdef, state)
    _, caches = model.decode_step(tokens, model.init_cache(*tokens.shape))
    return jnp.stack([jnp.stack([jnp.max(jnp.abs(c.keys)), jnp.max(jnp.abs(c.values))]) for c in caches])
