"""Activations in a kernel, against jmoe's formulas."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.backends import activation as act
from pallas_kernels import lowering
from pallas_kernels.activation import Activation, ActivationParams, activate
from pallas_kernels.lowering import arange, load, store

X = jnp.array([-jnp.inf, -30, -8, -1, -0.1, 0, 0.1, 1, 6.5, 8, 30, jnp.inf, jnp.nan, 2, 3, 4], jnp.float32)
UP = jnp.linspace(-9, 9, 16, dtype=jnp.float32).at[15].set(jnp.nan)


def in_kernel(activation: act.Activation, halves: list[jax.Array], params: ActivationParams) -> jax.Array:
    ours = Activation(**{f.name: getattr(activation, f.name) for f in dataclasses.fields(activation)})

    def kernel(half_refs: list[Any], params_refs: ActivationParams, out_ref: Any) -> None:
        lanes = (arange(16),)
        values = [load(ref, lanes) for ref in half_refs]
        store(out_ref, lanes, activate(ours, values, params_refs, jnp.int32(1)))

    return lowering.kernel_call(
        kernel,
        name="activation",
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct((16,), jnp.float32),
        num_warps=1,
        num_stages=1,
        interpret=True,
    )(halves, params)


@pytest.mark.parametrize("name", ["silu", "swigluoai", "swiglustep:limit=2", "gelu", "gelu_tanh"])
def test_of_gate_and_up(name):
    activation = act.as_activation(name)
    found = in_kernel(activation, [X, UP], ActivationParams())
    np.testing.assert_allclose(found, act.gated(activation, X, UP), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_of_the_only_half(name):
    activation = act.as_activation(name)
    found = in_kernel(activation, [X], ActivationParams())
    np.testing.assert_allclose(found, act.ungated(activation, X), rtol=2e-6, atol=1e-6)


def test_constants_an_expert_replace_the_static_ones():
    alpha, limit = jnp.array([1.0, 1.702], jnp.float32), jnp.array([5.0], jnp.float32)
    found = in_kernel(act.as_activation("silu"), [X, UP], ActivationParams(alpha=alpha, limit=limit))
    wanted = act.gated(act.swiglu(alpha=1.702, limit=5.0), X, UP)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-6)
