"""The search for tiles with clocks that tests set: what is tried, what wins, and what goes to the file."""

import dataclasses

import jax
import pytest

import jmoe
from jmoe import OpSpec, recipe, select
from jmoe.backends import xla
from jmoe.tuning import MODELS, catalogue, on_device, operations, tune
from jmoe.tuning.search import plan_of
from pallas_kernels.tuning import table

BLOCK = recipe("fp8_block")
LINEAR = OpSpec(op="linear", recipe=BLOCK, tokens=512, hidden=7168, features=2112)
MOE = catalogue.experts(MODELS["qwen3-30b"], BLOCK, 64)


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(table, "shipped", dict)


def linear_clock(times):
    """Measures the i-th tiles as ``times[i]`` microseconds."""
    return lambda op, tiles: [None if us is None else [("linear", us)] for us in times[: len(tiles)]]


def test_the_fastest_tile_goes_to_the_file(tmp_path):
    path = tmp_path / "tiles.json"
    told = []
    [trial] = tune(
        [LINEAR], path, device="h200", measure=linear_clock([20, 15.126, None, 16]), progress=lambda *s: told.append(s)
    )
    tried = plan_of(LINEAR, "h200").tiles
    kernels = [None if us is None else [("linear", us)] for us in (20, 15.126, None, 16)]
    assert trial.tried == tuple(zip(tried, kernels, strict=True))
    [[entry]] = table.load(path).values()
    assert entry == trial.entry
    assert (entry.tiles, entry.tokens, entry.us, entry.heuristic_us) == (tried[1], 512, 15.13, 20)
    assert entry.jax == jax.__version__ and len(entry.date) == 10
    assert told == [(LINEAR.replace(accumulation="exact").describe(), 0, 1), ("done", 1, 1)]
    with jmoe.config(tuning=path):
        assert select(LINEAR, "h200").tile("tile") == tried[1]
        assert select(LINEAR, "h200").tiles_from == "tuned for 132 SMs sm90, M=512"


def test_a_gain_within_noise_keeps_the_heuristics_tile(tmp_path):
    [trial] = tune([LINEAR], tmp_path / "t.json", device="h200", measure=linear_clock([20, 19.9, 19.9, 25]))
    assert trial.entry.tiles == plan_of(LINEAR, "h200").tiles[0] and trial.entry.us == 20


def test_each_product_of_a_layer_takes_its_own_fastest_tile_among_blocks_of_one_height(tmp_path):
    tiles = plan_of(MOE, "h200").tiles
    assert len({t.first.block_m for t in tiles[:3]}) == 1

    def clock(op, tiles):
        times = [(50, 30, 5), (40, 35, 5), (60, 25, 6), (100, 100, 1)]
        return [[("moe_prepare", rest), ("moe_first", first), ("moe_second", second)] for first, second, rest in times]

    [trial] = tune([MOE], tmp_path / "t.json", device="h200", measure=clock)
    assert trial.entry.tiles.first == tiles[1].first and trial.entry.tiles.second == tiles[2].second
    assert (trial.entry.us, trial.entry.heuristic_us) == (40 + 25 + 5, 85)


@pytest.mark.parametrize("combine, split", [(6, 4), (8, 1)])
def test_what_adds_up_shares_of_k_counts_as_the_second_products(combine, split, tmp_path):
    op = catalogue.experts(MODELS["mixtral"], recipe("int4"), 4)
    assert {tiles.second.split_k for tiles in plan_of(op, "h200").tiles} == {1, 4}

    def clock(op, tiles):
        return [
            [("moe_first", 50 - i), *([("moe_second", 20), ("combine", combine)] if t.second.split_k > 1 else WHOLE_K)]
            for i, t in enumerate(tiles)
        ]

    [trial] = tune([op], tmp_path / "t.json", device="h200", measure=clock)
    assert trial.entry.tiles.second.split_k == split and trial.entry.us == 47 + min(20 + combine, 27)


WHOLE_K = [("moe_second", 25), ("combine", 2)]


def test_where_kernels_are_not_told_apart_whole_calls_are_compared(tmp_path):
    def clock(op, tiles):
        return [[("call", us)] for us in (85, 90, 70, 80)]

    [trial] = tune([MOE], tmp_path / "t.json", device="h200", measure=clock)
    assert trial.entry.tiles == plan_of(MOE, "h200").tiles[2] and trial.entry.us == 70


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    path = tmp_path / "t.json"
    ops = [LINEAR.replace(tokens=t) for t in (1, 64, 512)]
    seen = []

    def clock(op, tiles):
        seen.append(op.tokens)
        if seen == [1, 64]:
            raise KeyboardInterrupt
        return [[("linear", 10.0)] for _ in tiles]

    with pytest.raises(KeyboardInterrupt):
        tune(ops, path, device="h200", measure=clock)
    assert [t.op.tokens for t in tune(ops, path, device="h200", measure=clock)] == [64, 512]
    assert seen == [1, 64, 64, 512]
    assert tune(ops, path, device="h200", measure=clock) == []
    # Another device, and another recipe, have entries of their own in the same file.
    other = [LINEAR.replace(recipe=recipe("bf16"))]
    assert (
        len(tune(ops, path, device="b200", measure=clock)) == 3
        and len(tune(other, path, device="h200", measure=clock)) == 1
    )
    found = table.load(path)
    assert sorted((k.sm_count, k.recipe, len(e)) for k, e in found.items()) == [
        (132, "bf16", 1),
        (132, "fp8_block", 3),
        (148, "fp8_block", 3),
    ]
    [trial] = tune(ops[:1], path, device="h200", measure=linear_clock([9, 3, 4, 5]), again=True)
    assert trial.entry.us == 3 and len(table.load(path)) == 3


