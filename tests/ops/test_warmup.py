"""A function compiled ahead for several numbers of tokens."""

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from flax import nnx

import jmoe

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """What is compiled, as it happens."""
    seen = []

    def listen(event, duration, **_):
        if event == COMPILED:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def shapes(t):
    return (jax.ShapeDtypeStruct((t, 64), jnp.float32),)


def test_calls_of_these_shapes_do_not_compile_again(compilations):
    w = jmoe.quantize(jnp.eye(64), "int8")
    layer = jax.jit(lambda x: jmoe.linear(x, w))
    told = []
    seconds = jmoe.warmup(layer, shapes, tokens=(1, 8, 8), progress=lambda *step: told.append(step))
    assert list(seconds) == [1, 8] and all(s > 0 for s in seconds.values())
    assert told[0] == ("tracing 1 tokens", 0, 2) and told[-1] == ("compiling", 2, 2)
    xs = {t: jnp.ones((t, 64)) for t in (1, 8, 3)}
    compilations.clear()
    for t in (1, 8):
        assert layer(xs[t]).shape == (t, 64)
    assert not compilations
    layer(xs[3])
    assert compilations


def test_a_module_is_an_argument_under_nnx_jit(compilations):
    model = jmoe.nn.Linear(64, 32, recipe="fp8_block", rngs=nnx.Rngs(0))
    step = nnx.jit(lambda model, x: model(x))
    seconds = jmoe.warmup(step, lambda t: (model, *shapes(t)), tokens=[4], threads=1)
    x = jnp.ones((4, 64))
    compilations.clear()
    assert step(model, x).shape == (4, 32) and list(seconds) == [4]
    assert not compilations


def test_what_is_compiled_is_what_the_settings_in_force_ask_for(compilations):
    layer = jax.jit(lambda x: jmoe.linear(x, jnp.eye(64)))
    x = jnp.ones((2, 64))
    with jmoe.config(implementation="reference"):
        jmoe.warmup(layer, shapes, tokens=[2])
        compilations.clear()
        layer(x)
        assert not compilations
    layer(x)
    assert compilations


def test_wrong_arguments_are_told_of():
    jitted = jax.jit(lambda x: x)
    with pytest.raises(TypeError, match=r"fn is .*, but it is a jitted function, such as jax.jit\(fn\)"):
        jmoe.warmup(lambda x: x, shapes)
    with pytest.raises(TypeError, match=r"arguments\(8\) is .*, but it is a tuple of the call's arguments"):
        jmoe.warmup(jitted, lambda t: jnp.ones(t), tokens=[8])
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match=r"tokens has .*, but each is an int of at least 1"):
            jmoe.warmup(jitted, shapes, tokens=[1, wrong])
    with pytest.raises(ValueError, match="threads=0 must be at least 1, or None"):
        jmoe.warmup(jitted, shapes, threads=0)
