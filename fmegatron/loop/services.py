"""Loggers of services: TensorBoard, Weights & Biases, MLflow and OpenTelemetry, each by its own package.

    --run.log.to=tensorboard,mlflow=http://host:5000      # loop.Log(to=("tensorboard", "mlflow=http://host:5000"))

The packages are optional (the extra `logs`) and are imported at the first write. With other settings than those of a
flag, give them to `Run` as `policies=Policies(loggers=[...])`. A run that is resumed gives each of them the step from
which it goes on.
"""

import importlib.util
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from fmegatron.tree import structure

# What a flag calls a service, and the package that it needs.
SERVICES = MappingProxyType(
    {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "opentelemetry": "opentelemetry"}
)


def check_services(names: Sequence[str]) -> None:
    """ValueError for what names no service: NAME or NAME=PLACE, each once."""
    for text in names:
        name = text.partition("=")[0]
        if name not in SERVICES or sum(one.partition("=")[0] == name for one in names) > 1:
            near = structure.did_you_mean(name, list(SERVICES))
            raise ValueError(
                f"Log.to: got {text!r:.60}, wanted each once of {', '.join(SERVICES)}, or NAME=PLACE{near}"
            )


def loggers_of(names: Sequence[str], folder: Path) -> tuple[Any, ...]:
    """The loggers of a run by their names. PLACE is the folder of tensorboard (default FOLDER/tensorboard), the project
    of wandb (fmegatron; the run is called as its folder), the store of mlflow (a file FOLDER/mlflow.db) and the file of
    opentelemetry (none: the providers that the process has set up).

    ValueError for a service whose package is not installed.
    """
    found = []
    for text in names:
        name, _, place = text.partition("=")
        if importlib.util.find_spec(SERVICES[name]) is None:
            raise _missing(f"--run.log.to={text}", SERVICES[name])
        if name == "tensorboard":
            found.append(TensorBoard(place or folder / "tensorboard"))
        if name == "wandb":
            own = xxhash.xxh3_64(os.path.abspath(folder).encode()).hexdigest()  # the same when the run goes on
            found.append(
                WeightsAndBiases(
                    project=place or "fmegatron", name=folder.name, id=own, resume="allow", dir=str(folder)
                )
            )
        if name == "mlflow":
            found.append(MLflow(place or f"sqlite:///{os.path.abspath(folder)}/mlflow.db", name=folder.name))
        if name == "opentelemetry":
            found.append(OpenTelemetry(place or None))
    return tuple(found)


def _missing(service: str, package: str) -> ValueError:
    return ValueError(f"{service}: got no package {package}, wanted it installed; pip install 'fmegatron[logs]'")


