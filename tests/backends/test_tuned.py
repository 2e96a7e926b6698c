"""Measured tiles in the selection: whose, for what, and that a change is traced anew."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

import jmoe
from jmoe import DeviceSpec, OpSpec, recipe, select
from jmoe.backends import tuned
from jmoe.config import TuningFile, from_environment
from jmoe.ops.explain import describe
from pallas_kernels.tuning import table

H200 = DeviceSpec.named("h200")
LINEAR = OpSpec(op="linear", recipe=recipe("fp8_block"), tokens=512, hidden=256, features=128)
MOE = OpSpec(
    op="moe",
    recipe=recipe("fp8_block"),
    tokens=8,
    hidden=2048,
    experts=128,
    global_experts=128,
    intermediate=768,
    top_k=8,
    activation=jmoe.swiglu(),
)


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch):
    monkeypatch.setattr(table, "shipped", dict)


def measured(op, **tile):
    """An entry whose (first) tile differs from the heuristic's."""
    parts = dict(select(op, H200).tiles)
    if op.op == "linear":
        tiles = dataclasses.replace(parts["tile"], **tile)
    else:
        tiles = table.MoETiles(**{**parts, "first": dataclasses.replace(parts["first"], **tile)})
    key = tuned.key_of(op, H200, "exact")
    return table.Entry(
        key=key, tokens=op.tokens, tiles=tiles, us=1.0, heuristic_us=2.0, date="2026-11-30", jax=jax.__version__
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiles.json"
    table.save(path, [measured(LINEAR, group=3), measured(MOE, group=3)])
    return path


@pytest.mark.parametrize("op, name, bucket", [(LINEAR, "tile", "M=512"), (MOE, "first", "T=8")])
def test_a_measured_tile_comes_before_the_heuristics(op, name, bucket, file):
    plain = select(op, "h200")
    assert plain.tiles_from == "heuristic" and plain.tile(name).group > 4
    with jmoe.config(tuning=file):
        selection = select(op, "h200")
        assert selection.tile(name).group == 3
        assert selection.tiles_from == f"tuned for 132 SMs sm90, {bucket}"
        assert f"tiles: tuned for 132 SMs sm90, {bucket}" in describe(op, selection)[2]
        # The same facts by another name; 2 tokens more; and what says nothing of kernels.
        assert select(op, "h100") == selection
        assert select(op.replace(tokens=op.tokens + 2), "h200") == selection
        assert select(op.replace(bias=True, layers=3, out_dtype="float32"), "h200") == selection
    assert "tiles: heuristic" in describe(op, select(op, "h200"))[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 2049},
        {"dtype": "float32"},
        {"hidden": 512},
        {"recipe": recipe("fp8_block", block=64)},
        {"accumulation": "fast"},
        {"batch_invariant": True},
    ],
)
def test_what_was_not_measured_gets_the_heuristics(changes, file):
    with jmoe.config(tuning=file):
        assert select(LINEAR.replace(**changes), "h200").tiles_from == "heuristic"
        assert select(LINEAR, "b200").tiles_from == "heuristic"
        assert select(LINEAR, "cpu").tiles_from == ""


def test_experts_in_part_or_of_two_recipes_get_the_heuristics(file):
    with jmoe.config(tuning=file):
        assert select(MOE.replace(global_experts=256, expert_map=True), "h200").tiles_from == "heuristic"
        assert select(MOE.replace(second_recipe=recipe("fp8_channel")), "h200").tiles_from == "heuristic"
        assert select(MOE.replace(second_recipe=MOE.recipe), "h200").tiles_from != "heuristic"


def test_tiles_of_batch_invariant_calls_do_not_depend_on_what_was_measured(file):
    with jmoe.config(tuning=file):
        tiles = {select(LINEAR.replace(batch_invariant=True, tokens=t), "h200").tiles for t in (1, 511, 512, 8192)}
    assert len(tiles) == 1


def test_the_users_file_comes_before_what_is_shipped(file, monkeypatch):
    shipped = table.table([measured(LINEAR, group=4), measured(MOE.replace(tokens=64), group=4)])
    monkeypatch.setattr(table, "shipped", lambda: shipped)
    assert select(LINEAR, "h200").tile("tile").group == 4
    with jmoe.config(tuning=file):
        assert select(LINEAR, "h200").tile("tile").group == 3
        assert select(MOE.replace(tokens=60), "h200").tile("first").group == 4  # 8 is too far


def test_a_recipe_is_known_by_its_schemes_not_by_its_name(file):
    mine = dataclasses.replace(recipe("fp8_block"), name="mine")
    with jmoe.config(tuning=str(file)):
        assert select(LINEAR.replace(recipe=mine), "h200").tiles_from.startswith("tuned")


def test_another_file_and_a_changed_one_are_traced_with_anew(file, tmp_path):
    seen = []

    @jax.jit
    def f(x):
        seen.append(select(LINEAR, "h200").tile("tile").group)
        return x

    def call(path):
        with jmoe.config(tuning=path):
            f(jnp.zeros(2))

    call(file), call(file)
    table.save(file, [measured(LINEAR, group=4)])
    call(file)
    other = tmp_path / "other.json"
    table.save(other, [])
    call(other), call(None), call(None)
    assert seen[:2] == [3, 4] and len(seen) == 4 and seen[2] == seen[3] > 4


def test_a_file_that_is_none_is_told_of(tmp_path):
    missing = tmp_path / "none.json"
    with (
        pytest.raises(ValueError, match=r"config tuning='.*none.json' \(or JMOE_TUNING\) cannot be read: No such file"),
        jmoe.config(tuning=missing),
    ):
        pass
    with pytest.raises(ValueError, match="config tuning=3 must be the path of a file or None"), jmoe.config(tuning=3):
        pass
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with jmoe.config(tuning=bad), pytest.raises(ValueError, match=f"tuning file {bad} must hold"):
        select(LINEAR, "h200")


def test_the_environment_names_a_file(file):
    assert from_environment({"JMOE_TUNING": str(file)}).tuning == TuningFile.at(file)
    assert from_environment({"JMOE_TUNING": str(file)}).tuning.size == os.path.getsize(file)
    assert from_environment({"JMOE_TUNING": ""}).tuning is None
    with pytest.raises(ValueError, match=r"config tuning='nowhere.json' \(or JMOE_TUNING\) cannot be read"):
        from_environment({"JMOE_TUNING": "nowhere.json"})


@pytest.mark.parametrize("changes", [{"swap": False}, {"swap": True, "block_k": 64}])
def test_tiles_by_which_packed_weights_give_wrong_sums_are_refused(changes, tmp_path):
    op = MOE.replace(recipe=recipe("int4"))
    entry = measured(op, group=4)
    first, second = (dataclasses.replace(t, block_k=128, swap=True) for t in (entry.tiles.first, entry.tiles.second))
    good = dataclasses.replace(entry.tiles, first=first, second=second)
    bad = dataclasses.replace(good, second=dataclasses.replace(second, **changes))
    for tiles, refused in ((good, False), (bad, True)):
        table.save(tmp_path / "t.json", [dataclasses.replace(entry, tiles=tiles)])
        with jmoe.config(tuning=tmp_path / "t.json"):
            if not refused:
                assert select(op, "h200", implementation="triton").tiles_from != "heuristic"
                continue
            with pytest.raises(ValueError, match=r"do not serve moe int4 .*: second is .*, but block_k is a multiple"):
                select(op, "h200", implementation="triton")
