"""`prometheus_file` of `mlxdist train`, read by Prometheus' own parser. That a training writes it is in
test_trainer.py."""

import os

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxdist import InvalidArgument
from mlxdist.train.prometheus_file import PrometheusFile

INFO = {
    "iteration": 20,
    "train_loss": 2.5,
    "learning_rate": 1e-4,
    "grad_norm": 0.75,
    "tokens_per_second": 1000.0,
    "iterations_per_second": 4.0,
    "trained_tokens": 5000,
    "peak_memory": 1.5,
    "communication": 0.25,
    "waiting": 0.125,
    "saving": 0.0,
}


def read(path):
    """The values by name; each has a type, a help text, and the labels of one training."""
    families = list(text_string_to_metric_families(path.read_text()))
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert len({tuple(sample.labels.items()) for sample in samples}) == 1
    return {sample.name.removeprefix("mlxdist_train_"): sample.value for sample in samples}, samples[0].labels


def test_values_of_reports(tmp_path):
    """In Prometheus' base units; what is not known, such as MFU, is not in it. Counters count from the start."""
    path = tmp_path / "train.prom"
    file = PrometheusFile(path, "first run", 12, 4)
    assert read(path) == ({"step": 3, "tokens_total": 0, "save_seconds_total": 0}, {"project": "first run"})
    file.on_train_loss_report(INFO)
    file.on_val_loss_report({"iteration": 20, "val_loss": 2.25, "val_time": 3.0})
    file.on_save(1.5)
    expected = {
        "step": 5, "loss": 2.5, "validation_loss": 2.25, "learning_rate": 1e-4, "grad_norm": 0.75,
        "tokens_per_second": 1000, "iterations_per_second": 4, "tokens_total": 5000, "peak_memory_bytes": 1.5e9,
        "communication_ratio": 0.25, "waiting_ratio": 0.125, "saving_ratio": 0, "save_seconds_total": 1.5,
    }  # fmt: skip
    assert read(path)[0] == expected
    file.on_train_loss_report(INFO | {"iteration": 40, "trained_tokens": 8000, "mfu": 0.5, "tflops": 2.0})
    file.on_save(0.5)
    more = {"step": 10, "tokens_total": 8000, "mfu_ratio": 0.5, "flops_per_second": 2e12, "save_seconds_total": 2}
    assert read(path)[0] == expected | more
    assert [entry.name for entry in tmp_path.iterdir()] == ["train.prom"]


def test_a_file_that_cannot_be_written(tmp_path, capfd):
    """At the start that is an error; later, one warning."""
    with pytest.raises(InvalidArgument, match="prometheus_file: .*none/train.prom cannot be written: No such file"):
        PrometheusFile(tmp_path / "none" / "train.prom", "", 0, 1)
    (tmp_path / "there").mkdir()
    file = PrometheusFile(tmp_path / "there" / "train.prom", "", 0, 1)
    os.rename(tmp_path / "there", tmp_path / "elsewhere")
    for _ in range(2):
        file.on_train_loss_report(INFO)
    assert capfd.readouterr().err.count("there/train.prom is not written: No such file or directory") == 1
    os.rename(tmp_path / "elsewhere", tmp_path / "there")
    file.on_train_loss_report(INFO)
    values, labels = read(tmp_path / "there" / "train.prom")
    assert values["loss"] == 2.5 and labels == {}
