"""mlxdist.train.Throughput: rates of the slowest rank, shares of a measured peak, communication exposed and hidden."""

import json
import socket

import pytest

import mlxdist
from mlxdist import train


@pytest.mark.parametrize(
    "check, ranks", [pytest.param("rates", 1, marks=pytest.mark.long), ("rates", 3), ("hidden", 2), ("refused", 2)]
)
def test_throughput(run_ranks, check, ranks):
    assert run_ranks("throughput.py", ranks, check) == [f"{check} done\n"] * ranks


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "hosts, peak",
    [
        ({"localhost": 1.25}, 1.25),
        ({f"me@{socket.gethostname().upper()}.local": 2.5, "localhost": 9.0}, 2.5),
        ({"another": 3.0}, None),
    ],
)
def test_the_peak_is_that_of_calibrate(run_ranks, tmp_path, ranks, hosts, peak):
    """Once for each host, however many ranks it has."""
    tuning = tmp_path / "tuning.json"
    measured = {name: {"tflops": tflops, "memory_gbps": 10.0} for name, tflops in hosts.items()}
    tuning.write_text(json.dumps({"schema": 2, "hosts": measured}))
    outputs = run_ranks("throughput.py", ranks, "peak", peak, environment={"MLXDIST_TUNING_FILE": str(tuning)})
    assert outputs == ["peak done\n"] * ranks


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"flops_per_token": 12}, "flops_per_token is 12, not a FlopsPerToken"),
        ({"recompute": -0.5}, "recompute is -0.5, not a share from 0 to 1"),
        ({"recompute": float("nan")}, "recompute is nan"),
        ({"peak_tflops": 0}, "peak_tflops is 0, not a number above 0"),
        ({"peak_tflops": float("inf")}, "peak_tflops is inf"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(mlxdist.InvalidArgument, match=text):
        train.Throughput(**arguments)


def test_bad_steps():
    throughput = train.Throughput(peak_tflops=1.0)
    for tokens in (-1, 1.5, True):
        with pytest.raises(mlxdist.InvalidArgument, match="tokens is"):
            with throughput.step(tokens=tokens):
                pass
    with pytest.raises(mlxdist.InvalidArgument, match="repeats is 0"):
        throughput.measure_compute(lambda: None, repeats=0)