def test_on_a_cpu_it_says_that_it_takes_a_gpu(tmp_path):
    with pytest.raises(ValueError, match=r"tiles are measured on an NVIDIA GPU, and this is cpu"):
        tune([LINEAR], tmp_path / "t.json", device="cpu")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes", [{"tokens": 0}, {"batch_invariant": True}, {"op": "moe", "experts": 4, "global_experts": 8}]
)
def test_what_no_table_has_is_not_tuned(changes, tmp_path):
    with pytest.raises(ValueError, match="is not tuned: it has no tokens, fixed tiles, two recipes or part of the"):
        tune([MOE.replace(**changes)], tmp_path / "t.json", device="h200", measure=linear_clock([1]))


def test_what_the_kernels_do_not_serve_is_refused_with_the_reason(tmp_path):
    with pytest.raises(NotImplementedError, match=r"W8A8 FP8 needs compute capability 8.9"):
        tune([LINEAR], tmp_path / "t.json", device="a100", measure=linear_clock([1]))
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        tune([LINEAR], tmp_path / "t.json", device="h200", count=0)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_candidates_for_each_operation(name):
    for op in operations(MODELS[name], BLOCK, (1, 2048)):
        work = plan_of(op, "h200", 4)
        assert 1 < len(work.tiles) <= 4
        assert work.tiles[0] == dict(select(op, "h200").tiles).get("tile", work.tiles[0])


def test_an_unknown_model_is_told_which_there_are():
    with pytest.raises(ValueError, match=r"model 'gpt-5' is unknown; known are dsv3, dsv3-tp8, qwen3-30b"):
        catalogue.model("gpt-5")


SMALL = [
    OpSpec(op="linear", recipe=recipe("bf16"), tokens=3, hidden=64, features=32),
    OpSpec(op="linear", recipe=recipe("fp8_tensor_static"), tokens=3, hidden=64, features=32),
    catalogue.experts(
        dataclasses.replace(MODELS["mixtral"], hidden=64, intermediate=32, experts=4), recipe("fp8_channel"), 5
    ),
    OpSpec(
        op="batched_experts",
        recipe=recipe("fp8_block"),
        tokens=3,
        hidden=128,
        intermediate=128,
        experts=2,
        global_experts=2,
        activation=jmoe.swiglu(),
    ),
]


@pytest.mark.parametrize("op", SMALL, ids=lambda op: f"{op.op} {op.recipe.name}")
def test_an_operation_is_timed_on_random_data(op, tmp_path, monkeypatch):
    """On a CPU through XLA; the kernels take the same arguments."""
    given, outputs = [], []

    def clock(compiled, arguments):
        given.extend(arguments)
        outputs.extend(compiled(arguments))
        return 6.0

    def through_xla(op, selection, args):
        name = {"moe": "fused_moe"}.get(op.op, op.op)
        return getattr(xla, name)(op, select(op, "cpu", implementation="xla"), args)

    monkeypatch.setattr(on_device, "_BYTES", 1)  # as few layers as there can be
    monkeypatch.setattr(on_device.timing, "wall_us", clock)
    kernels = dict(on_device.FUNCTIONS)
    monkeypatch.setattr(on_device, "FUNCTIONS", dict.fromkeys(kernels, through_xla))
    with jmoe.config(device="h200"):
        [trial] = tune([op], tmp_path / "t.json", count=1)
    calls = 8 if op.op == "moe" else 2  # of two layers, and as many routings as are to show what there is on average
    assert [kernels for _, kernels in trial.tried] == [[("call", 6.0 / calls)]]
    assert len(outputs) == calls and abs(outputs[0] - outputs[1]).max() > 0
    if op.op == "moe":
        assert len({given[i].topk_ids.tobytes() for i in range(calls)}) == calls
        assert given[2].w13 is given[0].w13 is not given[1].w13
    for y in outputs:
        assert y.shape[-1] == (op.features or op.hidden) and 0.01 < float(abs(y).mean()) < 10
    chosen = select(op, "h200", implementation="triton")
    y = jax.eval_shape(lambda args: kernels[op.op](op, chosen, args), given[0])
    assert (y.shape, y.dtype) == (outputs[0].shape, outputs[0].dtype)
