"""The decoder against transformers' logits and losses of the tiny trained checkpoint, and against itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe.models import Decoder, DecoderConfig, evaluate
from jmoe.models.decoder import Place
from jmoe.nn import FusedMoE, Linear, QuantizedParam

SMALL = DecoderConfig(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
)


def small(**options):
    return Decoder(SMALL, param_dtype=jnp.float32, rngs=nnx.Rngs(0), **options)


def test_logits_are_those_of_transformers(tiny, heldout, shared):
    expected = np.load(shared / "fixtures" / "tiny-moe" / "logits" / "bf16.npy")
    logits = tiny(jnp.asarray(heldout[None, :64]))
    assert logits.dtype == jnp.float32
    assert np.abs(np.asarray(logits[0]) - expected).max() < 2e-3


def test_decode_steps_give_the_logits_of_the_whole_window(tiny, heldout):
    tokens = jnp.asarray(heldout[: 2 * 24].reshape(2, 24))
    whole = tiny(tokens)
    step = nnx.jit(lambda model, token, cache: model.decode_step(token, cache))
    logits, cache = tiny.decode_step(tokens[:, :20], tiny.init_cache(2, 32))
    np.testing.assert_allclose(logits, whole[:, 19], atol=1e-4)
    for s in range(20, 24):
        logits, cache = step(tiny, tokens[:, s], cache)
        np.testing.assert_allclose(logits, whole[:, s], atol=1e-4)


def test_generate_takes_the_most_likely_token_each_time(tiny, heldout):
    tokens = heldout[None, :16]
    generated = np.asarray(tiny.generate(jnp.asarray(tokens), 6))
    assert generated.dtype == np.int32
    whole = np.concatenate([tokens, generated], axis=1)
    expected = np.argmax(np.asarray(tiny(jnp.asarray(whole))), axis=-1)[:, 15:-1]
    np.testing.assert_array_equal(generated, expected)


def test_loss_of_a_few_windows_is_that_of_single_ones(tiny, heldout):
    some = heldout[: 5 * 32 + 7]
    losses = [float(tiny.loss(jnp.asarray(some[None, 32 * w : 32 * (w + 1)]))) for w in range(5)]
    assert evaluate(tiny, some, window=32, batch=2) == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_loss_under_the_protocol_is_that_of_transformers(tiny, heldout):
    # reference.json of the checkpoint's fixtures: nats a byte over 256 windows of 256 bytes, 255 scored in each.
    assert evaluate(tiny, heldout) == pytest.approx(1.2528866925701854, abs=2e-4)


def test_evaluate_refuses_less_than_a_window(tiny):
    with pytest.raises(ValueError, match="100 tokens in windows of 256: it takes one window"):
        evaluate(tiny, np.zeros(100, np.int32))


@pytest.mark.parametrize(
    "tokens, options, error, message",
    [
        ([3, -1, 4], {}, ValueError, r"tokens\[1\]=-1 is no id of the model's; they are 0 to 19"),
        ([3, 2, 20], {}, ValueError, r"tokens\[2\]=20 is no id of the model's"),
        (np.asarray([2**40]), {}, ValueError, "is no id of the model's"),
        ([1.7, 2.0], {}, TypeError, "tokens has dtype float64, but token ids are integers"),
        ([[1, 2]], {}, ValueError, r"tokens has shape \(1, 2\), but it is \(n,\)"),
        ([1, 2], {"batch": 0}, ValueError, "batch=0 must be at least 1"),
        ([1, 2], {"window": 1}, ValueError, "window=1 must be at least 2"),
        ([1, 2], {"window": 2.0}, TypeError, "window=2.0 must be an integer"),
    ],
)
def test_evaluate_refuses_what_has_no_loss(tokens, options, error, message):
    with pytest.raises(error, match=message):
        evaluate(small(), tokens, **{"window": 2, **options})


def test_no_rows_and_no_tokens_have_empty_results():
    model, logits, losses = small(), nnx.jit(lambda m, tokens: m(tokens)), nnx.jit(lambda m, t: m.token_losses(t))
    assert logits(model, jnp.zeros((0, 5), jnp.int32)).shape == (0, 5, 20)
    assert logits(model, jnp.zeros((2, 0), jnp.int32)).shape == (2, 0, 20)
    assert model.generate(jnp.zeros((0, 5), jnp.int32), 3).shape == (0, 3)
    assert model.generate(jnp.zeros((2, 5), jnp.int32), 0).shape == (2, 0)
    assert losses(model, jnp.zeros((2, 1), jnp.int32)).shape == (2, 0)
    assert losses(model, jnp.zeros((0, 4), jnp.int32)).shape == (0, 3)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda m: m(jnp.zeros((5,), jnp.int32)), ValueError, r"tokens has shape \(5,\), but it is \(B, S\)"),
        (lambda m: m(jnp.zeros((1, 5))), TypeError, "tokens has dtype float32, but token ids are integers"),
        (lambda m: m("text"), TypeError, "tokens is a str, but it is an array"),
        (lambda m: m.generate(jnp.zeros((1, 2), int), -1), ValueError, "steps=-1 must be at least 0"),
        (lambda m: m.generate(jnp.full((1, 2), 99999), 1), ValueError, r"tokens\[0, 0\]=99999 is no id of the model's"),
        (lambda m: m.generate(jnp.array([[0, -1]]), 1), ValueError, r"tokens\[0, 1\]=-1 is no id of the model's"),
        (lambda m: m.generate(jnp.zeros((1, 2), int), 1.0), TypeError, "steps=1.0 must be an integer"),
        (lambda m: m.generate(jnp.zeros((2,), int), 1), ValueError, r"tokens has shape \(2,\)"),
        (lambda m: m.generate(jnp.zeros((1, 0), int), 1), ValueError, "here it takes S of at least 1"),
        (lambda m: m.decode_step(jnp.zeros((1, 0), int), m.init_cache(1, 4)), ValueError, "S of at least 1"),
        (lambda m: m.decode_step(jnp.zeros((1,), int), ()), ValueError, "one KVCache for each of 2 layers"),
        (lambda m: m.token_losses(jnp.zeros((1, 0), int)), ValueError, "S of at least 1"),
        (lambda m: m.loss(jnp.zeros((1, 1), int)), ValueError, "S of at least 2"),
        (lambda m: m.loss(jnp.zeros((0, 4), int)), ValueError, "tokens has no row"),
    ],
)
def test_tokens_that_it_cannot_read_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(small())


def test_a_token_outside_the_vocabulary_has_no_loss():
    losses = small().token_losses(jnp.asarray([[1, 2, 20, -1, 3]]))[0]
    assert np.isnan(losses).tolist() == [False, True, True, False]


@pytest.mark.parametrize("name, value", [("dtype", "int8"), ("param_dtype", "float64"), ("implementation", "cuda")])
def test_a_decoder_is_refused_where_it_is_made(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name}='?{value}"):
        Decoder(SMALL, **{name: value})


def test_later_tokens_do_not_change_earlier_logits():
    model = small()
    a = model(jnp.asarray([[1, 2, 3, 4]]))
    b = model(jnp.asarray([[1, 2, 3, 19]]))
    np.testing.assert_array_equal(a[:, :3], b[:, :3])
    assert not np.array_equal(a[:, 3], b[:, 3])


def test_module_paths_are_a_checkpoints_and_every_tensor_has_a_place(tiny):
    places = tiny.parameter_places()
    assert len(places) == 3 * (2 + 6 + 1 + 8 * 3) + 3  # a layer's norms, attention, router and experts; 3 outside
    assert places["model.layers.1.mlp.experts.3.up_proj.weight"] == Place("layers.1.mlp", "w13", (3, 1))
    assert places["model.layers.2.mlp.experts.7.down_proj.weight"] == Place("layers.2.mlp", "w2", (7,))
    assert places["model.layers.0.mlp.gate.weight"] == Place("layers.0.mlp", "router_weight")
    assert places["model.layers.0.self_attn.q_norm.weight"] == Place("layers.0.self_attn.q_norm", "weight")
    assert places["lm_head.weight"] == Place("lm_head", "weight")
    assert isinstance(tiny.layers[0].mlp, FusedMoE)


def test_recipe_covers_the_layers_and_rules_decide_before_it():
    model = Decoder(
        SMALL, recipe="int8_w8a16", rules=[(r"layers\.0\..*", None), (r".*\.o_proj|lm_head", "fp8_channel")]
    )
    recipes = {
        ".".join(map(str, p)): m.recipe.name for p, m in nnx.iter_modules(model) if isinstance(m, Linear | FusedMoE)
    }
    assert recipes["layers.0.self_attn.o_proj"] == recipes["layers.0.mlp"] == "bf16"
    assert recipes["layers.1.self_attn.o_proj"] == recipes["lm_head"] == "fp8_channel"
    assert recipes["layers.1.self_attn.q_proj"] == recipes["layers.1.mlp"] == "int8_w8a16"
    assert Decoder(SMALL, recipe="int8_w8a16").lm_head.recipe.name == "bf16"


def test_j04_a_rule_without_effect_is_refused():
    with pytest.raises(ValueError, match=r"rule 0 \('q_proj'\) matches no layer"):
        Decoder(SMALL, rules=[("q_proj", "int8")])


def test_steps_that_no_memory_has_a_cache_for_are_refused():
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"steps=1000000000 after 4 tokens need a cache of [\d,]+ GB, and cpu has \d"):
        small().generate(tokens, 10**9)


def test_an_abstract_quantized_decoder_takes_no_memory():
    model = nnx.eval_shape(lambda: Decoder(SMALL, recipe="int4:group=8"))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(model)))
    assert isinstance(model.layers[0].mlp.w13, QuantizedParam)


def test_tied_embeddings_serve_as_lm_head():
    model = Decoder(dataclasses.replace(SMALL, tie_word_embeddings=True), param_dtype="float32", rngs=nnx.Rngs(0))
    assert model.lm_head is None
    assert "lm_head.weight" not in model.parameter_places()
    untied = small()
    for name in ("embed_tokens", "layers", "norm"):
        setattr(untied, name, getattr(model, name))
    untied.lm_head.set_weight(model.embed_tokens.weight.get_value())
    tokens = jnp.asarray([[1, 2, 3]])
    np.testing.assert_allclose(model(tokens), untied(tokens), rtol=1e-5, atol=1e-6)


def test_dense_layers_have_a_plain_mlp():
    model = Decoder(
        dataclasses.replace(SMALL, dense_layers=(0,), intermediate_size=12), recipe="int8", rngs=nnx.Rngs(0)
    )
    assert model(jnp.asarray([[1, 2]])).shape == (1, 2, 20)
    places = model.parameter_places()
    assert places["model.layers.0.mlp.gate_proj.weight"] == Place("layers.0.mlp.gate_proj", "weight")
    assert "model.layers.0.mlp.gate.weight" not in places
    assert model.layers[0].mlp.down_proj.recipe.name == "int8"


def test_attention_biases_are_added():
    model = Decoder(dataclasses.replace(SMALL, attention_bias=True), param_dtype="float32", rngs=nnx.Rngs(0))
    assert model.parameter_places()["model.layers.0.self_attn.o_proj.bias"] == Place(
        "layers.0.self_attn.o_proj", "bias"
    )
    before = model(jnp.asarray([[1, 2]]))
    model.layers[0].self_attn.o_proj.set_bias(jnp.ones((16,)))
    assert not np.allclose(before, model(jnp.asarray([[1, 2]])))


def test_it_works_under_strict_promotion_and_x64():
    model = Decoder(SMALL, recipe="int8", dtype="float32", rngs=nnx.Rngs(0))
    tokens = jnp.asarray([[1, 2, 3]], jnp.int32)
    logits, generated = model(tokens), model.generate(tokens, 3)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        np.testing.assert_allclose(model(tokens), logits, rtol=1e-5, atol=1e-6)
        assert model.loss(tokens).dtype == jnp.float32
        again = model.generate(tokens, 3)
    assert again.dtype == jnp.int32
    np.testing.assert_array_equal(again, generated)


def test_loss_has_gradients_for_every_dense_parameter():
    gradient = nnx.grad(lambda m: m.loss(jnp.asarray([[1, 2, 3, 4, 5]])))(small())
    norms = [float(jnp.linalg.norm(g)) for g in jax.tree.leaves(gradient)]
    assert len(norms) == 2 * (2 + 6 + 3) + 3
    assert all(np.isfinite(n) and n > 0 for n in norms)


def test_a_sink_takes_its_share_of_the_softmax_and_gives_nothing():
    model = Decoder(dataclasses.replace(SMALL, attention_sinks=True), param_dtype="float32", rngs=nnx.Rngs(0))
    attention = model.layers[0].self_attn
    attention.q_proj.set_weight(jnp.zeros((32, 16)))  # every score is 0
    x = jax.random.normal(jax.random.key(0), (1, 3, 16))
    attention.sinks.set_value(jnp.full((4,), -jnp.inf))
    without, _ = attention(x)
    attention.sinks.set_value(jnp.full((4,), np.log(2)))
    # exp(0) for each token seen against exp(log 2): 1/3, 2/4 and 3/5 of the weight are left.
    expected = without * jnp.asarray([1 / 3, 2 / 4, 3 / 5])[:, None]
    np.testing.assert_allclose(attention(x)[0], expected, rtol=1e-5, atol=1e-6)


def test_sinks_are_trained():
    model = Decoder(dataclasses.replace(SMALL, attention_sinks=True), param_dtype="float32", rngs=nnx.Rngs(0))
    gradient = nnx.grad(lambda m: m.loss(jnp.asarray([[1, 2, 3, 4]])))(model)
    assert np.all(np.asarray(gradient.layers[0].self_attn.sinks.get_value()) != 0)


def test_a_window_ends_what_a_token_sees():
    config = dataclasses.replace(SMALL, num_hidden_layers=1, sliding_window=3, sliding_layers=(0,))
    model = Decoder(config, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    a, b = (model(jnp.asarray([[first, 2, 3, 4, 5]]))[0] for first in (1, 19))
    changed = [not np.array_equal(a[s], b[s]) for s in range(5)]
    assert changed == [True, True, True, False, False]  # tokens 0 to 2 see token 0; 3 sees tokens 1 to 3
