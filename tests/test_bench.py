"""What the benchmarks report."""

import json

import pytest

from bench import report

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
