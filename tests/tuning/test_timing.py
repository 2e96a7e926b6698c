"""Wall times, by a clock that a pretended device moves."""

import pytest

from pallas_kernels.tuning import timing


class Device:
    """Takes ``each`` seconds a call, and ``constant`` ones before the first and after the last of a queue."""

    def __init__(self, each: float, constant: float):
        self.now, self.each, self.constant, self.queued = 0.0, each, constant, []

    def call(self):
        self.queued.append(self.each)

    def wait(self, _):
        self.now += sum(self.queued) + self.constant
        self.queued.clear()


@pytest.mark.parametrize("each", [20e-6, 1e-3, 0.2])
def test_what_a_queue_begins_and_ends_with_is_no_calls(each, monkeypatch):
    device = Device(each, 0.3e-3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(timing.jax, "block_until_ready", device.wait)
    assert timing.wall_us(device.call) == pytest.approx(each * 1e6, rel=0.02)
    assert device.now < 12 * max(0.06, 6 * each)
