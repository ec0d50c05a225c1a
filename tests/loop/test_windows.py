"""Windows: which text names which steps, and that a trace of just those steps is written, by flag or by file."""

import gzip
import json
import types

import pytest
import torch

from fmegatron.loop import Log, Options, Run
from fmegatron.loop.events import read_events
from fmegatron.loop.windows import FILE, Window, Windows, exposed, windows
from tests.loop.test_run import SPECS, batch_at, halve


def marked(state, batch):
    with torch.profiler.record_function(f"batch {float(batch[0]):.0f}"):
        return halve(state, batch)


def steps_of(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted({event["name"] for event in events if str(event.get("name")).startswith("batch ")})


def test_a_flag_and_a_file_name_steps(tmp_path):
    wanted = "trace:steps=2-3; memory:steps=5"
    run = Run(tmp_path, marked, SPECS, options=Options(log=Log(profile=wanted, every=2)))
    for info in run(batch_at, steps=12):
        if info.step == 7:
            (tmp_path / FILE).write_text("trace:next=2,rank=0\n")  # seen at log point 8
    folder = tmp_path / "profiles"
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory_steps_00000005-00000005_rank_0.json.gz",
        "trace_steps_00000002-00000003_rank_0.json.gz",
        "trace_steps_00000009-00000010_rank_0.json.gz",
    ]
    assert steps_of(folder / "trace_steps_00000002-00000003_rank_0.json.gz") == ["batch 1", "batch 2"]
    assert steps_of(folder / "trace_steps_00000009-00000010_rank_0.json.gz") == ["batch 8", "batch 9"]
    noted = [event["path"] for event in read_events(tmp_path / "events.jsonl") if event["event"] == "profile"]
    assert noted[0] == "profiles/trace_steps_00000002-00000003_rank_0.json.gz" and len(noted) == 3


def test_a_file_that_means_nothing_is_a_warning(tmp_path):
    own = Windows(tmp_path)
    step = own.around(lambda state, batch: (state, {}), 6)
    (tmp_path / FILE).write_text("trace:steps=zwei")
    with pytest.warns(RuntimeWarning, match="got 'trace:steps=zwei', wanted KIND:steps=A-B.*nothing is observed"):
        own.look()
    step(None, None)
    (tmp_path / FILE).write_text("trace:steps=3-4")
    with pytest.warns(RuntimeWarning, match="step 7 is over"):
        own.look()
    own.look()  # unchanged: not read again
    assert own.wanted == []


def test_a_run_that_ends_inside_of_a_window_writes_it(tmp_path):
    for info in Run(tmp_path, marked, SPECS, options=Options(log=Log(profile="trace:steps=2-30")))(batch_at, steps=9):
        if info.step == 4:
            break
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["trace_steps_00000002-00000004_rank_0.json.gz"]


@pytest.mark.parametrize(
    "text", ["trace", "trace:steps=0", "trace:steps=5-3", "trace:next=0", "film:steps=1", "trace:steps=1,rank=-1",
             "trace:steps=1,next=2", "trace:steps=1,rnk=0", "trace:steps=1-2-3"]
)  # fmt: skip
def test_what_is_no_window_is_refused(text):
    with pytest.raises(ValueError, match=r"(profile|Window): got .*, wanted"):
        windows(text)
    assert windows("") == () and windows("memory:steps=4,rank=2;") == (Window(4, 4, 2, "memory"),)


def event(name, start, end, device=torch.autograd.DeviceType.CUDA):
    span = types.SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return types.SimpleNamespace(name=name, time_range=span, device_type=device)


def test_exposed_communication_is_what_no_computation_covers():
    kernels = [event("ncclKernel_AllGather", 0, 100), event("gemm", 20, 60), event("gemm2", 50, 90)]
    assert exposed(kernels) == pytest.approx(30e-6)
    assert exposed([event("gemm", 0, 9)]) is None and exposed([]) is None
    cpu = torch.autograd.DeviceType.CPU
    waits = [event("_c10d_functional::wait_tensor", 0, 7, cpu), event("aten::mm", 7, 50, cpu)]
    assert exposed(waits) == pytest.approx(7e-6)
