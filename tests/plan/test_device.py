"""Plans for a GPU that is not here: what a launch moves and takes, the sheet, and what is said where tools lack."""

import importlib.util
import io
import os
import shutil
from dataclasses import replace

import pytest
import torch

from fmegatron import plan
from fmegatron.layout import Layout, Mesh
from fmegatron.plan import __main__ as command
from fmegatron.plan.cuda import guard, kernels, sheet
from fmegatron.plan.cuda.devices import DEVICES
from fmegatron.plan.cuda.kernels import Kernel
from fmegatron.plan.paper import SizedWorld
from fmegatron.plan.torch_private import Launch
from tests.house import ROOT

H100, A100 = DEVICES["h100"], DEVICES["a100"]
aten = torch.ops.aten
HALF = torch.bfloat16


def called(op, *arguments, results=None, device=H100):
    made = op(*arguments) if results is None else results
    return kernels.called("step", device, op, op.__name__.partition(".")[0], arguments, made, "a.py:1")


# ---- a launch --------------------------------------------------------------------------------------------------------
def test_a_product():
    found = called(aten.mm, torch.ones(8, 4, dtype=HALF), torch.ones(4, 16, dtype=HALF))
    assert (found.kind, found.name) == ("product", "mm 8x4 @ 4x16")
    assert found.flops == 2 * 8 * 4 * 16 and found.nbytes == 2 * (8 * 4 + 4 * 16 + 8 * 16)
    assert found.seconds == found.nbytes / H100.bandwidth  # a small one waits for memory
    wide = called(aten.mm, *[torch.empty(4096, 4096, dtype=HALF, device="meta")] * 2)
    assert wide.seconds == 2 * 4096**3 / H100.flops
    slow = called(aten.mm, *[torch.empty(4096, 4096, device="meta")] * 2)
    assert slow.seconds == 2 * 4096**3 / H100.flops32  # fp32 without TF32


def test_causal_attention_looks_at_half():
    q = torch.empty(2, 4, 8, 16, dtype=HALF, device="meta")
    op = aten._scaled_dot_product_cudnn_attention.default
    whole, causal = (called(op, q, q, q, None, True, 0.0, flag, False, results=q) for flag in (False, True))
    assert whole.kind == causal.kind == "attention" and whole.flops == 4 * 2 * 4 * 8 * 8 * 16
    assert causal.flops == pytest.approx(whole.flops * 9 / 16)


def test_what_an_attention_backward_takes_meanwhile():
    q = torch.empty(2, 4, 8, 16, dtype=HALF, device="meta")
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    assert kernels.scratch(backward, [q, q]) == 4 * q.numel() * 17 // 16
    assert kernels.scratch(aten.mm.default, [q, q]) == 0


def test_a_collective_sends_its_share():
    functional = torch.ops._c10d_functional
    with SizedWorld(Mesh(fsdp=4), 0) as world:
        group, part, whole = world.group_name(("fsdp",)), torch.ones(256), torch.ones(1024)
        gather = called(functional.all_gather_into_tensor.default, part, 4, group, results=whole)
        total = called(functional.all_reduce.default, whole, "sum", group, results=whole)
    assert gather.sent == 4 * 1024 * 3 / 4 and total.sent == 2 * gather.sent
    assert gather.name.endswith(" over fsdp") and gather.kind == "collective" and gather.seconds == gather.sent / 4.5e11


def test_what_moves_nothing_is_no_launch():
    assert called(aten.mm.default, results=()) is None
    assert called(torch.ops._c10d_functional.wait_tensor.default, torch.ones(2), results=torch.ones(2)) is None


def test_a_kernel_of_triton_moves_what_its_indices_name():
    launch = Launch("triton_0", {"arg0_1": 40, "buf1": 8}, {"buf2": 48}, ("buf2",))
    found = kernels.launched("step", H100, launch, ("add", "a.py:2"), frozenset({"arg0_1"}))
    assert (found.nbytes, found.state_read, found.calls, found.at) == (96, 40, 1, "a.py:2")


def test_layers_that_are_missing_are_added():
    few = [Kernel("step", "kernel", "add", "a.py:1", 6.0, 60.0), Kernel("step", "kernel", "cat", "a.py:2", 2.0, 2.0)]
    more = [Kernel("step", "kernel", "add", "a.py:1", 12.0, 120.0), Kernel("step", "kernel", "mul", "a.py:3", 6.0, 1.0)]
    found = {one.name: one for one in kernels.continued(few, more, 6, 12)}
    assert found["add"].calls == 24.0 and found["add"].nbytes == 240.0
    assert found["mul"].calls == 18.0 and "cat" not in found  # which the deeper one has not


