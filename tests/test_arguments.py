"""Arguments of a wrong kind: the sentence names the argument, what it is, and what would be right."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmoe
from jmoe import QTensor, Recipe, Scheme, checkpoint
from jmoe.backends.spec import DeviceSpec, OpSpec
from jmoe.models import evaluate

TINY = Path(__file__).parent / "data" / "tiny-moe" / "bf16"
W = jnp.ones((4, 8))
Q = jmoe.quantize(W, "fp8_block")
STATIC = Scheme(format="e4m3", block=(-1, -1), static=True)
INT8 = jmoe.recipe("int8")
OP = OpSpec(op="linear", recipe=INT8, tokens=1, hidden=8, features=4)

CALLS = [
    (lambda: jmoe.quantize(Q, "int8"), TypeError, r"x=QTensor\(.*\) is quantized already; requantize gives its values"),
    (lambda: jmoe.quantize(None, "int8"), TypeError, "x is None, but it is an array"),
    (lambda: jmoe.quantize({}, "int8"), TypeError, "x is a dict, but it is an array"),
    (lambda: jmoe.quantize([[1.0], [1.0, 2.0]], "int8"), TypeError, "x is a list, but it is an array"),
    (lambda: jmoe.quantize(W, None), TypeError, "how=None must be a Recipe, a Scheme or a recipe's name"),
    (lambda: jmoe.quantize(W, STATIC, scale="wide"), TypeError, "scale must be a number or an array of them"),
    (lambda: jmoe.quantize(W, STATIC, scale={}), TypeError, "scale must be a number or an array of them"),
    (lambda: jmoe.quantize(W, "nvfp4", shared=0), TypeError, "shared=0 must be a sequence of axes"),
    (lambda: jmoe.quantize(W, "nvfp4", shared=("E",)), ValueError, r"shared=\('E',\) must name leading axes of x"),
    (lambda: jmoe.quantize(W, "bf16"), ValueError, "leaves the weight as it is; .* operations take the array itself"),
    (
        lambda: jmoe.quantize(jnp.ones((3, 2, 4, 8)), "nvfp4", shared=(-3, 1)),
        ValueError,
        r"shared=\(-3, 1\) names an axis of x, which has shape \(3, 2, 4, 8\), twice",
    ),
    (lambda: jmoe.requantize(W, "int8"), TypeError, "q is an ArrayImpl, but it must be a QTensor; quantize makes one"),
    (lambda: jmoe.refine_blocks(W, (1, 1)), TypeError, "q is an ArrayImpl, but it must be a QTensor"),
    (lambda: jmoe.refine_blocks(Q, 64), ValueError, r"block=64 must be two ints \(rows, cols\)"),
    (lambda: jmoe.merge_shards(Q), TypeError, "shards is a QTensor, but it must be a sequence of QTensors"),
    (lambda: jmoe.merge_shards(None), TypeError, "shards=None must be a sequence of QTensors"),
    (lambda: jmoe.merge_shards([Q, W]), TypeError, r"shards\[1\] is an ArrayImpl, but it must be a QTensor"),
    (lambda: jmoe.merge_shards([W]), TypeError, r"shards\[0\] is an ArrayImpl, but it must be a QTensor"),
    (lambda: jmoe.recipe(None), TypeError, "name=None must be a recipe's name, such as 'int4:group=32'"),
    (lambda: jmoe.recipe(b"int4"), TypeError, "name=b'int4' must be a recipe's name"),
    (lambda: jmoe.recipe(INT8), TypeError, "name is a Recipe, but it must be a recipe's name"),
    (lambda: jmoe.recipe("int4", scale_dtype=[]), ValueError, r"scale_dtype=\[\] is unknown; it is one of float32"),
    (lambda: Recipe(name="mine", weight="int8"), TypeError, "weight='int8' must be a Scheme or None; jmoe.recipe"),
    (lambda: Recipe(name="mine", weight=INT8.weight, input="int8"), TypeError, "input='int8' must be a Scheme or None"),
    (lambda: Recipe(name="mine", weight=INT8), TypeError, "weight is a Recipe, but it must be a Scheme or None"),
    (lambda: Recipe(name=8, weight=None), TypeError, "name=8 must be the recipe's name"),
    (lambda: Scheme(format=[], block=(1, -1)), ValueError, r"format=\[\] is unknown; known formats are e4m3"),
    (lambda: QTensor.make(Q.data, Q.scale, scheme="int8"), TypeError, "scheme='int8' must be a Scheme; a recipe has"),
    (
        lambda: QTensor.make(Q.data, Q.scale, scheme=Q.scheme, input_scheme="int8"),
        TypeError,
        "input_scheme='int8' must be a Scheme or None; a recipe has one as its input",
    ),
    (lambda: QTensor.make(None, Q.scale, scheme=Q.scheme), TypeError, "data is None, but it is an array"),
    (lambda: QTensor.make(Q.data, "f32", scheme=Q.scheme), TypeError, "scale is a str, but it is an array"),
    (lambda: QTensor.make(Q.data, Q.scale, scheme=Q.scheme, k=8.0), TypeError, "k=8.0 must be an int or None"),
    (lambda: Q.with_input_scheme(INT8), TypeError, "input_scheme is a Recipe, but it must be a Scheme or None"),
    (lambda: Q.dequantize("int8"), TypeError, "dtype=int8 must be a floating point dtype"),
    (lambda: Q.dequantize("single-ish"), TypeError, "dtype='single-ish' must be a floating point dtype"),
    (lambda: jmoe.select("linear"), TypeError, "op_spec='linear' must be an OpSpec; jmoe.explain shows"),
    (lambda: jmoe.select(OP, implementation=[]), ValueError, r"implementation=\[\] is unknown; it is one of triton"),
    (lambda: OP.replace(op="conv"), ValueError, "op='conv' must be one of linear, moe, batched_experts"),
    (lambda: OP.replace(recipe="int8"), TypeError, "recipe='int8' must be a Recipe; jmoe.recipe makes one"),
    (lambda: OP.replace(accumulation="slow"), ValueError, "accumulation='slow' must be 'exact', 'fast' or None"),
    (lambda: DeviceSpec.named(None), TypeError, "name=None must be the name of a device, such as 'h100'"),
    (lambda: DeviceSpec.of("h100"), TypeError, "device='h100' must be a JAX device"),
    (lambda: DeviceSpec(name="a", platform="gpu"), ValueError, "platform='gpu' must be one of cpu, cuda, rocm, tpu"),
    (
        lambda: DeviceSpec(name="a", platform="cuda", sm_count=-1),
        ValueError,
        "sm_count=-1 must be an int of at least 1",
    ),
    (lambda: DeviceSpec(name="a", platform="cpu", memory=8e9), ValueError, "memory=8000000000.0 must be an int of at"),
    (lambda: DeviceSpec(name="a", platform="cpu", bandwidth=-1), ValueError, "bandwidth=-1 must be bytes a second"),
    (lambda: jmoe.prepare(None, op="linear"), TypeError, "w is None, but a weight is a QTensor or an array"),
    (
        lambda: jmoe.prepare(W, op="gemm"),
        ValueError,
        "op='gemm' must be 'linear', 'moe', 'batched_experts' or an OpSpec",
    ),
    (lambda: jmoe.explain(3), TypeError, "fn is an int, but it is a function"),
    (lambda: jmoe.explain(jnp.sin, "h100"), TypeError, r"args\[0\] is 'h100', which is no array; bind it first"),
    (lambda: jmoe.explain(jnp.sin, x=[W, None, Recipe]), TypeError, r"kwargs\['x'\]\[2\] is .*, which is no array"),
    (lambda: evaluate(3, [1, 2]), TypeError, "model=3 must be a Decoder, as jmoe.checkpoint.load_model gives it"),
    (lambda: checkpoint.open(None), TypeError, "path=None must be the path of a folder or file"),
    (lambda: checkpoint.load_model(3), TypeError, "path=3 must be the path of a folder or file"),
    (lambda: checkpoint.load_model(TINY, dtype=None), TypeError, "dtype=None must be bfloat16, float16 or float32"),
    (
        lambda: checkpoint.load_model(TINY, param_dtype="int8"),
        TypeError,
        "param_dtype=int8 must be bfloat16",
    ),
    (lambda: checkpoint.register(Recipe), TypeError, "name is a type, but it must be what quant_method is"),
]


@pytest.mark.parametrize("call, error, message", CALLS)
def test_a_wrong_argument_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


LOADERS = ["load_linear", "load_bias", "load_input_scale", "load_experts", "load_expert_biases", "load_expert_scales"]


@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_take_an_opened_checkpoint_and_names_of_what_it_holds(loader):
    load, experts = getattr(checkpoint, loader), "expert" in loader
    with pytest.raises(TypeError, match=r"checkpoint='tiny' must be what jmoe\.checkpoint\.open makes of a path"):
        load("tiny", "lm_head")
    with checkpoint.open(TINY) as opened:
        for names in (None, 3, ["lm_head", 3], []):
            with pytest.raises(TypeError, match="^prefix" if experts else rf"^names={re.escape(repr(names))} must be"):
                load(opened, names)
        with pytest.raises(checkpoint.CheckpointError, match="below 'nope'" if experts else "of a module 'nope'"):
            load(opened, "nope")
        if "scale" not in loader:
            for dtype in ("int8", "nope", 3):
                with pytest.raises(TypeError, match=rf"^dtype={dtype if dtype == 'int8' else repr(dtype)} must be bfl"):
                    load(opened, "model.layers.0.mlp.experts" if experts else "lm_head", dtype=dtype)


def test_a_wrong_setting_is_named_where_it_is_used():
    with (
        jmoe.config(device="h1000"),
        pytest.raises(ValueError, match=r"config\.device \(or JMOE_DEVICE\): device 'h1000'"),
    ):
        jmoe.linear(W, Q)
    with (
        jmoe.config(implementation="cuda"),
        pytest.raises(ValueError, match=r"or None; it is set by jmoe\.config or JMOE_"),
    ):
        jmoe.linear(W, Q)


def test_a_block_larger_than_the_array_takes_no_memory():
    q = jmoe.quantize(W, jmoe.recipe("fp8_block", block=2**31 - 1))
    assert q.scale.shape == (1, 1)
    assert jax.tree.leaves(q.dequantize())[0].tolist() == W.tolist()


NAMES = st.sampled_from([*jmoe.RECIPES, "", "int5", "INT4"])
KEYS = st.sampled_from(["group", "zero_point", "scale_dtype", "block", "power_of_two", "scale_rounding", "", "x"])
VALUES = st.one_of(
    st.integers(-(2**40), 2**40).map(str),
    st.sampled_from(
        ["true", "False", "float16", "e8m0", "floor", "64x32", "-1x128", "--3", "-", "3x", "x3", "²", "٣", "9" * 5000]
    ),
    st.text(st.characters(codec="utf-8"), max_size=6),
)
OPTIONS = st.lists(st.tuples(KEYS, st.one_of(st.none(), VALUES)), max_size=3)


@settings(max_examples=300, deadline=None)
@given(NAMES, OPTIONS)
def test_a_recipes_text_is_read_or_refused_in_a_sentence(name, options):
    text = name + ":" + ",".join(key if value is None else f"{key}={value}" for key, value in options)
    refusal = ""
    try:
        recipe = jmoe.recipe(text)
    except ValueError as error:
        refusal = str(error)
    if refusal:
        known = r"recipe '.*'|group=|block=|zero_point=|power_of_two=|scale_dtype=|scale_rounding="
        assert re.match(known, refusal, re.DOTALL), refusal
    else:
        assert jmoe.recipe(recipe.name) == recipe  # its own name says all of it


@pytest.mark.parametrize(
    "text, message",
    [
        ("int4:group=--3", "group='--3' must be a positive int, or -1 for one group over the whole of K"),
        ("int4:group=²", "group='²' must be a positive int"),
        ("int4:group=٣", "group='٣' must be a positive int"),
        ("int4:group=" + "9" * 30, "group='9{30}' must be a positive int, .*, and below 2\\^31"),
        ("int4:group=2147483648", "group=2147483648 must be a positive int, .*, and below 2\\^31"),
        ("fp8_block:block=--1x2", "block='--1x2' must be two ints"),
        ("int4:group=32,group=64", "recipe 'int4' is given its option 'group' twice, in 'group=32,group=64'"),
    ],
)
def test_numbers_are_plain_and_options_are_given_once(text, message):
    with pytest.raises(ValueError, match=message):
        jmoe.recipe(text)
