"""Alignment against a plain count in NumPy, and what it becomes for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import align as al


def expected(
    ids: np.ndarray, experts: int, rows: int, expert_map: np.ndarray | None = None
) -> list[tuple[int, list[int]]]:
    """(expert, its slots) of each block, padding left out."""
    blocks = []
    local = [
        expert_map[i] if expert_map is not None and 0 <= i < len(expert_map) else -1 if expert_map is not None else i
        for i in ids.reshape(-1)
    ]
    for expert in range(experts):
        slots = [s for s, i in enumerate(local) if i == expert]
        blocks += [(expert, slots[b : b + rows]) for b in range(0, len(slots), rows)]
    return blocks


def found(blocks: al.Blocks, rows: int, padding: int) -> list[tuple[int, list[int]]]:
    used = int(blocks.used[0])
    listed = np.asarray(blocks.slots)[: used * rows].reshape(used, rows).tolist()
    return [
        (int(e), [s for s in slots if s != padding]) for e, slots in zip(blocks.experts[:used], listed, strict=True)
    ]


def aligned(
    ids: np.ndarray, experts: int, rows: int, expert_map: np.ndarray | None = None
) -> list[tuple[int, list[int]]]:
    run = jax.jit(lambda i, m: al.align(i, experts=experts, rows=rows, expert_map=m, interpret=True))
    blocks = run(jnp.asarray(ids, jnp.int32), None if expert_map is None else jnp.asarray(expert_map, jnp.int32))
    return found(blocks, rows, ids.size)


def test_slots_follow_each_other_by_expert_in_whole_blocks():
    # Slots 0..5 choose experts 2 0 | 2 1 | 2 2; with blocks of 16, one block an expert.
    ids = np.array([[2, 0], [2, 1], [2, 2]])
    assert aligned(ids, experts=4, rows=16) == [(0, [1]), (1, [3]), (2, [0, 2, 4, 5])]


@pytest.mark.parametrize("launches, tokens, experts", [(1, 37, 1), (1, 37, 40), (2, 2100, 5), (2, 2100, 40)])
def test_any_routing_is_a_partition_of_its_slots(launches, tokens, experts):
    rng = np.random.default_rng(tokens + experts)
    ids = rng.integers(-1, experts + 1, (tokens, 2))  # -1 and E are nobody's
    assert len(al.align_chain(jnp.asarray(ids), experts=experts, rows=16)) == launches
    assert aligned(ids, experts, rows=16) == expected(ids, experts, 16)


@pytest.mark.parametrize("tokens", [1, 3, 2060])
def test_f11_every_slot_may_choose_the_same_expert(tokens):
    ids = np.full((tokens, 4), 3)
    assert aligned(ids, experts=8, rows=16) == expected(ids, 8, 16)


@pytest.mark.parametrize("tokens", [2, 1030])
def test_no_slot_with_an_expert_makes_no_block(tokens):
    assert aligned(np.full((tokens, 4), -1), experts=3, rows=16) == []


@pytest.mark.parametrize("tokens", [3, 2100])
def test_g01_a_map_drops_what_is_elsewhere_and_never_wraps(tokens):
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, 9, (tokens, 2))
    # Expert 5 of six is here as 1, expert 0 as 0; the map's last entry must not be found by -1.
    expert_map = np.array([0, -1, -1, -1, -1, 1])
    assert aligned(ids, 2, 16, expert_map) == expected(ids, 2, 16, expert_map)


def test_the_bound_on_blocks_is_reached_and_never_exceeded():
    # 7 slots, 3 experts, blocks of 2: counts 5, 1, 1 need 3 + 1 + 1 blocks.
    assert al.max_blocks(7, 3, 2) == 5
    worst = max(sum(-(-c // 2) for c in (a, b, 7 - a - b)) for a in range(8) for b in range(8 - a))
    assert worst == 5
    assert al.max_blocks(2, 3, 2) == 2
