"""What the records of a run hold beside its metrics, where it comes from, and that reading it waits for nothing."""

import json
import math
import time

import pytest
import torch

from fmegatron import loop, tree
from fmegatron.data import source
from fmegatron.layout import Layout, Mesh
from fmegatron.loop import JsonLines, Log, Options, Policies, Run, Save, read_metrics
from fmegatron.loop.events import Events, read_events
from fmegatron.loop.hardware import Peak, energy_reader, measured_peak, memory_reader, of_table
from fmegatron.loop.meter import Meter, split_of
from fmegatron.loop.training import StepInfo

CPU = torch.device("cpu")
LAYOUT = Layout((4,), torch.float64, Mesh())
SPECS = {"w": tree.ArraySpec(LAYOUT, 1.0)}


def step(state, batch):
    time.sleep(0.01)
    return {"w": (state["w"] + batch) / 2}, {"loss": ((state["w"] - batch) ** 2).sum()}


@source
def batch_at(position):
    time.sleep(0.1)  # longer than all else that a step does, so that the loop waits for what is read ahead, too
    return torch.full((4,), float(position), dtype=torch.float64)


def test_a_run_records_where_its_time_goes(tmp_path):
    def evaluate(state):
        time.sleep(0.03)
        return {"heldout_loss": 1.0}

    run = Run(
        tmp_path, step, SPECS, evaluate=evaluate, options=Options(log=Log(eval_every=4, every=4), save=Save(every=4))
    )
    for _ in run(batch_at, steps=8):
        time.sleep(0.005)
    first, second, last = (record for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" in record)
    assert split_of(first).keys() == {"data", "step", "log", "save", "evaluation", "caller"}
    assert second["step"] == 4 and last["step"] == 8
    # Sleeps last at least as long as asked. What follows a log point is in the record of the next one.
    assert last["time_data"] >= 0.02 and last["time_step"] >= 0.01 and last["time_caller"] >= 0.005
    assert second["time_evaluation"] == 0 and last["time_evaluation"] >= 0.03 / 4 and last["time_save"] > 0
    assert last["seconds"] == pytest.approx(last["time_data"] + last["time_step"])
    assert last["memory_gb"] > 0.01 and "mfu" not in last  # no FLOPs were stated


def test_mfu_is_relative_to_a_named_peak():
    info = StepInfo(3, None, {"loss": 1.0}, seconds=0.5, tokens_per_second=2000.0)
    meter = Meter(CPU, ranks=4, flops_per_token=1e6, peak=Peak(1e9, "as I say"))
    assert meter.record(info)["mfu"] == 2000 * 1e6 / 4e9 == 0.5
    assert meter.about()["peak"] == "0.001 TFLOP/s, as I say" and meter.about()["ranks"] == 4
    assert "mfu" not in Meter(CPU).record(info)
    meter.measured_exposed(0.25)
    assert meter.record(info)["time_exposed"] == 0.25 and "time_exposed" not in meter.record(info)


def test_peaks():
    found = measured_peak(CPU, torch.float32, size=128)
    assert 1e6 < found.flops < 1e15 and "128 x 128 in float32" in found.source and "(measured)" in found.source
    table = {"NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835.5e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12}
    assert {name: of_table(name) for name in table} == table
    assert of_table("NVIDIA A100-SXM4-80GB") == 312e12 and of_table("NVIDIA GeForce RTX 2080") is None
    for bad in (0, -1.0, math.nan, math.inf, True, "989e12"):
        with pytest.raises(ValueError, match="Peak: flops: got"):
            Peak(bad, "x")
    with pytest.raises(ValueError, match="Meter: peak: got 1000000000000.0, wanted a Peak"):
        Meter(CPU, flops_per_token=1.0, peak=1e12)


def test_the_heap_is_that_of_the_process():
    read, what = memory_reader(CPU)
    before = read()
    kept = torch.ones(8_000_000)  # 32 MB
    grown = read() - before
    assert "heap" not in what or 31e6 < grown < 40e6, (what, grown)
    del kept
    assert energy_reader(CPU) is None


def test_json_lines_are_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path, mesh="tp2")
    log.write(1, {"loss": math.nan, "norm": -math.inf, "count": 3, "gap": torch.tensor(math.inf)})
    log.write(2, {"loss": 1.5})
    log.close()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["loss"] is None and lines[0]["nonfinite"] == {"loss": "nan", "norm": "-inf", "gap": "inf"}
    first, second = read_metrics(path)
    assert math.isnan(first["loss"]) and first["norm"] == -math.inf and first["gap"] == math.inf
    assert first["count"] == 3 and second["loss"] == 1.5 and "nonfinite" not in first
    again = JsonLines(path, after=1)
    again.write(2, {"loss": 2.5})
    again.close()
    first, second = read_metrics(path)  # what is kept is written again, and means the same
    assert math.isnan(first["loss"]) and first["gap"] == math.inf and second["loss"] == 2.5
    [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_events_are_never_rewritten(tmp_path):
    path = tmp_path / "events.jsonl"
    with Events(path) as events:
        events.started(0, mesh="tp2")
        events("saved", 3, durable=True)
    path.write_text(path.read_text() + '{"event": "sav')  # torn by a crash
    with pytest.raises(ZeroDivisionError), Events(path) as events:
        events.started(3)
        events.step = 5
        print(1 / 0)
    with Events(path, active=False) as events:
        events("saved", 9)
    found = read_events(path)
    assert [event["event"] for event in found] == ["started", "saved", "ended", "resumed", "failed"]
    assert found[-1]["error"].startswith("ZeroDivisionError") and found[-1]["step"] == 5
    assert found[0]["mesh"] == "tp2" and found[0]["pid"] and read_events(tmp_path / "none") == []


def test_a_run_that_is_left_and_one_that_fails_say_so(tmp_path):
    for _ in Run(tmp_path, step, SPECS, options=Options(save=Save(every=2)))(batch_at, steps=9):
        if _.step == 3:
            break
    with pytest.raises(RuntimeError, match="no"):
        for info in Run(tmp_path, step, SPECS, options=Options(save=Save(every=2)))(batch_at, steps=9):
            if info.step == 4:
                raise RuntimeError("no")
    kinds = [(event["event"], event["step"]) for event in read_events(tmp_path / "events.jsonl")]
    assert kinds[:3] == [("started", 0), ("saved", 2), ("left", 3)]
    assert kinds[3] == ("resumed", 2)


def test_loggers_are_told_where_a_run_goes_on(tmp_path):
    class Told:
        def __init__(self):
            self.seen = []

        def resume(self, step):
            self.seen.append(step)

        def write(self, step, values):
            self.seen.append(step)

        def close(self):
            self.seen.append("closed")

    loggers = Told(), Told()
    for logger, steps in zip(loggers, (2, 3), strict=True):
        for _ in Run(tmp_path, step, SPECS, options=Options(log=Log(every=10)), policies=Policies(loggers=[logger]))(
            batch_at, steps=steps
        ):
            pass
    assert loggers[0].seen[:2] == [0, 1] and loggers[1].seen[:2] == [2, 3] and loggers[1].seen[-1] == "closed"
    assert loop.Loggers(loggers[0], active=False).loggers == ()
