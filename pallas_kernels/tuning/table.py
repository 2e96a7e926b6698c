"""Tiles that were measured: JSON files of entries by operation, shapes and device facts; pure functions, no GPU needed.

    {"format": 1, "entries": [{
      "compute_capability": 90, "sm_count": 132,
      "op": "moe", "recipe": "fp8_block", "accumulation": "exact", "dtype": "bfloat16",
      "hidden": 7168, "intermediate": 256, "experts": 256, "top_k": 8, "gated": true,
      "tokens": 512,
      "tiles": {"first": {"block_m": 64, ...}, "second": {"block_m": 64, ...}, "single": false},
      "us": 430.1, "heuristic_us": 494.0, "date": "2026-11-30", "jax": "0.11.2"}]}

A linear has "features" instead of the experts' sizes, and one "tile". A device is known by its facts, not by its name:
an H100 with as many multiprocessors as an H200 takes the same entries.
"""

import dataclasses
import functools
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.tuning.heuristics import MatmulTile
from pallas_kernels.tuning.moe_heuristics import MoETiles

FORMAT = 1

OPS = ("linear", "moe", "batched_experts")
_ACCUMULATIONS = ("exact", "fast")
_DTYPES = ("bfloat16", "float16", "float32")

NEAREST = 2
"""A tile serves row counts up to so many times more or fewer than those that it was measured at."""

_FEW_ROWS = 64
"""Most rows of a linear that one block of them holds: its tile serves no more rows than it was measured at."""

_NEAREST_LINEAR = 1.25
"""``NEAREST`` for more rows of a linear, where heuristics count the waves of its programs."""

Tiles = MatmulTile | MoETiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """All that a tile depends on but the row count.

    Attributes:
      compute_capability: times ten.
      sm_count: streaming multiprocessors.
      op: "linear", "moe" or "batched_experts".
      recipe: its name, with options.
      accumulation: "exact" or "fast".
      dtype: of x before it is quantised, by name.
      hidden: K of the (first) product.
      features: N of a linear.
      intermediate, experts, top_k: I, E and k of experts.
      gated: w13 has two halves.
    """

    compute_capability: int
    sm_count: int
    op: str
    recipe: str
    accumulation: str
    dtype: str
    hidden: int
    features: int = 0
    intermediate: int = 0
    experts: int = 0
    top_k: int = 0
    gated: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The fastest tiles found for a row count.

    Attributes:
      key: of what.
      tokens: the row count: M, T, or rows an expert of batched_experts.
      tiles: of a linear's product, or of a layer's two.
      us: microseconds measured with them; ``heuristic_us``, with the heuristic's in the same run.
      date: of the measurement, as YYYY-MM-DD.
      jax: its version.
    """

    key: Key
    tokens: int
    tiles: Tiles
    us: float
    heuristic_us: float
    date: str
    jax: str


Table = Mapping[Key, tuple[Entry, ...]]
"""Entries of a key, by ascending row count."""


def table(entries: Iterable[Entry]) -> Table:
    """A table of entries; of two for the same key and row count the later one counts."""
    found: dict[Key, dict[int, Entry]] = {}
    for entry in entries:
        found.setdefault(entry.key, {})[entry.tokens] = entry
    return {key: tuple(rows[tokens] for tokens in sorted(rows)) for key, rows in found.items()}


def nearest(entries: Iterable[Entry], tokens: int) -> Entry | None:
    """The entry whose row count is the nearest by ratio, and at most ``NEAREST`` times off; of two the larger.

    What works a slot at a time serves no more tokens than it was measured at: its time grows with each. Nor does a
    linear's tile of few rows, whose blocks more rows would need two of; one of many rows serves few others.
    """
    if tokens < 1:
        return None

    def distance(entry: Entry) -> tuple[float, int]:
        return abs(math.log(entry.tokens / tokens)), -entry.tokens

    return min((entry for entry in entries if _serves(entry, tokens)), key=distance, default=None)


def _serves(entry: Entry, tokens: int) -> bool:
    is_linear = entry.key.op == "linear"
    few = is_of_few(entry) or (is_linear and entry.tokens <= _FEW_ROWS)
    factor = _NEAREST_LINEAR if is_linear and not few else NEAREST
    fewer, more = sorted((entry.tokens, tokens))
    return more <= factor * fewer and (tokens <= entry.tokens or not few)


def is_single(entry: Entry) -> bool:
    """Whether its tiles work a slot at a time."""
    return isinstance(entry.tiles, MoETiles) and entry.tiles.single


def is_of_few(entry: Entry) -> bool:
    """Whether its tiles are such as only few tokens have: a slot at a time, or K of experts in shares."""
    return isinstance(entry.tiles, MoETiles) and (entry.tiles.single or entry.tiles.second.split_k > 1)


@functools.cache
def shipped() -> Table:
    """The entries that come with the package."""
    folder = Path(__file__).parent / "data"
    return table(entry for path in sorted(folder.glob("*.json")) for entry in parse(path.read_text(), str(path)))


def load(path: str | Path) -> Table:
    """A file's entries, read again when its time or size has changed.

    Raises:
      ValueError: there is no such file, or it is no table; the message names file and entry.
    """
    try:
        status = os.stat(path)
        return _load(str(path), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ValueError(f"tuning file {path} cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=16)
def _load(path: str, mtime_ns: int, size: int) -> Table:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tuning file {path} is no UTF-8 text: {error}") from error
    return table(parse(text, path))


def parse(text: str, name: str) -> list[Entry]:
    """The entries of a file's text.

    Raises:
      ValueError: what is wrong, with the file's ``name`` and the number of the entry, counted from 0.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tuning file {name} is no JSON: {error}") from error
    given = content if isinstance(content, dict) else {}
    version, entries = given.get("format"), given.get("entries")
    if type(version) is not int or version != FORMAT or not isinstance(entries, list) or len(given) != 2:
        raise ValueError(f'tuning file {name} must hold {{"format": {FORMAT}, "entries": [...]}}')
    found = []
    for number, entry in enumerate(entries):
        try:
            found.append(_entry(entry))
        except ValueError as error:
            raise ValueError(f"tuning file {name}, entry {number}: {error}") from error
    return found


