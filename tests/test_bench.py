"""What the benchmarks measure and report."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from bench import __main__ as command_line
from bench import clocks, harness, linear, moe, peers, report, tiles, timing, variants
from jmoe.backends.spec import DeviceSpec, OpSpec
from jmoe.scheme import RECIPES

CEILINGS = {"gbs": 4000.0, "bf16_tflops": 800.0, "fp8_tflops": 1600.0}


def measured(**changes):
    values = {"us": 20.0, "us_scan": 21.0, "us_kernels": 10.0, "launches": 2, "flops": 8e9, "moved": 2e7}
    return report.row(**{**values, **changes}, peak_tflops=800.0, ceilings=CEILINGS)


def test_rates_are_of_the_kernels_and_the_floor_is_of_the_ceilings():
    row = measured()
    assert row["tflops"] == pytest.approx(800)  # 8e9 in 10 us
    assert row["gbs"] == pytest.approx(2000)  # 20 MB in 10 us
    assert row["floor"] == pytest.approx(10)  # 8e9 at 800 TFLOP/s; 20 MB at 4 TB/s would take 5


def test_without_kernel_times_rates_are_of_the_call():
    assert measured(us_kernels=None)["tflops"] == pytest.approx(400)


def test_results_are_written_as_json_picture_and_table(tmp_path, capsys):
    rows = {f"layer/{recipe}/{t}": measured() for recipe in ("bf16", "fp8_block") for t in (1, 16)}
    results = report.result(CEILINGS, rows)
    report.write(results, tmp_path, "linear")
    [path] = tmp_path.glob("linear-*.json")
    assert json.loads(path.read_text()) == results
    assert path.with_suffix(".png").stat().st_size > 0
    assert "layer/fp8_block/16" in capsys.readouterr().out


def routed_layer(seed, tokens, top_k, dtype):
    """x, weights for ``jmoe.fused_moe``, and routing in which an expert may have no token."""
    rng = np.random.default_rng(seed)
    hidden, intermediate, experts = 16, 24, 5

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) * shape[-1] ** -0.5, dtype)

    ids = np.argsort(rng.random((tokens, experts - 1)), axis=1)[:, :top_k].astype(np.int32)
    weights = jnp.asarray(rng.random((tokens, top_k)), jnp.float32)
    w13, w2 = draw(experts, 2, intermediate, hidden), draw(experts, hidden, intermediate)
    return draw(tokens, hidden), w13, w2, weights, jnp.asarray(ids)


@pytest.mark.parametrize("tokens, top_k", [(1, 1), (1, 4), (7, 2), (33, 4), (0, 2)])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
@pytest.mark.parametrize("peer", peers.PEERS)
def test_peers_compute_the_same_layer(peer, tokens, top_k, dtype, tolerance):
    if not peers.is_here(peer):
        pytest.skip(f"{peer} is not installed")
    x, w13, w2, weights, ids = routed_layer(tokens, tokens, top_k, dtype)
    expected = jmoe.fused_moe(x, w13, w2, weights, ids, implementation="reference").astype(jnp.float32)
    # The same weights as grouped products take them: (E, K, N), gate before up.
    first, second = jnp.concatenate([w13[:, 0], w13[:, 1]], axis=1).swapaxes(1, 2), w2.swapaxes(1, 2)
    with jax.default_matmul_precision("highest"):
        y = jax.jit(peers.fused_moe, static_argnums=0)(peers.PEERS[peer], x, first, second, weights, ids)
    assert y.shape == x.shape and y.dtype == dtype
    error = jnp.linalg.norm(y.astype(jnp.float32) - expected)
    assert float(error) <= tolerance * float(jnp.linalg.norm(expected))


@pytest.fixture
def small_layers(monkeypatch):
    monkeypatch.setattr(timing, "ceilings", lambda: CEILINGS)
    monkeypatch.setattr(linear, "LAYERS", {"small": (32, 64)})
    monkeypatch.setattr(moe, "LAYERS", {"small": (16, 8, 4, 2)})
    for benchmark in (linear, moe):
        monkeypatch.setitem(benchmark.USUAL, "layers", ("small",))
    monkeypatch.setattr(moe, "DEPTH", 2)
    monkeypatch.setattr(moe, "_CALLS", 2)
    monkeypatch.setattr(timing, "REST", 0)


@pytest.mark.parametrize("benchmark, recipe", [(linear, "xla-bf16"), (moe, "ragged-bf16")])
def test_a_benchmark_gives_a_row_a_row_count_and_saves_as_it_goes(benchmark, recipe, small_layers, capsys):
    saved = []
    results = harness.run(
        benchmark.rows, ["small"], [recipe], [1, 3], lambda results: saved.append(list(results["rows"]))
    )
    keys = [f"small/{recipe}/{t}" for t in (1, 3)]
    assert saved == [keys[:1], keys]
    assert list(results["rows"]) == keys and results["ceilings"] == CEILINGS
    for t, row in zip((1, 3), results["rows"].values(), strict=True):
        flops = 2 * t * 32 * 64 if benchmark is linear else 6 * t * 2 * 16 * 8
        assert row["us"] > 0 and row["us_scan"] is None
        if row["us_kernels"] is None:  # without CUPTI
            assert row["tflops"] == pytest.approx(flops / row["us"] * 1e-6)
    printed = capsys.readouterr().out
    assert all(key in printed for key in keys)


def test_a_peer_that_is_not_installed_or_does_not_serve_has_no_rows(small_layers, monkeypatch, capsys):
    def refuse(rows, weights, sizes):
        raise NotImplementedError("only on Hopper")

    monkeypatch.setitem(moe.PEERS, "ragged-bf16", refuse)
    assert list(moe.rows("small", "ragged-bf16", [1], CEILINGS)) == []
    assert "small/ragged-bf16/1: only on Hopper" in capsys.readouterr().out
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(moe.rows("small", "tokamax-triton-bf16", [1], CEILINGS)) == []
    assert "small/tokamax-triton-bf16: not installed" in capsys.readouterr().out


def test_kernels_are_summed_by_name_over_independent_calls():
    kernels = [("first", 10.0), ("combine", 2.0), ("first", 14.0), ("combine", 4.0)]
    assert harness.by_name(kernels, 2) == {"first": 12.0, "combine": 3.0}
    assert harness.by_name(None, 2) == {}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layers", "huge"], "--layers has 'huge'; known are small"),
        (["--recipes", "fp8_block,int3"], "--recipes has 'int3'; known are xla-bf16, torch-fp8,"),
        (["--tokens", "many"], "--tokens 'many' must be numbers with commas between them"),
        (["--tokens", "8,0"], "--tokens has 0; known are 1, 16,"),
        (["--recipes", "fp8_block+zipf"], "--recipes has 'fp8_block+zipf'; known are xla-bf16,"),
        (["--routing", "zipf"], "--routing zipf is of experts, and linear has none"),
        (["--routing", "skewed"], "--routing has 'skewed'; known are uniform, zipf"),
    ],
)
def test_what_is_not_known_is_wrong_usage(arguments, message, small_layers, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "linear", *arguments])
    with pytest.raises(SystemExit) as exit_:
        command_line.main()
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_the_command_line_writes_what_it_measures(small_layers, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "sys.argv", ["bench", "linear", "--recipes", "xla-bf16", "--tokens", "2,33", "--out", str(tmp_path)]
    )
    command_line.main()
    [path] = tmp_path.glob("linear-*.json")
    assert list(json.loads(path.read_text())["rows"]) == ["small/xla-bf16/2", "small/xla-bf16/33"]


def test_a_line_of_nvidia_smi_is_a_sample():
    assert clocks.parse("1755, 698.21, 0x0000000000000004\n") == (1755, 698.21, 4)
    assert clocks.parse("[N/A], 698.21, 0x4") is None
    assert clocks.parse("Field is not a valid field to query.") is None


def test_a_clock_is_the_median_with_every_reason_to_slow_down():
    samples = [clocks.Sample(1980, 300.0, 0), clocks.Sample(1500, 690.0, 0x4), clocks.Sample(1600, 700.5, 0x40)]
    assert clocks.summary(samples) == {
        "mhz": 1600,
        "mhz_least": 1500,
        "watts": 700.5,
        "slowed_by": ["power cap", "hardware thermal limit"],
    }
    assert clocks.summary([]) == {}


def test_clocks_are_sampled_while_a_block_runs(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 1, 1.0, 0x0\necho 1980, 650.0, 0x4\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with clocks.watch() as samples:
        pass
    assert samples == []  # of a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with clocks.watch() as samples:
        while len(samples) < 2:
            time.sleep(0.01)
    assert samples == [(1980, 650.0, 4)]


def test_tiles_have_a_row_each_and_the_heuristics_comes_first(monkeypatch):
    """The kernels do not run here, so what is compiled is replaced by what takes the same arguments."""
    monkeypatch.setattr(tiles, "LAYERS", {"small": (256, 512)})
    monkeypatch.setattr(DeviceSpec, "of", lambda device: DeviceSpec.named("h200"))
    monkeypatch.setattr(timing, "REST", 0)
    monkeypatch.setattr(timing, "compile_all", lambda given: {name: lambda x, weights: x for name in given})
    for recipe in ("bf16", "fp8_block"):
        rows = dict(tiles.rows("small", recipe, [128], CEILINGS))
        heuristic = jmoe.select(
            OpSpec(op="linear", recipe=jmoe.recipe(recipe), tokens=128, hidden=512, features=256), "h200"
        ).tile("tile")
        assert next(iter(rows)) == f"128/{heuristic}" and len(rows) == 8
        assert all(row["us"] > 0 for row in rows.values())


def test_a_name_says_how_a_recipe_is_called():
    assert variants.parse("bf16") == ("bf16", False, False, None, False)
    assert variants.parse("fp8_channel+exact+zipf") == ("fp8_channel", True, False, "exact", False)
    assert variants.parse("fp8_block+batch_invariant").batch_invariant
    for name in (*moe.RECIPES, *linear.RECIPES):
        assert variants.parse(name).recipe in (*RECIPES, *peers.PEERS, "xla-bf16", "torch-fp8")


def test_zipf_routing_is_skewed_and_a_tokens_experts_are_distinct(monkeypatch):
    monkeypatch.setattr(moe, "LAYERS", {"small": (16, 8, 32, 4)})
    counts = {}
    for zipf in (False, True):
        _, ids = moe.routing(2000, "small", 0, zipf=zipf)
        assert ids.shape == (2000, 4) and all(len(set(row)) == 4 for row in ids.tolist())
        counts[zipf] = np.sort(np.bincount(ids.ravel(), minlength=32))[::-1]
    assert counts[False].max() < 1.3 * counts[False].mean()
    assert counts[True][0] > 1300 and counts[True][0] > 5 * counts[True][16]  # the first is most tokens' choice


def test_a_variant_reaches_the_operation(small_layers, monkeypatch):
    seen = []

    def fused_moe(x, *_, accumulation, **__):
        seen.append((accumulation, jmoe.config.batch_invariant, jmoe.config.workspace > 0))
        return x

    monkeypatch.setattr(jmoe, "fused_moe", fused_moe)
    for name in ("fp8_channel+exact", "fp8_channel+batch_invariant", "mxfp4_a8+workspace"):
        moe._call(variants.parse(name), jnp.ones(2), (None, None), (None, None), 0)
    assert seen == [("exact", False, False), (None, True, False), (None, False, True)]


def test_both_routings_have_rows(small_layers, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "sys.argv",
        [
            "bench",
            "moe",
            "--recipes",
            "ragged-bf16",
            "--routing",
            "uniform,zipf",
            "--tokens",
            "4",
            "--out",
            str(tmp_path),
        ],
    )
    command_line.main()
    [path] = tmp_path.glob("moe-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["small/ragged-bf16/4", "small/ragged-bf16+zipf/4"]
    for row in rows.values():
        assert row["compile_s"] > 0 and row["extra_bytes"] > 0
        assert row["clock"] == {}  # of a CPU


def test_a_chart_has_published_points_of_the_recipes_that_it_draws():
    recipes = {"fp8_block": {}, "bf16": {}}
    found = report._peers_of("qwen3-30b", recipes, "NVIDIA H200")
    assert found["vLLM Triton fp8_block"] == {
        1: 28.3,
        8: 84.7,
        32: 150.8,
        128: 174.1,
        512: 222.5,
        2048: 459.4,
        8192: 1475.3,
    }
    assert set(found) == {"vLLM Triton fp8_block", "vLLM Triton bf16"}
    assert set(report._peers_of("mixtral", {"int4": {}}, "NVIDIA H200")) == {"vLLM Marlin int4"}
    assert report._peers_of("qwen3-30b", recipes, "NVIDIA H100") == {}
    assert "microseconds" in json.loads(report.PUBLISHED.read_text())["unit"]


def test_formats_that_read_as_many_bytes_share_a_roofline():
    def points(*floors):
        return {t: {"floor": floor} for t, floor in zip((1, 8), floors, strict=True)}

    found = report._rooflines({"fp8_block": points(10, 60), "fp8_tensor": points(10.5, 60), "bf16": points(20, 120)})
    assert list(found.values()) == [["fp8_block", "fp8_tensor"], ["bf16"]]


def test_charts_are_drawn_again_from_results(tmp_path, monkeypatch, capsys):
    rows = {f"qwen3-30b/{recipe}/{t}": measured() for recipe in ("fp8_block", "fp8_block+zipf") for t in (1, 8)}
    path = report.save({**report.result(CEILINGS, rows), "device": "NVIDIA H200"}, tmp_path, "moe")
    monkeypatch.setattr("sys.argv", ["bench.report", str(path)])
    report.main()
    assert path.with_suffix(".png").stat().st_size > 0 and "qwen3-30b/fp8_block+zipf/8" in capsys.readouterr().out


@pytest.mark.parametrize(
    "recipe, count, ceiling",
    [
        ("xla-bf16", 2, 800),
        ("bf16", 2, 800),
        ("fp8_block", 1 + 4 / 128**2, 1600),
        ("fp8_w8a16", 1 + 4 / 128**2, 800),
        ("int8+batch_invariant", 1 + 4 / 1024, 1600),
        ("int4", 0.5 + 4 / 128, 800),
        ("int4:group=64", 0.5 + 4 / 64, 800),
        ("mxfp4_a8", 0.5 + 1 / 32, 1600),
    ],
)
def test_bytes_of_a_weight_and_the_ceiling_of_its_products(recipe, count, ceiling):
    assert harness.peak_tflops(recipe, CEILINGS) == ceiling
    assert harness.bytes_each(recipe.split("+")[0]) == pytest.approx(count)


@pytest.mark.parametrize("benchmark", [linear, moe])
def test_a_recipe_without_kernels_here_has_no_rows(benchmark, small_layers, capsys):
    assert list(benchmark.rows("small", "int4:group=8", [1], CEILINGS)) == []
    assert "small/int4:group=8: implementation='triton' cannot serve" in capsys.readouterr().out


def test_what_a_way_of_calling_costs(capsys):
    us = {"a/fp8_block/1": 10.0, "a/fp8_block+batch_invariant/1": 12.5, "a/fp8_block+batch_invariant/8": 30.0}
    results = report.result(CEILINGS, {key: measured(us=value) for key, value in us.items()})
    assert report.costs(results["rows"]) == {"a/fp8_block+batch_invariant": {"1": 1.25}}  # no plain call of 8
    report.print_table(results)
    assert "a/fp8_block+batch_invariant takes, of the plain call's time: 1: 1.25" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", [linear, moe])
def test_the_usual_is_among_the_known(benchmark):
    assert set(benchmark.USUAL["layers"]) <= set(benchmark.LAYERS)
    assert set(benchmark.USUAL["recipes"]) <= set(benchmark.RECIPES)
    for recipe in benchmark.RECIPES:
        assert variants.is_known(recipe, benchmark.RECIPES, benchmark.WAYS)
