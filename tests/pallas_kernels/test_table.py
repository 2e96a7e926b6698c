"""Tables of measured tiles: what a file holds, which entry serves, and what is said of bad files."""

import dataclasses
import json
import os

import pytest

from pallas_kernels.tuning import table
from pallas_kernels.tuning.heuristics import MatmulTile
from pallas_kernels.tuning.moe_heuristics import MoETiles

TILE = MatmulTile(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=3)
LINEAR = table.Key(
    compute_capability=90,
    sm_count=132,
    op="linear",
    recipe="fp8_block",
    accumulation="exact",
    dtype="bfloat16",
    hidden=7168,
    features=2112,
)
MOE = dataclasses.replace(LINEAR, op="moe", features=0, intermediate=256, experts=256, top_k=8)


def entry(key=LINEAR, tokens=64, tiles=TILE, us=10.5):
    return table.Entry(key=key, tokens=tokens, tiles=tiles, us=us, heuristic_us=12, date="2026-11-30", jax="0.11.2")


def plain(**changes):
    """An entry as a file has it."""
    return {**json.loads(table.dumps([entry()]))["entries"][0], **changes}


def text_of(*entries):
    return json.dumps({"format": 1, "entries": list(entries)})


def test_what_is_written_is_read():
    wide = dataclasses.replace(TILE, block_n=256, pieces=2, run=2, swap=True)
    entries = [entry(), entry(MOE, 8, MoETiles(first=TILE, second=wide))]
    text = table.dumps(entries)
    assert table.parse(text, "t.json") == entries
    assert len(text.splitlines()) == 4  # an entry is a line, so that changes can be read
    assert table.parse(table.dumps([]), "t.json") == []


def test_a_line_of_a_file():
    assert plain() == {
        "compute_capability": 90,
        "sm_count": 132,
        "op": "linear",
        "recipe": "fp8_block",
        "accumulation": "exact",
        "dtype": "bfloat16",
        "hidden": 7168,
        "features": 2112,
        "tokens": 64,
        "tiles": {"tile": {"block_m": 64, "block_n": 128, "block_k": 128, "num_warps": 4, "num_stages": 3}},
        "us": 10.5,
        "heuristic_us": 12,
        "date": "2026-11-30",
        "jax": "0.11.2",
    }


def test_of_two_entries_for_the_same_the_later_one_counts():
    found = table.table([entry(tokens=512), entry(us=3.0), entry(us=2.0)])
    assert [(e.tokens, e.us) for e in found[LINEAR]] == [(64, 2.0), (512, 10.5)]


@pytest.mark.parametrize(
    "tokens, bucket",
    [
        (64, 64),
        (3, None),  # 8 is more than twice as many
        (4, 8),
        (13, 8),  # below the geometric mean of 8 and 24
        (14, 24),
        (39, 24),  # below the geometric mean of 24 and 64
        (40, 64),
        (128, 64),
        (129, None),
        (4095, None),
        (4096, 8192),
        (16384, 8192),
        (16385, None),
        (0, None),
    ],
)
def test_the_nearest_bucket_wins(tokens, bucket):
    entries = [entry(MOE, tokens=t) for t in (8, 24, 64, 8192)]
    found = table.nearest(entries, tokens)
    assert (None if found is None else found.tokens) == bucket


@pytest.mark.parametrize(
    "tokens, bucket",
    [
        (7, None),
        (8, 16),
        (16, 16),
        (17, None),  # two blocks of 16 rows would read the weights twice
        (32, 64),
        (64, 64),
        (65, None),
        (409, None),
        (410, 512),  # 1.25 times fewer
        (640, 512),
        (641, None),
    ],
)
def test_a_linears_tile_serves_rows_of_which_its_program_counts_are_true(tokens, bucket):
    found = table.nearest([entry(tokens=t) for t in (16, 64, 512)], tokens)
    assert (None if found is None else found.tokens) == bucket


def test_of_two_that_are_as_near_the_larger_wins():
    assert table.nearest([entry(MOE, tokens=8), entry(MOE, tokens=32)], 16).tokens == 32


