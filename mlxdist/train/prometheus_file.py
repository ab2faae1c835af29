"""Metrics of a training in Prometheus' text format, as a file for the textfile collector of node_exporter."""

from pathlib import Path
from typing import Any

from mlxdist.base import logger
from mlxdist.base.atomic_file import atomic_write
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.prometheus import Registry

__all__ = ["PrometheusFile"]

# By the names in reports: the name, the factor to Prometheus' base units, and the help text.
_GAUGES = {
    "train_loss": ("loss", 1.0, "Mean loss of the steps since the report before."),
    "val_loss": ("validation_loss", 1.0, "Mean loss of the last validation."),
    "learning_rate": ("learning_rate", 1.0, "Learning rate of the last step."),
    "grad_norm": ("grad_norm", 1.0, "Norm of all gradients of the last step, before it is clipped."),
    "iterations_per_second": ("iterations_per_second", 1.0, "Batches in a second, by the slowest rank."),
    "tokens_per_second": ("tokens_per_second", 1.0, "Targets of all ranks in a second, by the slowest rank."),
    "peak_memory": ("peak_memory_bytes", 1e9, "Most memory that MLX has used so far, on the rank with the most."),
    "communication": ("communication_ratio", 1.0, "Share of the steps in operations of groups, mean of the ranks."),
    "waiting": ("waiting_ratio", 1.0, "Share of the steps waiting in these for other ranks, mean of the ranks."),
    "saving": ("saving_ratio", 1.0, "Share of the time since the report before that the steps waited for saves."),
    "tflops": ("flops_per_second", 1e12, "FLOPs of the model in a second, of all ranks together."),
    "mfu": ("mfu_ratio", 1.0, "Model FLOPs utilization: its share of the peak."),
    "hfu": ("hfu_ratio", 1.0, "Hardware FLOPs utilization, with what gradient checkpointing repeats."),
}


class PrometheusFile:
    """A callback of mlx-lm that keeps the last values of the reports in a file, replaced atomically with each. A value
    that is not known is not in it.

    Args:
        path: the file, in a directory that exists. The textfile collector reads those that end in ".prom".
        project: the label ``project`` of all metrics, which two trainings on one host need; "" for none.
        iteration: the one from which the training goes on.
        iterations_per_step: how many are a step of the optimizer.

    Raises:
        InvalidArgument: the file cannot be written.
    """

    def __init__(self, path: str | Path, project: str, iteration: int, iterations_per_step: int) -> None:
        self._path, self._per_step = Path(path), iterations_per_step
        self._labels = {"project": project} if project else {}
        self._registry = Registry("mlxdist_train")
        self._gauges: dict[str, Any] = {}
        self._tokens = self._labeled(self._registry.counter, "tokens", "Targets trained on since the start.")
        self._trained_tokens = 0
        self._save_seconds = self._labeled(
            self._registry.counter, "save_seconds", "Seconds for which the steps have waited for saves since the start."
        )
        self._has_warned = False
        self._set_step(iteration)
        try:
            atomic_write(self._path, self._registry.text())
        except OSError as error:
            raise InvalidArgument(f"prometheus_file: {path} cannot be written: {error.strerror}") from error

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        for name, (metric, factor, about) in _GAUGES.items():
            if name in train_info:
                self._set(metric, about, train_info[name] * factor)
        trained = train_info.get("trained_tokens", self._trained_tokens)
        self._tokens.inc(trained - self._trained_tokens)
        self._trained_tokens = trained
        self._set_step(train_info["iteration"])
        self._write()

    on_val_loss_report = on_train_loss_report

    def on_save(self, seconds: float) -> None:
        """Takes in a save, for which the steps have waited ``seconds``."""
        self._save_seconds.inc(seconds)
        self._write()

    def _set_step(self, iteration: int) -> None:
        about = "Steps of the optimizer that are done, with those before a restart."
        self._set("step", about, iteration // self._per_step)

    def _set(self, name: str, about: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._labeled(self._registry.gauge, name, about)
        self._gauges[name].set(value)

    def _labeled(self, make: Any, name: str, about: str) -> Any:
        metric = make(name, about, *self._labels)
        return metric.labels(**self._labels) if self._labels else metric

    def _write(self) -> None:
        try:
            atomic_write(self._path, self._registry.text())
        except OSError as error:  # a disk that is full must not end the training; the next report tries again
            if not self._has_warned:
                logger.warn("failure", f"prometheus_file: {self._path} is not written: {error.strerror}")
            self._has_warned = True
