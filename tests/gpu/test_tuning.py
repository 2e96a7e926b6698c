"""Tiles measured on a GPU: ``pytest -m gpu tests/gpu/test_tuning.py``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.backends.spec import OpSpec
from jmoe.tuning import tune

pytestmark = pytest.mark.gpu

LINEAR = OpSpec(op="linear", recipe=jmoe.recipe("bf16"), tokens=200, hidden=512, features=384)
MOE = OpSpec(
    op="moe",
    recipe=jmoe.recipe("fp8_w8a16"),
    tokens=64,
    hidden=256,
    intermediate=128,
    experts=8,
    global_experts=8,
    top_k=2,
    activation=jmoe.swiglu(),
)


def test_tiles_are_measured_written_and_taken(tmp_path):
    path = tmp_path / "tiles.json"
    linear, moe = tune([LINEAR, MOE], path, count=3)
    for trial in (linear, moe):
        assert len(trial.tried) == 3
        assert all(us > 0 for _, kernels in trial.tried if kernels for _, us in kernels)
        assert 0 < trial.entry.us <= trial.entry.heuristic_us
    assert {name for name, _ in linear.tried[0][1]} == {"linear"}
    assert {"moe_first", "moe_second"} <= {name for name, _ in moe.tried[0][1]}
    assert tune([LINEAR, MOE], path) == []
    with jmoe.config(tuning=path):
        assert jmoe.select(LINEAR).tiles_from.endswith("M=200")
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (200, 512), jnp.bfloat16)
        w = jax.random.normal(keys[1], (384, 512), jnp.bfloat16)
        y, expected = (
            np.asarray(jmoe.linear(x, w, implementation=name), np.float32) for name in ("triton", "reference")
        )
    assert np.linalg.norm(y - expected) <= 5e-3 * np.linalg.norm(expected)
