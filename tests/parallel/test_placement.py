"""Which device has which expert, uneven numbers included."""

import numpy as np
import pytest

from jmoe.parallel import expert_map, experts_on


def test_experts_follow_each_other_or_are_dealt_out():
    assert experts_on(4, 2).tolist() == [[0, 1], [2, 3]]
    assert experts_on(4, 2, strategy="round_robin").tolist() == [[0, 2], [1, 3]]
    assert expert_map(4, 2).tolist() == [0, 1, 2, 3]
    assert expert_map(4, 2, strategy="round_robin").tolist() == [0, 2, 1, 3]


def test_an_uneven_number_leaves_slots_spare():
    assert experts_on(5, 3).tolist() == [[0, 1], [2, 3], [4, -1]]
    assert experts_on(5, 3, strategy="round_robin").tolist() == [[0, 3], [1, 4], [2, -1]]
    assert expert_map(5, 3, strategy="round_robin").tolist() == [0, 2, 4, 1, 3]
    assert experts_on(2, 4).tolist() == [[0], [1], [-1], [-1]]


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize("experts, devices", [(1, 1), (7, 3), (8, 8), (3, 5), (64, 6)])
def test_every_expert_is_where_the_map_says(experts, devices, strategy):
    placed = experts_on(experts, devices, strategy=strategy)
    assert placed.shape == (devices, -(-experts // devices)) and placed.dtype == np.int32
    np.testing.assert_array_equal(
        placed.reshape(-1)[expert_map(experts, devices, strategy=strategy)], np.arange(experts)
    )


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(ValueError, match="experts=0 and devices=2 must both be at least 1"):
        experts_on(0, 2)
    with pytest.raises(ValueError, match="strategy='random' must be 'linear' or 'round_robin'"):
        expert_map(4, 2, strategy="random")
    with pytest.raises(TypeError, match=r"experts=4\.0 must be an integer"):
        experts_on(4.0, 2)
    with pytest.raises(TypeError, match="experts='a' must be an integer"):
        expert_map("a", 2)
    with pytest.raises(TypeError, match="devices=True must be an integer"):
        experts_on(4, True)