def _entry(given: Any) -> Entry:
    fields = {field.name for field in dataclasses.fields(Key)}
    others = {field.name for field in dataclasses.fields(Entry)} - {"key"}
    given = _object("it", given, fields | others, fields - _OPTIONAL | others)
    for field in dataclasses.fields(Key):
        if field.name in given:
            _check(field.name, given[field.name], field.type)
    for name, known in (("op", OPS), ("accumulation", _ACCUMULATIONS), ("dtype", _DTYPES)):
        if given[name] not in known:
            raise ValueError(f"{name} {given[name]!r} must be one of {', '.join(known)}")
    _check("tokens", given["tokens"], int, least=1)
    for name in ("us", "heuristic_us"):
        _check(name, given[name], float)
    for name in ("date", "jax"):
        _check(name, given[name], str)
    key = Key(**{name: given[name] for name in fields if name in given})
    tiles = _linear_tiles(given["tiles"]) if key.op == "linear" else _moe_tiles(given["tiles"], key.op)
    return Entry(key=key, tiles=tiles, **{name: given[name] for name in others - {"tiles"}})


_OPTIONAL = {field.name for field in dataclasses.fields(Key) if field.default is not dataclasses.MISSING}


def _linear_tiles(given: Any) -> MatmulTile:
    tile = _tile("tile", _object("tiles", given, {"tile"}, {"tile"})["tile"])
    _check_extents("tile", tile)
    return tile


def _check_extents(name: str, tile: MatmulTile) -> None:
    for key in ("block_m", "block_n", "block_k"):
        if getattr(tile, key) < _LEAST:
            raise ValueError(f"{name}.{key} {getattr(tile, key)} must be at least {_LEAST}, as a dot wants")
    if tile.block_n // tile.pieces < _LEAST:
        raise ValueError(f"{name}.pieces {tile.pieces} leaves less than {_LEAST} of block_n {tile.block_n}")


