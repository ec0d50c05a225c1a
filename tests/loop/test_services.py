"""The loggers of services against the real packages, which write into local files that are read back."""

import json
import math
import os
import struct
import sys
import time

import pytest

from fmegatron.loop import Log, Loggers, TensorBoard, WeightsAndBiases
from fmegatron.loop.services import MLflow, OpenTelemetry, loggers_of

WHY = "the extra `logs` is not installed; `make test-all` installs it"
NUMBERS = {"loss": 2.0, "odd name: a/b?": math.inf}


def twice(logger_of, **names):
    """Steps 1 to 3, and a resume behind step 1."""
    with Loggers(logger_of()) as log:
        for step in (1, 2, 3):
            log(step, {"loss": float(step), "seconds": 0.01, **NUMBERS} if step == 1 else {"loss": float(step)})
        log(3, {"save_seconds": 0.5})
    with Loggers(logger_of(), after=1) as log:
        log(2, {"loss": 20.0, "seconds": 0.01})
        log(3, {"loss": 30.0})


def test_services_that_are_not_installed_are_named(monkeypatch, tmp_path):
    for name in ("wandb", "torch.utils.tensorboard", "mlflow", "mlflow.entities", "opentelemetry"):
        monkeypatch.setitem(sys.modules, name, None)
    services = WeightsAndBiases(project="x"), TensorBoard("/nowhere"), MLflow("sqlite:////nowhere"), OpenTelemetry()
    for logger in services:
        with pytest.raises(ValueError, match=r"got no package .*; pip install 'fmegatron\[logs\]'"):
            logger.write(1, {"loss": 1.0})
        logger.close()


def test_services_by_name(tmp_path, monkeypatch):
    """As a flag names them; what is unknown, named twice or not installed is an error with its fix."""
    for names, words in ((("tensorbord",), "did you mean tensorboard"), (("wandb", "wandb=b"), "wanted each once of")):
        with pytest.raises(ValueError, match=words):
            Log(to=names)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"--run.log.to=wandb=b: got no package wandb, .*pip install 'fmegatron\[logs\]"
    ):
        loggers_of(("wandb=b",), tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    names = "tensorboard", "wandb", "mlflow", "opentelemetry"
    board, wandb, mlflow, telemetry = loggers_of(names, tmp_path / "a")
    assert board.directory == str(tmp_path / "a" / "tensorboard") and telemetry.path is None
    assert (mlflow.uri, mlflow.name) == (f"sqlite:///{tmp_path / 'a'}/mlflow.db", "a")
    assert wandb.settings["project"] == "fmegatron" and wandb.settings["dir"] == str(tmp_path / "a")
    board, again, mlflow, telemetry = loggers_of([f"{name}={tmp_path / 'x'}" for name in names], tmp_path / "a")
    assert board.directory == mlflow.uri == str(telemetry.path) == again.settings["project"] == str(tmp_path / "x")
    assert again.settings["id"] == wandb.settings["id"]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason=WHY)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    twice(lambda: TensorBoard(tmp_path))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = {event.step: event.value for event in read.Scalars("loss")}
    assert found == {1: 2.0, 2: 20.0, 3: 30.0}  # what the resume repeats is purged
    assert len(read.Scalars("loss")) == 3
    assert read.Scalars("odd name: a/b?")[0].value == math.inf


def wandb_records(path):
    """The raw records of a .wandb file: a LevelDB log, behind 7 bytes of its own."""
    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        chunk, at = data[at + 7 : at + 7 + size], at + 7 + size
        part = chunk if kind in (1, 2) else part + chunk
        if kind in (1, 4):
            yield part


def wandb_history(folder):
    from wandb.proto import wandb_internal_pb2 as pb

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for raw in wandb_records(path):
            record = pb.Record()
            record.ParseFromString(raw)
            if record.WhichOneof("record_type") == "history":
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason=WHY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    twice(lambda: WeightsAndBiases(project="p", dir=str(tmp_path)))
    until, rows = time.monotonic() + 60, []
    while len(rows) < 6 and time.monotonic() < until:  # its service writes after finish() has returned
        time.sleep(0.2)
        rows = wandb_history(tmp_path)
    losses = [(row["step"], row["loss"], row.get("resumed_from")) for row in rows if "loss" in row]
    assert losses == [(1, 2.0, None), (2, 2.0, None), (3, 3.0, None), (2, 20.0, 1), (3, 30.0, 1)]
    assert [row for row in rows if "save_seconds" in row][0]["step"] == 3


def test_a_wandb_run_that_goes_back_drops_nothing(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason=WHY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Loggers(WeightsAndBiases(project="p", dir=str(tmp_path))) as log:
        for step in (5, 5, 3):
            log(step, {"loss": float(step)})
    until = time.monotonic() + 60
    while len(rows := wandb_history(tmp_path)) < 3 and time.monotonic() < until:
        time.sleep(0.2)
    assert [row["step"] for row in rows] == [5, 5, 3]


@pytest.mark.filterwarnings("ignore")  # of MLflow about its own use of SQLAlchemy
def test_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason=WHY)
    pytest.importorskip("sqlalchemy", reason=WHY)
    from mlflow.tracking import MlflowClient

    uri, made = f"sqlite:///{tmp_path / 'mlflow.db'}", []

    def logger():
        made.append(MLflow(uri, name="it's a run", tags={"mesh": "tp2"}))
        return made[-1]

    twice(logger)
    assert made[0].run_id == made[1].run_id is not None
    client = MlflowClient(tracking_uri=uri)
    history = [(m.step, m.value) for m in client.get_metric_history(made[0].run_id, "loss")]
    assert sorted(history) == [(1, 2.0), (2, 2.0), (2, 20.0), (3, 3.0), (3, 30.0)]
    run = client.get_run(made[0].run_id)
    assert run.data.tags["mesh"] == "tp2" and run.data.tags["fmegatron.resumed_from"] == "1"
    assert run.info.status == "FINISHED" and "odd name: a/b_" in run.data.metrics


def test_opentelemetry(tmp_path):
    pytest.importorskip("opentelemetry.sdk", reason=WHY)
    path = tmp_path / "otel.jsonl"
    twice(lambda: OpenTelemetry(path, run="a"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    spans = [line for line in lines if "context" in line]
    steps = [(span["name"], span["attributes"]["step"], span["attributes"].get("loss")) for span in spans]
    assert steps == [
        ("train", 1, 2.0),
        ("evaluate", 2, 2.0),
        ("evaluate", 3, 3.0),
        ("save", 3, None),
        ("train", 2, 20.0),
        ("evaluate", 3, 30.0),
    ]
    assert all(span["start_time"] <= span["end_time"] for span in spans)
    gauges = {}
    for line in lines:
        for part in line.get("resource_metrics", ()):
            assert part["resource"]["attributes"]["run"] == "a"
            for metric in (m for scope in part["scope_metrics"] for m in scope["metrics"]):
                gauges.setdefault(metric["name"], []).append([p["value"] for p in metric["data"]["data_points"]])
    assert gauges["fmegatron.loss"][-1] == [30.0] and gauges["fmegatron.step"][-1] == [3.0]
    assert "fmegatron.odd_name__a/b_" not in gauges  # the SDK refuses what is not finite
    assert spans[0]["attributes"]["odd name: a/b?"] == math.inf
    assert os.listdir(tmp_path) == ["otel.jsonl"]