class TensorBoard:
    """Scalars for TensorBoard in `directory`; events after step `after` are purged. Needs the extra `logs`.

    after: None: the step that a `Run` goes on from.
    """

    def __init__(self, directory: str | os.PathLike, after: int | None = None):
        self.directory, self.after, self._given, self._writer = str(directory), after, after is not None, None

    def resume(self, step: int) -> None:
        """The run goes on behind `step`, unless `after` was given."""
        self.after = self.after if self._given else step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add each value as a scalar of its name."""
        if self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise _missing("TensorBoard", "tensorboard") from error
            self._writer = SummaryWriter(self.directory, purge_step=self.after + 1 if self.after else None)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """A run of Weights & Biases; keywords go to `wandb.init` (project, id, resume, ...). Needs the extra `logs`.

    W&B drops what is logged for a step below the newest one, which is what a resumed run does when it goes back to a
    checkpoint. So its own counter only counts records, and "step" is a metric over which all others are drawn. Records
    that are made again are in the run twice; those of a resumed run have "resumed_from" beside them.
    """

    def __init__(self, **settings):
        self.settings, self._run, self._from = settings, None, 0

    def resume(self, step: int) -> None:
        """The run goes on behind `step`."""
        self._from = step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values, and `step` beside them."""
        if self._run is None:
            try:
                import wandb
            except ImportError as error:
                raise _missing("WeightsAndBiases", "wandb") from error
            self._run = wandb.init(**self.settings)
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        self._run.log({**values, "step": step, **({"resumed_from": self._from} if self._from else {})})

    def close(self) -> None:
        """Finish the run. Its service process may write for some seconds more."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow:
    """Metrics of an MLflow run, with their steps; in a database file or on a server. Needs the extra `logs`.

    uri: of the tracking store, such as "sqlite:///runs/mlflow.db" or "http://host:5000". experiment: its name. run_id:
    of a run that goes on; None: a new one, whose id is then `self.run_id`. A run that is resumed goes on in the run of
    the same name of this experiment. tags: texts.
    MLflow keeps what was logged for a step before: such a step then has two values, the later one with a later time.
    Characters that it does not take in names become "_".
    """

    def __init__(
        self,
        uri: str,
        experiment: str = "fmegatron",
        run_id: str | None = None,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ):
        self.uri, self.experiment, self.run_id, self.name, self.tags = uri, experiment, run_id, name, dict(tags or {})
        self._client: Any = None
        self._from = 0

    def resume(self, step: int) -> None:
        """The run goes on behind `step`."""
        self._from = step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at `step`, in one batch."""
        try:
            from mlflow.entities import Metric
        except ImportError as error:
            raise _missing("MLflow", "mlflow") from error
        if self._client is None:
            self._client = self._open()
        now = int(time.time() * 1000)
        names = {name: re.sub(r"[^\w\-. :/]", "_", name)[:250] for name in values}
        metrics = [Metric(names[name], float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _open(self) -> Any:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        if self.run_id is None and self._from and self.name is not None:
            same = (run for run in client.search_runs([experiment]) if run.info.run_name == self.name)  # newest first
            self.run_id = next((run.info.run_id for run in same), None)
        if self.run_id is None:
            self.run_id = client.create_run(experiment, run_name=self.name, tags=self.tags).info.run_id
        if self._from:
            client.set_tag(self.run_id, "fmegatron.resumed_from", str(self._from))
        client.update_run(self.run_id, status="RUNNING")
        return client

    def close(self) -> None:
        """Mark the run as finished."""
        if self._client is not None:
            self._client.set_terminated(self.run_id)
            self._client = None


class OpenTelemetry:
    """Metrics and spans by OpenTelemetry. Needs the extra `logs`.

    Each number is a gauge "fmegatron.NAME", and "fmegatron.step" another, as back ends want few series: the step is no
    attribute of them; the SDK refuses numbers that are not finite, which only the spans have. Each record is a span as
    well, with step and numbers as its attributes: "train" from the record before to this one, "save" and "restore" over
    their own seconds, "evaluate" for what is left.

    Args:
        path: a file to which the SDK writes metrics and spans as JSON; None: the providers that the process has set up
            (such as `opentelemetry-instrument` with OTEL_EXPORTER_OTLP_ENDPOINT).
        attributes: of the resource that a file names, or of every span and value; texts.
    """

    def __init__(self, path: str | os.PathLike | None = None, **attributes: str):
        self.path, self.attributes = None if path is None else Path(path), attributes
        self._meter: Any = None
        self._tracer: Any = None
        self._gauges: dict[str, Any] = {}
        self._close: list[Any] = []
        self._before = time.time_ns()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges, and end a span that has the values as attributes."""
        meter = self._meter = self._meter or self._open()
        now = time.time_ns()
        for name, value in {"step": step, **values}.items():
            if name not in self._gauges:
                self._gauges[name] = meter.create_gauge(f"fmegatron.{_instrument(name)}")
            if math.isfinite(value):
                self._gauges[name].set(float(value), self.attributes)
        name, seconds = _span(values)
        began = self._before if seconds is None else now - int(1e9 * max(0.0, seconds))
        own = {**self.attributes, "step": step, **{key: float(value) for key, value in values.items()}}
        self._tracer.start_span(name, start_time=began, attributes=own).end(end_time=now)
        self._before = now

    def _open(self) -> Any:
        """The meter; sets the tracer, too."""
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise _missing("OpenTelemetry", "opentelemetry-sdk") from error
        if self.path is None:
            self._tracer = trace.get_tracer("fmegatron")
            return metrics.get_meter("fmegatron")
        try:
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
        except ImportError as error:
            raise _missing("OpenTelemetry", "opentelemetry-sdk") from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a")
        resource = Resource.create({"service.name": "fmegatron", **self.attributes})

        def one_line(item: Any) -> str:
            return item.to_json(indent=None) + "\n"

        reader = PeriodicExportingMetricReader(ConsoleMetricExporter(file, one_line))
        meters, tracers = MeterProvider([reader], resource), TracerProvider(resource=resource)
        tracers.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=file, formatter=one_line)))
        self._tracer = tracers.get_tracer("fmegatron")
        self._close = [meters.shutdown, tracers.shutdown, file.close]
        return meters.get_meter("fmegatron")

    def close(self) -> None:
        """Write what is pending, and close the file."""
        for close in self._close:
            close()
        self._meter, self._tracer, self._gauges, self._close = None, None, {}, []


def _instrument(name: str) -> str:
    """A name that OpenTelemetry takes: letters, digits and _ . - /, at most 255."""
    return re.sub(r"[^A-Za-z0-9_.\-/]", "_", name)[:240]


def _span(values: Mapping[str, float]) -> tuple[str, float | None]:
    """(name of a record's span, its seconds; None: since the record before)."""
    for what in ("save", "restore"):
        if f"{what}_seconds" in values:
            return what, float(values[f"{what}_seconds"])
    return ("train", None) if "seconds" in values else ("evaluate", None)