# ---- the sheet -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def counted():
    """A plan of the CPU, and one as if it were of an H100."""
    layout = Layout((64, 64), torch.float32, Mesh())
    found = plan.exact(lambda w, x: (w + x, {}), layout, layout)
    rows = (
        Kernel("step", "kernel", "add", "optim/adam.py:7", 2.0, 3e9, seconds=1e-3, state_read=16384),
        Kernel("block", "product", "mm 8x4 @ 4x16", "nn/linear.py:3", 1.0, 1e9, 1e12, seconds=1e-3),
        Kernel("block", "kernel", "mul", "nn/norm.py:3", 1.0, 1e9, seconds=5e-4),
        Kernel("step", "collective", "all_to_all_single over ep", "nn/experts.py:9", 1.0, 1e6, 0.0, 9e5, 2e-6),
    )
    return found, replace(found, device=H100, kernels=rows)


def test_it_says_what_it_is_for(counted):
    of_cpu, of_h100 = counted
    assert str(of_cpu).startswith("exact, for the CPU: ")
    assert str(of_h100).startswith("exact, for NVIDIA H100 80GB HBM3: ")
    for text in (sheet.summary(of_h100), sheet.passes(of_h100)):
        assert "planned for NVIDIA H100 80GB HBM3" in text.splitlines()[0]
    assert "nothing was measured" in sheet.summary(of_h100)
    with pytest.raises(ValueError, match="got a plan for the CPU, wanted one for a device"):
        sheet.summary(of_cpu)


def test_memory_beside_the_plan(counted):
    _, found = counted
    alone = sheet.outside(found)
    assert alone.workspace == 32 << 20 and alone.communicators == {} and alone.total == alone.workspace + alone.context
    assert sheet.outside(replace(found, device=A100)).workspace == 8320 << 10
    ranks = replace(found, mesh=Mesh(dp=2, ep=4), groups={"dp": 2, "ep": 4, "dp+ep": 8, "ep#rows": 4})
    more = sheet.outside(ranks).communicators
    assert set(more) == {"all ranks", "dp", "ep", "ep#rows"}
    assert more["ep"] == more["dp"] + 3 * sheet.EXCHANGE and more["dp"] == 480 << 20
    assert sheet.fits(found) == (True, sheet.fits(found)[1]) and "are left" in sheet.fits(found)[1]
    assert sheet.fits(found, 1 << 20)[0] is False and "does not fit" in sheet.fits(found, 1 << 20)[1]


def test_passes_against_their_floor(counted):
    text = sheet.passes(counted[1], gradients=16384)
    lines = text.splitlines()
    assert "kernel add of step at optim/adam.py:7" in lines[2] and " 40.0%" in lines[2]
    assert any(line.strip().startswith("state") and "are read 1.00 times" in line for line in lines)
    assert "gradients are not known" not in text and "gradients are not known" in sheet.passes(counted[1])
    assert "2.500 ms" in sheet.summary(counted[1]).replace("2.50 ms", "2.500 ms")  # collectives apart


# ---- the command -----------------------------------------------------------------------------------------------------
def planned(*flags):
    out, err = io.StringIO(), io.StringIO()
    file = str(ROOT / "experiments" / "benchmarks" / "dense.py")
    return command.main([file, "--mesh", "fsdp=1", *flags], out, err), err.getvalue()


def test_tools_that_lack_are_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, said = planned("--device", "h100")
    assert status == 2 and "got no triton" in said and "fmegatron[cuda-check]" in said
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    status, said = planned("--device", "h100")
    assert status == 2 and "no g++ on the PATH" in said
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(guard.GuardError, match="wanted a build for CPUs"):
        guard.require_tools()


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "broken-g++"
    broken.write_text("#!/bin/sh\necho cannot find crti.o >&2\nexit 3\n")
    broken.chmod(0o755)
    for compiler, words in ((str(broken), "got status 3"), (str(tmp_path / "none"), "cannot be started")):
        monkeypatch.setenv("CXX", compiler)
        status, said = planned("--device", "h100")
        assert status == 2 and f"{compiler}: " in said and words in said and said.count("plan: ") == 1
        assert "Traceback" not in said and "wanted a library for torch" in said
    assert [name for name in os.listdir(tmp_path / "fmegatron") if name.startswith("guard")] == []


def test_a_device_in_an_ordinary_process_says_what_to_run(monkeypatch):
    layout = Layout((4, 4), torch.float32, Mesh())
    monkeypatch.delenv("FMEGATRON_CUDA_ARCH", raising=False)
    with pytest.raises(guard.GuardError, match="in an ordinary process.*python -m fmegatron.plan"):
        plan.exact(lambda w, x: (w + x, {}), layout, layout, device=H100)


def test_flags_that_do_not_go_together():
    assert planned("--device", "k80") == (2, planned("--device", "k80")[1])
    assert "wanted one of a100, h100, h200, b200" in planned("--device", "k80")[1]
    assert "wanted none of them" in planned("--device", "h100", "--quick")[1]
    assert "--passes: got no --device" in planned("--passes")[1]
