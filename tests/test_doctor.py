"""The doctor: what is wrong is named with rank, host and what to do; a machine in order has nothing to fix."""

import copy
import importlib.metadata
import io
import json
import runpy
import sys

import pytest

from fmegatron import doctor

GOOD = {
    "rank": 0,
    "host": "a",
    "versions": {"python": "3.12.1", "torch": "2.13.0+cpu", "numpy": "2.1.0"},
    "device": {"kind": "cuda", "name": "H100", "gb": 80.0, "free_gb": 79.0},
    "machine": {"cores": 8, "load": 0.5, "shared_free_bytes": 2**33, "open_files": 65536},
    "settings": {},
    "links": None,
    "matmul": {"right": True, "seconds": 1.0, "worst": 1.1, "tflops": 600.0, "size": 8192},
    "sum": {"right": True, "seconds": 0.01, "worst": 0.012, "gb_per_s": 100.0, "mib": 16},
}


def ranks(**changes):
    """Eight ranks on two hosts; changes: path -> {rank: value}."""
    found = [{**copy.deepcopy(GOOD), "rank": i, "host": "ab"[i // 4]} for i in range(8)]
    for path, values in changes.items():
        room, _, name = path.partition("__")
        for rank, value in values.items():
            found[rank][room][name] = value
    return found


def test_ranks_in_order_have_nothing_to_fix():
    assert doctor.verdict(ranks()) == []
    assert doctor.verdict(ranks(matmul__seconds={3: 1.2}, device__free_gb={0: 73.0})) == []


def test_what_a_gpu_could_be_given_is_a_note_and_nothing_to_fix():
    rank = copy.deepcopy(GOOD)
    rank["device"]["fp32"] = "highest"
    said = doctor.advice(rank)
    assert len(said) == 2 and "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said[0] and "TF32" in said[1]
    assert f"note       {said[0]}" in doctor._text([rank], [])
    rank["settings"]["PYTORCH_ALLOC_CONF"] = "garbage_collection_threshold:0.8,expandable_segments:True"
    rank["device"]["fp32"] = "high"
    assert doctor.advice(rank) == [] == doctor.advice({**rank, "device": {"kind": "cpu"}, "settings": {}})


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"matmul__right": {5: False}}, "rank 5 (b): a product of whole numbers is wrong"),
        ({"sum__right": {2: False}}, "rank 2 (a): the sum over all ranks is wrong"),
        ({"matmul__seconds": {6: 1.5}}, "rank 6 (b): a matrix product takes 1.50 of the median"),
        ({"matmul__seconds": {4: 1.5, 5: 1.6, 6: 1.5, 7: 1.5}}, "host b: a matrix product takes 1.60 of the median"),
        ({"versions__torch": {1: "2.12.0", 2: "2.12.0"}}, "torch differs: 2.13.0+cpu on ranks 0, 3, 4, 5, 6, 7;"),
        ({"versions__torch": dict.fromkeys(range(8), "2.9.1")}, "rank 0 (a): torch 2.9.1, wanted 2.11 or newer"),
        ({"versions__numpy": {7: None}}, "rank 7 (b): numpy is missing, wanted 1.26"),
        ({"machine__open_files": {0: 1024}}, "rank 0 (a): 1024 open files are allowed, wanted 4096; ulimit -n 4096"),
        ({"machine__shared_free_bytes": {0: 2**26}}, "rank 0 (a): 64 MiB are free in /dev/shm"),
        ({"device__free_gb": {3: 30.0}}, "rank 3 (a): 50.0 of 80.0 GB of its device are in use"),
        ({"sum__worst": {0: 0.5}}, "the sum over all ranks took 0.5 s once, 0.01 s usually"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:24],
)  # fmt: skip
def test_what_is_wrong_is_named(changes, text):
    found = doctor.verdict(ranks(**changes))
    assert any(line.startswith(text) for line in found), found


def test_this_machine(monkeypatch):
    for name in ("WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    out = io.StringIO()
    status = doctor.main(["--json", "--size=64"], out)
    found = json.loads(out.getvalue())
    assert status == (1 if found["fix"] else 0)
    (rank,) = found["ranks"]
    assert rank["matmul"]["right"] is True and rank["matmul"]["tflops"] > 0 and rank["sum"] is None
    assert rank["settings"]["NCCL_DEBUG"] == "WARN" and "hidden" not in out.getvalue()
    assert "rank 0" in doctor._text(found["ranks"], found["fix"]) and rank["links"]


def test_a_newer_torch_and_python_are_said_once_for_all_ranks():
    found = ranks(versions__torch=dict.fromkeys(range(8), "2.99.0+cu140"))
    text = doctor._text(found, [])
    assert text.count("torch 2.99.0+cu140 is newer than any that was tried") == 1 and "python 3.12.1 is" not in text
    found = ranks(versions__python=dict.fromkeys(range(8), "3.99.0"))
    assert doctor._text(found, []).count("python 3.99.0 is newer than any that was tried") == 1
    assert "is newer" not in doctor._text(ranks(), [])


def test_the_command_that_installs_names_the_torch_that_is_there(monkeypatch, capsys):
    """Also where other packages are missing, when nothing else of the doctor can run."""
    command = f"python -m pip install . 'torch=={importlib.metadata.version('torch')}'"
    assert f"install    {command}" in doctor._text(ranks(), [])
    monkeypatch.setitem(sys.modules, "fmegatron.collectives", None)  # as if optree were missing
    monkeypatch.delitem(sys.modules, "fmegatron.doctor")
    with pytest.raises(SystemExit, match="doctor: fmegatron.collectives is missing; in the folder of .*: ") as stop:
        runpy.run_module("fmegatron.doctor", run_name="__main__")
    assert command in str(stop.value)


def test_wrong_use():
    assert doctor.main(["--mib=0"], io.StringIO(), io.StringIO()) == 2
    assert doctor.main(["--no-such-flag"]) == 2
