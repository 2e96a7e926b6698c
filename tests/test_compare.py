"""One checkpoint under several recipes: its rows, their table, JSON and chart, and the loss that each recipe costs."""

import dataclasses
import io
import itertools
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure
from rich.console import Console

import jmoe
from jmoe.checkpoint import load_model
from jmoe.compare import (
    DEFAULT_RECIPES,
    Comparison,
    LayerError,
    Row,
    _choice,
    _with_baseline,
    compare,
    draw_error_by_layer,
    draw_loss_against_bytes,
    quantization_rules,
    read_tokens,
    split_recipes,
)
from jmoe.models import evaluate
from jmoe.nn import quantize_model
from jmoe.ops.explain import Explanation

DATA = Path(__file__).resolve().parent / "data"
TINY = DATA / "tiny-moe" / "bf16"
HELDOUT = DATA / "heldout.bin"


@pytest.mark.parametrize(
    "text, names",
    [
        ("int8", ["int8"]),
        ("fp8_block, int8,", ["fp8_block", "int8"]),
        ("int4:group=64,zero_point,nvfp4", ["int4:group=64,zero_point", "nvfp4"]),
        ("int4:group=64,int4:group=32", ["int4:group=64", "int4:group=32"]),
        ("fp8_block:block=64,mxfp4", ["fp8_block:block=64", "mxfp4"]),
        ("int8,fp9", ["int8", "fp9"]),  # unknown names are for jmoe.recipe to refuse
    ],
)
def test_a_comma_separates_recipes_and_their_options(text, names):
    assert split_recipes(text) == names


def test_a_list_that_names_no_recipe():
    with pytest.raises(ValueError, match="recipes=' ,' names none; known recipes are bf16, "):
        split_recipes(" ,")


def test_bytes_and_arrays_are_token_ids(tmp_path):
    text, ids = tmp_path / "text.bin", tmp_path / "ids.npy"
    text.write_bytes(b"\x00az\xff")
    np.save(ids, np.array([0, 31999, 7], np.uint16))
    assert read_tokens(text, 256).tolist() == [0, 97, 122, 255]
    assert read_tokens(ids, 32000).tolist() == [0, 31999, 7]
    assert read_tokens(ids, 32000).dtype == np.int32


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros(4), r"holds float64 of shape \(4,\), but token ids are integers \(n,\)"),
        (np.zeros((2, 2), int), r"holds int64 of shape \(2, 2\), but token ids are integers \(n,\)"),
        (np.array([True]), r"holds bool of shape \(1,\)"),
        (np.array([0, 256]), "has token ids from 0 to 256, but the model has 256 tokens"),
        (np.array([-1, 5]), "has token ids from -1 to 5, but the model has 256 tokens"),
        (np.array([{}], object), "is not an array of token ids: Array can't be memory-mapped: Python objects"),
    ],
)
def test_arrays_that_are_no_token_ids(tmp_path, array, message):
    path = tmp_path / "ids.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError, match=re.escape(str(path)) + " " + message):
        read_tokens(path, 256)


def header(text):
    return b"\x93NUMPY\x01\x00\x76\x00" + text.ljust(117) + b"\n"


HUGE = header(b"{'descr': '|i1', 'fortran_order': False, 'shape': (9000000000000,), }")
NEGATIVE = header(b"{'descr': '|i1', 'fortran_order': False, 'shape': (-5,), }")


@pytest.mark.parametrize(
    "content", [b"", b"no array at all", b"PK\x03\x04", HUGE, NEGATIVE, header(b"(" * 100), header(b"-" * 117)]
)
def test_a_file_that_is_no_array(tmp_path, content):
    path = tmp_path / "ids.npy"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path)) + " is not an array of token ids: "):
        read_tokens(path, 256)