def test_a_slot_at_a_time_is_for_no_more_tokens_than_it_was_measured_at():
    entries = [entry(MOE, tokens, MoETiles(first=TILE, second=TILE, single=tokens <= 8)) for tokens in (1, 8, 16)]
    found = {tokens: table.nearest(entries, tokens).tokens for tokens in (1, 4, 5, 8, 9, 20)}
    assert found == {1: 1, 4: 8, 5: 8, 8: 8, 9: 16, 20: 16}


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "tuning file t.json is no JSON: "),
        ("[]", 'tuning file t.json must hold {"format": 1, "entries": [...]}'),
        ('{"format": 2, "entries": []}', 'tuning file t.json must hold {"format": 1, "entries": [...]}'),
        ('{"format": true, "entries": []}', 'tuning file t.json must hold {"format": 1, "entries": [...]}'),
        ('{"format": 1, "entries": [], "by": 0}', 'tuning file t.json must hold {"format": 1, "entries": [...]}'),
        ("[" * 100_000, "tuning file t.json is no JSON: "),
        (text_of(plain(accumulation="slow")), "accumulation 'slow' must be one of exact, fast"),
        (text_of(plain(dtype="bf16")), "dtype 'bf16' must be one of bfloat16, float16, float32"),
        (text_of(plain(), 3), "tuning file t.json, entry 1: it must be an object, not 3"),
        (text_of(plain(colour="red")), "tuning file t.json, entry 0: it has unknown colour"),
        (text_of({"op": "moe"}), "it has missing accumulation, compute_capability, date, dtype, heuristic_us, hidden,"),
        (text_of(plain(hidden="7168")), "hidden is '7168', but it is an integer of at least 0"),
        (text_of(plain(sm_count=True)), "sm_count is True, but it is an integer of at least 0"),
        (text_of(plain(op="matmul")), "op 'matmul' must be one of linear, moe, batched_experts"),
        (text_of(plain(tokens=0)), "tokens is 0, but it is an integer of at least 1"),
        (text_of(plain(us=-1)), "us is -1, but it is a number of at least 0"),
        (text_of(plain(date=20261130)), "date is 20261130, but it is a text"),
        (text_of(plain(tiles={"first": {}})), "tiles has unknown first"),
        (text_of(plain(op="moe")), "tiles has unknown tile"),
        (
            text_of(plain(tiles={"tile": plain()["tiles"]["tile"] | {"short": 64}})),
            "tile.short 64 must be below block_m, 64",
        ),
        (
            text_of(plain(tiles={"tile": plain()["tiles"]["tile"] | {"short": 8}})),
            "tile.short 8 must be 0 or at least 16",
        ),
        (
            text_of(plain(tiles={"tile": plain()["tiles"]["tile"] | {"block_n": 8}})),
            "tile.block_n 8 must be at least 16",
        ),
        (text_of(plain(tiles={"tile": {"block_m": 64}})), "tile has missing block_k, block_n, num_stages, num_warps"),
    ],
)
def test_a_bad_file_is_named_with_its_entry(text, message):
    with pytest.raises(ValueError, match=r"^tuning file t.json") as raised:
        table.parse(text, "t.json")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_n": 96}, "tile.block_n 96 must be a power of two"),
        ({"block_k": 0}, "tile.block_k is 0, but it is an integer of at least 1"),
        ({"num_warps": 64}, "is none that a GPU runs"),
        ({"num_stages": 2.5}, "tile.num_stages is 2.5, but it is an integer of at least 1"),
        ({"swap": 1}, "tile.swap is 1, but it is true or false"),
        ({"pieces": 256}, "is none that a GPU runs"),
        ({"block_n": 64, "pieces": 8}, "tile.pieces 8 leaves less than 16 of block_n 64"),
        ({"block_n": 2**40}, "has more than 1048576 elements"),
        ({"split_k": 128}, "tile.split_k 128 must be at most 64"),
        ({"run": 2**31}, "tile.run 2147483648 and tile.group 8 must be at most 1048576"),
        ({"group": 2**40}, "tile.group 1099511627776 must be at most 1048576"),
    ],
)
def test_a_bad_tile_is_told_of(changes, message):
    tile = {**plain()["tiles"]["tile"], **changes}
    with pytest.raises(ValueError, match=r"^tuning file t.json, entry 1: ") as raised:
        table.parse(text_of(plain(), plain(tiles={"tile": tile})), "t.json")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "op, changes, fine",
    [
        ("moe", {}, True),
        ("batched_experts", {}, False),
        ("moe", {"run": 2}, False),
        ("single", {}, False),
    ],
)
def test_shares_of_the_second_products_k_are_told_of_where_nothing_sums_them(op, changes, fine):
    tile = plain()["tiles"]["tile"] | {"split_k": 1}
    single = {"single": True} if op == "single" else {}
    op = "moe" if single else op
    given = text_of(plain(op=op, tiles={"first": tile, "second": tile | {"split_k": 4} | changes} | single))
    if fine:
        assert table.parse(given, "t.json")[0].tiles.second.split_k == 4
        return
    with pytest.raises(ValueError, match=r"entry 0: second\.split_k 4 must be 1 for batched experts"):
        table.parse(given, "t.json")


@pytest.mark.parametrize(
    "changes, message",
    [({"split_k": 2}, "first.split_k 2 must be 1"), ({"pieces": 2}, "first.pieces 2 must be 1")],
)
def test_a_tile_that_products_of_experts_do_not_compute_by_is_told_of(changes, message):
    tile = plain()["tiles"]["tile"]
    given = plain(op="moe", tiles={"first": tile | changes, "second": tile})
    with pytest.raises(ValueError, match=r"^tuning file t.json, entry 0: ") as raised:
        table.parse(text_of(given), "t.json")
    assert message in str(raised.value)


def test_a_file_of_another_encoding_is_named(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"^tuning file .*t\.json is no UTF-8 text"):
        table.load(path)


def test_both_products_of_a_layer_have_blocks_of_as_many_rows():
    tile = plain()["tiles"]["tile"]
    wrong = plain(op="moe", tiles={"first": tile, "second": {**tile, "block_m": 128}})
    with pytest.raises(ValueError, match="entry 0: block_m is 64 of the first product, so not 128 of the second"):
        table.parse(text_of(wrong), "t.json")


def test_a_file_is_read_again_when_it_has_changed(tmp_path):
    path = tmp_path / "deep" / "t.json"
    table.save(path, [entry()])
    first = table.load(path)
    assert table.load(path) is first
    os.utime(path, ns=(1, 1))
    assert table.load(path) == first and table.load(path) is not first
    table.save(path, [entry(), entry(tokens=8)])
    assert [e.tokens for e in table.load(path)[LINEAR]] == [8, 64]
    assert list(path.parent.iterdir()) == [path]  # nothing else is left behind
    with pytest.raises(ValueError, match=r"tuning file .*none.json cannot be read: No such file"):
        table.load(tmp_path / "none.json")


def test_what_comes_with_the_package_can_be_read():
    for key, entries in table.shipped().items():
        assert key.compute_capability >= 80 and key.sm_count > 0
        assert all(0 < e.us <= e.heuristic_us for e in entries)