def _moe_tiles(given: Any, op: str) -> MoETiles:
    fields = {field.name: field for field in dataclasses.fields(MoETiles)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    found = dict(_object("tiles", given, set(fields), needed))
    for name, value in found.items():
        if fields[name].type is bool:
            _check(name, value, bool)
        else:
            found[name] = _tile(name, value)
    tiles = MoETiles(**found)
    for name, tile in (("first", tiles.first), ("second", tiles.second)):
        if not tiles.single:
            _check_extents(name, tile)
    if tiles.first.split_k != 1:
        raise ValueError(f"first.split_k {tiles.first.split_k} must be 1: activations are of whole sums")
    if tiles.second.split_k != 1 and (op != "moe" or tiles.single or tiles.second.run != 1):
        raise ValueError(
            f"second.split_k {tiles.second.split_k} must be 1 for batched experts, single slots and runs of tiles"
        )
    if tiles.first.pieces != 1:
        raise ValueError(f"first.pieces {tiles.first.pieces} must be 1: its halves are pieces already")
    if tiles.first.block_m != tiles.second.block_m:
        raise ValueError(
            f"block_m is {tiles.first.block_m} of the first product, so not {tiles.second.block_m} of the second"
        )
    return tiles


_LEAST = 16
"""Of a dot's extents."""

_MOST = 2**20
"""Elements of a tile that Triton takes, and more tiles than there ever are."""

_MOST_PARTS = 64
"""Of K, each of which the kernel that adds them up reads."""

_POWERS_OF_TWO = ("block_m", "block_n", "block_k", "num_warps", "split_k", "pieces", "short")


def _tile(name: str, given: Any) -> MatmulTile:
    fields = {field.name: field for field in dataclasses.fields(MatmulTile)}
    needed = {key for key, field in fields.items() if field.default is dataclasses.MISSING}
    given = _object(name, given, set(fields), needed)
    for key, value in given.items():
        kind = bool if key == "swap" else int
        _check(f"{name}.{key}", value, kind, least=0 if key == "short" else 1)
        if key in _POWERS_OF_TWO and value & (value - 1):
            raise ValueError(f"{name}.{key} {value} must be a power of two")
    tile = MatmulTile(**given)
    if max(tile.block_m * tile.block_n, tile.block_m * tile.block_k, tile.block_n * tile.block_k) > _MOST:
        raise ValueError(f"{name} {tile} has more than {_MOST} elements, which Triton does not take")
    if 0 < tile.short < _LEAST:
        raise ValueError(f"{name}.short {tile.short} must be 0 or at least {_LEAST}")
    if tile.short >= tile.block_m:
        raise ValueError(f"{name}.short {tile.short} must be below block_m, {tile.block_m}")
    if tile.split_k > _MOST_PARTS:
        raise ValueError(f"{name}.split_k {tile.split_k} must be at most {_MOST_PARTS}")
    if max(tile.run, tile.group) > _MOST:
        raise ValueError(f"{name}.run {tile.run} and {name}.group {tile.group} must be at most {_MOST}")
    if tile.num_warps > 32 or tile.num_stages > 16 or tile.pieces > tile.block_n:
        raise ValueError(f"{name} {tile} is none that a GPU runs")
    return tile


def _object(name: str, given: Any, known: set[str], needed: set[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} must be an object, not {given!r}")
    for problem, names in (("unknown", set(given) - known), ("missing", needed - set(given))):
        if names:
            raise ValueError(f"{name} has {problem} {', '.join(sorted(names))}")
    return given


def _check(name: str, value: Any, kind: Any, least: int = 0) -> None:
    right = type(value) is kind or (kind is float and type(value) is int)
    if not right or (kind in (int, float) and not least <= value < math.inf):
        least_text = f" of at least {least}" if kind in (int, float) else ""
        raise ValueError(f"{name} is {value!r}, but it is {_KINDS[kind]}{least_text}")


_KINDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def dumps(entries: Iterable[Entry]) -> str:
    """The text of a file, a line an entry, which ``parse`` takes."""
    lines = [json.dumps(_plain(entry)) for entry in entries]
    return f'{{"format": {FORMAT}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def _plain(entry: Entry) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, part in parts(entry.tiles):
        plain[name] = _without_defaults(part) if isinstance(part, MatmulTile) else part
    rest = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry) if f.name not in ("key", "tiles")}
    return {**_without_defaults(entry.key), "tokens": rest.pop("tokens"), "tiles": plain, **rest}


def parts(tiles: Tiles) -> tuple[tuple[str, Any], ...]:
    """Names and values of what tiles consist of: a linear's "tile", or the fields of a layer's."""
    if isinstance(tiles, MatmulTile):
        return (("tile", tiles),)
    return tuple((field.name, getattr(tiles, field.name)) for field in dataclasses.fields(tiles))


def _without_defaults(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if getattr(value, f.name) != f.default}


def save(path: str | Path, entries: Iterable[Entry]) -> None:
    """Writes a file in one go: an interrupted run leaves the old one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(dumps(entries))
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)
