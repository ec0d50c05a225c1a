"""The search over meshes, and the command."""

import io

import pytest

from fmegatron import plan
from fmegatron.layout import Mesh
from fmegatron.plan.__main__ import main
from tests.house import ROOT
from tests.plan.described import SIZES, decoder

SHAKESPEARE = str(ROOT / "experiments/shakespeare.py")
SMALL = ("--config_dim=48", "--config_layers=2", "--config_seq_len=16")


def test_all_meshes_of_some_devices():
    found = list(plan.meshes_of(8))
    assert len(found) == len(set(found)) == 10 and all(mesh.size == 8 for mesh in found)
    assert Mesh(dp=2, fsdp=2, tp=2) in found


def test_what_fits_is_ranked_and_what_does_not_says_why():
    all_of_them = list(plan.meshes_of(8))
    found = plan.search(decoder, all_of_them, 1 << 30)
    assert [one.seconds for one in found.found] == sorted(one.seconds for one in found.found)
    refused = dict(found.failed)
    assert "heads" in refused[Mesh(tp=8)]  # 4 heads
    assert len(found.found) + len(found.failed) == len(all_of_them)
    needs = {one.mesh: one.plan.peak for one in found.found}
    tight = plan.search(decoder, all_of_them, sorted(needs.values())[2])
    assert 0 < len(tight.found) < len(found.found)
    assert all(any(word in why for word in ("too large", "larger than", "heads")) for _, why in tight.failed)
    none = plan.search(decoder, [Mesh(fsdp=8)], 100)
    assert none.failed == ((Mesh(fsdp=8), "the state alone is larger than the device"),)
    assert "fsdp8" in str(none) and f"{len(found.found)} meshes fit" in str(found)


def test_the_batch_must_divide():
    failed = plan.search(lambda mesh: decoder(mesh, batch=4), [Mesh(dp=8)], 1 << 30).failed
    assert "batch_size: got 4 rows" in failed[0][1]
    assert SIZES["heads"] % 4 == 0


def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    return main([SHAKESPEARE, *argv, *SMALL], out, err), out.getvalue(), err.getvalue()


def test_the_command_by_formulas():
    status, out, err = run("--mesh", "fsdp=2,tp=2", "--quick")
    assert (status, err) == (0, "")
    for word in ("turn of the forward", "over fsdp", "over tp", "checkpoint", "s at rates assumed"):
        assert word in out
    status, out, _ = run("--mesh", "fsdp=2", "--quick", "--memory", "0.0001")
    assert status == 1 and "does not fit" in out
    assert run("--mesh", "fsdp=2", "--quick", "--memory", "1")[0] == 0


def test_the_command_searches():
    status, out, _ = run("--search", "4", "--memory", "1")
    assert status == 0 and "meshes fit into 1,024.0 MiB" in out and "tokens/s" in out
    assert run("--search", "4", "--memory", "0.0000001")[0] == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "got neither --mesh nor --search, or both"),
        (("--mesh", "dp=2", "--search", "2"), "got neither --mesh nor --search, or both"),
        (("--search", "2"), "got no --memory"),
        (("--mesh", "tp=5"), "wanted a multiple of tp=5"),
        (("--mesh", "dp=2", "--rank", "2"), "got rank=2, wanted one of 0 to 1"),
    ],
)
def test_wrong_use(flags, text):
    status, _, err = run(*flags)
    assert status == 2 and text in err