def test_bytes_are_no_ids_of_a_large_vocabulary():
    with pytest.raises(ValueError, match=r"the model has 151936 tokens; give token ids as a \.npy"):
        read_tokens(HELDOUT, 151936)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 1}, "window=1 must be an int of at least 2"),
        ({"batch": 0}, "batch=0 must be an int of at least 1"),
        ({"batch": 1.5}, "batch=1.5 must be an int of at least 1"),
        ({"windows": 0}, "windows=0 must be an int of at least 1"),
        ({"recipes": []}, r"recipes=\[\] names none; known recipes are bf16"),
        # 65536 bytes.
        ({"windows": 257}, "windows=257 is more than the 256 windows of 256 tokens"),
        ({"window": 65537}, "holds 65536 tokens, which is less than a window of 65537"),
        ({"recipes": ["int4:group=0"]}, "group"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_a_model_is_loaded(options, message, monkeypatch):
    monkeypatch.setattr("jmoe.checkpoint.load.load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=message):
        compare(TINY, text=HELDOUT, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipes": "int8"}, "recipes='int8' must be a sequence of recipes or their names"),
        ({"recipes": [8]}, "recipe=8 must be a Recipe or the name of one"),
        ({"dtype": "float8"}, "dtype='float8' must be bfloat16, float16 or float32"),
    ],
)
def test_arguments_of_another_kind(options, message):
    with pytest.raises(TypeError, match=message):
        compare(TINY, text=HELDOUT, **options)


def test_a_recipe_that_is_named_twice_is_one_row():
    names = ["int4", "bf16", "int4:group=128", jmoe.recipe("int8"), "int8"]
    assert [recipe.name for recipe in _with_baseline(names)] == ["bf16", "int4", "int8"]


@pytest.mark.parametrize("form", ["slash", "link", "here"])
def test_a_checkpoint_is_named_as_it_was_given(form, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(TINY)
    monkeypatch.chdir(TINY)
    path, expected = {"slash": (f"{TINY}/", str(TINY)), "link": (link, str(link)), "here": (".", str(TINY))}[form]
    result = compare(path, ["bf16"], text=HELDOUT, window=16, windows=1)
    assert result.checkpoint == expected


@pytest.fixture(scope="module")
def calls():
    return []


@pytest.fixture(scope="module")
def small(calls):
    """Three windows of 64 tokens, two at once, under bf16 and int4."""
    with np.errstate(all="raise"):
        return compare(
            TINY,
            ["int4:group=64", jmoe.recipe("bf16")],
            text=HELDOUT,
            window=64,
            batch=2,
            windows=3,
            progress=lambda *call: calls.append(call),
        )


def test_bf16_comes_first_once_wherever_it_is_named(small):
    assert [row.recipe for row in small.rows] == ["bf16", "int4:group=64"]


def test_the_loss_of_bf16_is_that_of_the_model(small):
    model = load_model(TINY, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    tokens = read_tokens(HELDOUT, 256)[: 3 * 64]
    expected = evaluate(model, tokens, window=64, batch=2)
    assert small.rows[0].loss == pytest.approx(expected, abs=1e-6)
    assert small.rows[0].loss_change == 0
    assert small.rows[1].loss_change == small.rows[1].loss - small.rows[0].loss
    assert small.tokens == 3 * 63  # the first of a window is not scored


def test_a_row_counts_bytes_and_measures_noise_of_what_is_quantized(small):
    bf16, int4 = small.rows
    # Of each layer attention has 3 * 256 * 256 weights and the experts 8 * 3 * 256 * 256; half a byte each, and a
    # float32 scale for each 64, in place of two bytes.
    quantized = 3 * (3 + 8 * 3) * 256 * 256
    assert bf16.weight_bytes - int4.weight_bytes == 2 * quantized - (quantized // 2 + 4 * quantized // 64)
    assert {layer.path.rpartition(".")[2] for layer in int4.layers} == {"q_proj", "k_proj", "v_proj", "o_proj", "mlp"}
    noise = [10 ** (-layer.sqnr_db / 10) for layer in int4.layers]
    assert int4.sqnr_db == pytest.approx(-10 * math.log10(np.mean(noise)))
    assert 18 < int4.sqnr_db < 23  # 19.0 for normal data in groups of 128, more in smaller ones
    assert (bf16.layers, bf16.sqnr_db) == ((), None)


def test_progress_counts_a_step_a_batch_and_one_to_compile(small, calls):
    # Three windows, two at once: two batches a row.
    steps = [call for call in calls if "loading" not in call[0]]
    assert steps == [
        *(("bf16", done, 6) for done in (0, 0, 1, 2, 3)),
        *(("int4:group=64", done, 6) for done in (3, 3, 4, 5, 6)),
    ]


def test_progress_tells_of_loading_between_the_steps(small, calls):
    for name, done in (("bf16", 0), ("int4:group=64", 3)):
        loading = [call for call in calls if call[0].startswith(f"{name}, loading ")]
        assert {call[1:] for call in loading} == {(done, 6)}
        shares = [int(phase.removeprefix(f"{name}, loading ").removesuffix("%")) for phase, *_ in loading]
        assert shares == sorted(shares) and shares[-1] == 100
        first = calls.index(loading[0])
        assert calls[first - 1] == calls[first + len(loading)] == (name, done, 6)


def test_json_holds_every_row_and_what_it_takes_to_find_them_again(small):
    result = json.loads(small.to_json())
    assert result["rows"] == [json.loads(json.dumps(dataclasses.asdict(row))) for row in small.rows]
    assert (result["dtype"], result["window"], result["unit"]) == ("float32", 64, "nats/byte")
    assert set(result["versions"]) == {"jmoe", "jax", "flax", "numpy"}


def test_a_quantized_checkpoint_is_scored_as_it_is_stored(shared):
    path = shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3"
    [row] = compare(path, text=HELDOUT, window=64, batch=2, windows=2).rows
    assert (row.recipe, row.loss_change, row.sqnr_db, row.layers) == ("as_stored", None, None, ())
    model = load_model(path, dtype=jnp.float32, param_dtype=jnp.bfloat16)
    expected = evaluate(model, read_tokens(HELDOUT, 256)[:128], window=64, batch=2)
    assert row.loss == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"is quantized already \(fp8\)"):
        compare(path, ["int8"], text=HELDOUT)
    with pytest.raises(ValueError, match=r"is quantized already \(fp8\)"):
        compare(path, DEFAULT_RECIPES, text=HELDOUT)


def test_what_a_device_has_no_units_for_is_emulated_by_name_and_the_row_says_so(monkeypatch):
    # A T4: no FP4 units, and none that Triton serves, so that what it would run runs on this CPU too.
    monkeypatch.setattr("jmoe.compare._computing_device", lambda: jmoe.DeviceSpec.named("t4"))
    with jmoe.config(device="t4"):
        bf16, nvfp4 = compare(TINY, ["nvfp4"], text=HELDOUT, window=64, windows=1, dtype="float32").rows
    assert bf16.reason.startswith("first in order that can (triton: ")
    assert (nvfp4.implementation, nvfp4.reason) == (
        "xla",
        "asked for by name; FP4 activations need FP4 matrix units (compute capability 10.0), and NVIDIA T4 has none; "
        "they are emulated where implementation='xla' asks for that by name; "
        "weights are dequantised to float32, whole; "
        "FP4 activations are emulated: rounded to FP4, multiplied in float32; "
        "weights are dequantised to float32, one expert at a time, once 64 rows",
    )
    assert 0 < abs(nvfp4.loss - bf16.loss) < 0.1


def test_rows_of_an_h200_are_of_kernels():
    plain = load_model(TINY, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    for name in ("bf16", "int8", "int4", "int4_fp8", "mxfp4", "mxfp4_a8", "nvfp4_w4a16"):
        model = nnx.clone(plain)
        with jmoe.config(device="h200"):
            quantize_model(model, quantization_rules(jmoe.recipe(name)))
        implementation, why = _choice(jmoe.explain(model, ids, device="h200"))
        assert implementation == "triton", (name, why)
        assert "in every call" not in why  # weights were packed once


def test_a_row_tells_of_the_products_that_its_recipe_quantizes():
    plain, quantized = (
        jmoe.OpSpec(op="linear", recipe=jmoe.recipe(name), tokens=1, hidden=8, features=8) for name in ("bf16", "int8")
    )
    lm_head = (plain, jmoe.select(plain, "cpu", implementation="reference"))
    projection = (quantized, jmoe.select(quantized, "cpu"))
    implementation, reason = _choice(Explanation(jmoe.DeviceSpec.named("cpu"), (lm_head, projection)))
    assert implementation == "xla" and reason.startswith("first in order that can (triton: ")
    implementation, reason = _choice(Explanation(jmoe.DeviceSpec.named("cpu"), (lm_head,)))
    assert (implementation, reason.split("; ")[0]) == ("reference", "asked for by name")


def rows_of(*facts):
    """Rows by name, MB and loss change in thousandths; two layers each."""
    return tuple(
        Row(
            recipe=name,
            weight_bytes=int(1e6 * size),
            sqnr_db=20.0,
            loss=1.25 + change / 1000,
            loss_change=change / 1000,
            tokens_per_second=1234567.0,
            implementation="triton, xla",
            reason=f"why {name}",
            layers=(LayerError(path="layers.0.mlp", sqnr_db=20.0), LayerError(path="layers.1.mlp", sqnr_db=40.0)),
        )
        for name, size, change in facts
    )


def comparison(rows, checkpoint="models/[red]tiny:cat:"):
    return Comparison(
        checkpoint=checkpoint,
        text="text.bin",
        device="cpu",
        dtype="float32",
        date="2026-01-01T00:00:00+00:00",
        tokens=1000,
        unit="nats/token",
        window=256,
        versions={},
        rows=rows,
    )


CROWD = rows_of(
    ("bf16", 10.9, 0.0),
    ("fp8_tensor", 5.59, 0.4),
    ("fp8_channel", 5.67, 0.4),
    ("fp8_block", 5.59, 0.0),
    ("int8", 5.67, 0.7),
    ("int8_w8a16:group=128", 5.67, 0.4),
    ("int4", 3.1, 2.3),
    ("int4:group=32,zero_point=True", 3.25, 1.1),
    ("int4:group=64,zero_point=True", 3.2, 1.1),
    ("mxfp4", 3.1, 2.0),
    ("mxfp4_mxfp8", 3.1, 2.05),
    ("nvfp4", 3.27, 8.1),
)


def test_the_table_keeps_every_column_in_80():
    console = Console(file=io.StringIO(), width=80)
    console.print(comparison(CROWD).table())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert lines[0].startswith("models/[red]tiny:cat: on cpu, computed in float32, 1,000 tokens scored")
    start = next(i for i, line in enumerate(lines) if line.startswith(" bf16"))
    end = lines.index(next(line for line in lines if line.startswith("1: why bf16")))
    # Long names are folded; what else is in a row stays on its first line.
    firsts = [i for i in range(start, end) if "1,234,567" in lines[i]]
    assert len(firsts) == len(CROWD)
    width = lines[start].index("10.90")
    for row, first, beyond in zip(CROWD, firsts, [*firsts[1:], end], strict=True):
        name = "".join(line[:width].strip() for line in lines[first:beyond])
        assert name == row.recipe
        change = f"{row.loss_change:+.4f}"
        assert all(cell in lines[first] for cell in (f"{row.weight_bytes / 1e6:.2f}", "20.0", change, "triton, xla"))
    assert [line for line in lines if re.match(r"\d+: ", line)][-1].startswith("12: why nvfp4")


def test_labels_of_the_chart_cover_neither_each_other_nor_the_panels_edge():
    figure = Figure(figsize=(14, 5.5), layout="constrained")
    by_bytes, by_layer = figure.subplots(1, 2)
    layers = tuple(LayerError(path=f"layers.{i}.self_attn.q_proj", sqnr_db=20.0) for i in range(3))
    rows = tuple(dataclasses.replace(row, layers=layers) for row in CROWD)  # long names leave little height
    draw_error_by_layer(by_layer, comparison(rows))
    draw_loss_against_bytes(by_bytes, comparison(rows))
    figure.draw_without_rendering()
    assert sorted(text.get_text() for text in by_bytes.texts) == sorted(row.recipe for row in CROWD)
    panel = by_bytes.get_window_extent()
    boxes = {text.get_text(): text.get_bbox_patch().get_window_extent() for text in by_bytes.texts}
    for box in boxes.values():
        assert panel.y0 <= box.y0 and box.y1 <= panel.y1 and panel.x0 <= box.x0 and box.x1 <= panel.x1
    for (a, box_a), (b, box_b) in itertools.combinations(boxes.items(), 2):
        assert not box_a.overlaps(box_b), f"{a} covers {b}"


def test_a_recipe_looks_the_same_in_both_panels():
    figure = Figure()
    by_bytes, by_layer = figure.subplots(1, 2)
    draw_loss_against_bytes(by_bytes, comparison(CROWD))
    draw_error_by_layer(by_layer, comparison(CROWD))
    points = [line for line in by_bytes.lines if line.get_marker() != "None"]
    looks = [[(line.get_color(), line.get_marker()) for line in lines] for lines in (points, by_layer.lines)]
    assert looks[0] == looks[1] and len(set(looks[0])) == len(CROWD)
    # 20 dB are a tenth, 40 dB a hundredth.
    np.testing.assert_allclose(by_layer.lines[0].get_ydata(), [0.1, 0.01])


def test_many_layers_are_not_all_named():
    layers = tuple(LayerError(path=f"layers.{i}.mlp", sqnr_db=30.0) for i in range(100))
    axes = Figure().subplots()
    draw_error_by_layer(axes, comparison([dataclasses.replace(CROWD[1], layers=layers)]))
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"layers.{i}.mlp" for i in range(0, 100, 3)]


def test_a_change_that_rounds_to_zero_has_no_side():
    console = Console(file=io.StringIO(), width=120)
    console.print(comparison(rows_of(("bf16", 1.0, 0.0), ("int8", 0.5, -0.04), ("int4", 0.3, -0.06))).table())
    table = console.file.getvalue()
    assert "-0.0000" not in table and table.count("+0.0000") == 2 and table.count("-0.0001") == 1


def test_one_row_is_no_chart(tmp_path):
    with pytest.raises(ValueError, match=r"has one row, bf16; a chart compares at least two"):
        comparison(CROWD[:1]).save_chart(tmp_path / "chart.png")


def test_numbers_that_are_none_are_null_in_json_and_left_out_of_the_chart(tmp_path):
    broken = dataclasses.replace(CROWD[1], loss=math.nan, loss_change=math.nan, sqnr_db=math.inf)
    result = comparison((CROWD[0], broken))
    row = json.loads(result.to_json())["rows"][1]
    assert (row["loss"], row["loss_change"], row["sqnr_db"]) == (None, None, None)
    result.save_chart(tmp_path / "chart.png")
    axes = Figure().subplots()
    draw_loss_against_bytes(axes, result)
    assert [text.get_text() for text in axes.texts] == ["bf16"]
    comparison((broken, broken)).save_chart(tmp_path / "chart.png")


# What a recipe may cost, in nats a byte over the held-out text: at least what the same formats cost in the
# checkpoints of other tools (reference.json; fp8 blocks +0.00004, int8 +0.0008, int4 g128 +0.0027, mxfp4 weights
# +0.0020, nvfp4 +0.0080). FP4 activations that were not rounded would cost less.
BARS = {
    "fp8_tensor": (-0.001, 0.001),
    "fp8_channel": (-0.001, 0.001),
    "fp8_block": (-0.001, 0.001),
    "int8": (-0.001, 0.0015),
    "int4": (-0.001, 0.006),
    "mxfp4": (-0.001, 0.006),
    "nvfp4": (0.002, 0.011),
}


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_what_each_recipe_costs_on_half_the_text():
    _, *others = compare(TINY, text=HELDOUT, dtype="float32", windows=128).rows
    assert {row.recipe for row in others} == set(BARS)
    for row in others:
        least, most = BARS[row.recipe]
        assert least < row.loss_change < most, row.recipe


def test_another_device_than_the_one_that_computes_is_refused():
    with jmoe.config(device="h200"), pytest.raises(ValueError, match=r"the device is NVIDIA H200.* measures on .* cpu"):
        compare(TINY, text=HELDOUT)
