"""Layers that take the place of nnx.LinearGeneral and nnx.Einsum give what these give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe.nn.flax_layers import check, from_flax
from jmoe.nn.general import kernel_axes


def randomized(layer, seed=5):
    """The layer with a bias that is not zero."""
    if layer.bias is not None:
        layer.bias.set_value(jax.random.normal(jax.random.key(seed), layer.bias.shape))
    return layer


def same(layer, x):
    new = from_flax(randomized(layer))
    expected = layer(x)
    y = new(x)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)


def normal(*shape):
    return jax.random.normal(jax.random.key(1), shape)


def test_linear():
    same(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), normal(2, 3, 6))
    same(nnx.Linear(6, 4, use_bias=False, rngs=nnx.Rngs(0)), normal(6))


@pytest.mark.parametrize(
    "ins, outs, options, shape",
    [
        (6, (2, 4), {}, (3, 5, 6)),
        ((2, 3), (4, 5), {"axis": (1, -1)}, (7, 2, 3)),
        ((2, 3), 4, {"axis": (-2, -1)}, (7, 2, 3)),
        ((2, 3), 4, {"axis": (0, 2)}, (2, 7, 3)),
        (6, 4, {"batch_axis": {0: 3}}, (3, 5, 6)),
        ((2, 3), (4, 2), {"axis": (2, 3), "batch_axis": {0: 2, 1: 2}}, (2, 2, 2, 3)),
    ],
)
def test_linear_general(ins, outs, options, shape):
    same(nnx.LinearGeneral(ins, outs, rngs=nnx.Rngs(0), **options), normal(*shape))


@pytest.mark.parametrize(
    "equation, kernel, bias, shape",
    [
        ("nta,hab->nthb", (8, 2, 4), (8, 4), (5, 3, 2)),
        ("nta,hab->bnht", (8, 2, 4), (4, 8), (5, 3, 2)),
        ("...d,df->...f", (6, 4), (4,), (2, 3, 6)),
        ("...d,df->f...", (6, 4), None, (2, 3, 6)),
        ("bthd,hde->bte", (2, 3, 4), (4,), (5, 6, 2, 3)),
        ("ebd,edf->ebf", (3, 6, 4), (3, 4), (3, 5, 6)),
        ("bed,edf->bfe", (3, 6, 4), (4, 3), (5, 3, 6)),
        ("bd,d->b", (6,), None, (5, 6)),
    ],
)
def test_einsum(equation, kernel, bias, shape):
    init = nnx.initializers.normal(1.0)
    layer = nnx.Einsum(equation, kernel, bias, kernel_init=init, rngs=nnx.Rngs(0))
    same(layer, normal(*shape))


def test_the_result_has_the_dtype_that_flax_gives_it():
    for param_dtype in (jnp.float32, jnp.bfloat16):
        for dtype in (None, jnp.float32, jnp.bfloat16):
            layer = nnx.Linear(6, 4, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
            for x_dtype in (jnp.float32, jnp.bfloat16):
                x = normal(3, 6).astype(x_dtype)
                assert from_flax(layer)(x).dtype == layer(x).dtype, (param_dtype, dtype, x_dtype)


def test_sharding_names_follow_their_axes():
    with nnx.use_eager_sharding(False):
        layer = nnx.Linear(6, 4, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("in", "out")})
        assert from_flax(layer).sharding == ("out", "in")
        layer = nnx.LinearGeneral(
            6, (2, 4), rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("embed", "heads", None)}
        )
        assert from_flax(layer).sharding == ("heads", "embed")
        layer = nnx.Einsum(
            "ebd,edf->ebf", (3, 6, 4), rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": ("expert", None, "ff")}
        )
        new = from_flax(layer)
        assert new.sharding == ("expert", "ff", None)
        assert new.weight.get_metadata("out_sharding") == ("expert", "ff", None)


@pytest.mark.parametrize(
    "equation, reason",
    [
        ("ab,b...->a...", "its kernel has an ellipsis"),
        ("aab,bc->ac", "an axis occurs twice"),
        ("...b,bc->c", "an ellipsis is summed over"),
        ("abx,bc->ac", "axis 'x' of the input is summed alone"),
        ("ab,bcx->ac", "axis 'x' of the kernel is summed alone"),
    ],
)
def test_einsums_that_are_no_product_are_refused(equation, reason):
    with pytest.raises(ValueError, match=f"is no product with a matrix: {reason}"):
        kernel_axes(equation)


def test_x_of_another_rank_is_refused():
    layer = from_flax(nnx.Einsum("bd,df->bf", (6, 4), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 6\), but the einsum 'bd,df->bf' takes 'bd' for it"):
        layer(jnp.ones((2, 3, 6)))


def test_layers_that_do_more_than_flaxs_are_refused():
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    with pytest.raises(ValueError, match=r"a.b is a Scaled, which does more than the Linear .* rule \('a.b', None\)"):
        check("a.b", Scaled(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"a\.b has a dot_general of its own"):
        check("a.b", nnx.Linear(2, 2, dot_general=lambda *a, **k: None, rngs=nnx.Rngs(0)))
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((2, 4, 3)))
    with pytest.raises(ValueError, match=r"a.b has a kernel of shape \(2, 4, 3\), but its layer's is \(2, 3\)"):
        check("a.b", layer)
