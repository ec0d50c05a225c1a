"""Whole directories from one format to the other and back, by command, some chunks at a time."""

import sys

import pytest
import torch

from fmegatron import checkpoint, interop
from fmegatron.checkpoint import CheckpointError
from fmegatron.interop import convert
from fmegatron.interop.__main__ import main
from fmegatron.layout import Layout, Mesh
from tests.checkpoint.fake_world import assert_same_bits, small_sizes
from tests.interop.models import same
from tests.interop.torch_layout import whole, write, write_megatron


def test_megatron_there_and_back(tmp_path, capsys):
    source, ours, back, again = (str(tmp_path / name) for name in ("iter_0000007", "ours", "back", "again"))
    wanted = write_megatron(source)
    assert main(["dcp-to-fmegatron", source, ours]) == 0 and checkpoint.describe(ours).step == 7
    layouts = {name: Layout(x.shape, x.dtype, Mesh(tp=2), ("tp",)) for name, x in wanted.items()}
    parts = [checkpoint.restore(ours, layouts, rank=rank) for rank in range(2)]
    assert_same_bits({name: torch.cat([p[name] for p in parts]) for name in wanted}, wanted)
    values = {"rng_state": {"shard_0.0_1.2": [{"seed": None, "offset": None}]}, "common": {"iteration": 0}}
    interop.load_state_dict(ours, values, strict="raise_unexpected")
    assert values["rng_state"]["shard_0.0_1.2"] == [{"seed": 0, "offset": 7}] and values["common"]["iteration"] == 7
    assert main(["fmegatron-to-dcp", ours, back]) == 0
    got = checkpoint.restore(interop.source(back), checkpoint.layouts(interop.source(back)))
    assert_same_bits(got, {name: wanted[name] for name in got})
    assert main(["dcp-to-fmegatron", back, again]) == 0
    assert checkpoint.metadata(again) == checkpoint.metadata(ours)
    assert_same_bits(checkpoint.restore(again, checkpoint.layouts(again)), got)
    assert main(["fmegatron-to-dcp", ours, back]) == 1 and "exists" in capsys.readouterr().err
    assert main(["dcp-to-fmegatron", ours, again]) == 1 and "checkpoint of fmegatron" in capsys.readouterr().err


@pytest.mark.parametrize("group", [100, 700, 1 << 20])
def test_some_chunks_at_a_time(tmp_path, monkeypatch, group):
    wanted = {
        "a": whole((30, 12), torch.float32),
        "b": whole((7, 5, 3), torch.int16),
        "c": whole((64,), torch.bfloat16),
    }
    wanted |= {"none": torch.empty(3, 0), "one": torch.tensor(3)}
    pieces = {name: [((0,) * x.ndim, tuple(x.shape))] for name, x in wanted.items()}
    pieces["a"] = [((0, 0), (11, 12)), ((11, 0), (19, 5)), ((11, 5), (19, 7))]
    write(
        tmp_path / "dcp",
        {name: (x, pieces[name]) for name, x in wanted.items()},
        {"o": {"t": whole((9, 9), torch.int64)}},
    )
    monkeypatch.setattr(convert, "_GROUP_BYTES", group)
    monkeypatch.setattr(convert, "_SHARD_BYTES", 4 * 64)
    held, fill = [], convert._Converted.fill

    def watched(source, wanted, verify=True):
        held.append(sum(target.view.nbytes for targets in wanted.values() for target in targets))
        return fill(source, wanted, verify)

    monkeypatch.setattr(convert._Converted, "fill", watched)
    with small_sizes():
        assert interop.dcp_to_fmegatron(tmp_path / "dcp", tmp_path / "ours") == []
        got = checkpoint.restore(tmp_path / "ours", checkpoint.layouts(tmp_path / "ours"))
        wanted["o"] = {"t": whole((9, 9), torch.int64)}
        assert_same_bits(got, wanted)
        assert max(held) <= max(group, 648)  # the tensor in an object is there already
        interop.fmegatron_to_dcp(tmp_path / "ours", tmp_path / "back")
    got = checkpoint.restore(interop.source(tmp_path / "back"), checkpoint.layouts(interop.source(tmp_path / "back")))
    assert_same_bits(got, wanted)


def test_objects_that_are_no_data(tmp_path, capsys):
    write(tmp_path / "dcp", {"w": (torch.ones(3), [((0,), (3,))])}, {"odd": torch.nn.ReLU(), "fine": [1, {"x": 2}]})
    source, target = str(tmp_path / "dcp"), str(tmp_path / "ours")
    assert main(["dcp-to-fmegatron", source, target]) == 1
    assert "odd: got what cannot be converted" in (text := capsys.readouterr().err) and "torch.nn.modules" in text
    assert not (tmp_path / "ours").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["dcp"]
    assert main(["dcp-to-fmegatron", source, target, "--skip-objects"]) == 0
    assert capsys.readouterr().out == "left out: odd\n"
    interop.load_state_dict(target, got := {"w": torch.zeros(3), "fine": [0, {"x": 0}]})
    assert same(got, {"w": torch.ones(3), "fine": [1, {"x": 2}]})


def test_a_damaged_source_leaves_nothing(tmp_path):
    write_megatron(tmp_path / "dcp")
    file = max((tmp_path / "dcp").glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    for at in range(600, len(data), 64):
        data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="shard at|rng_state/shard"):
        interop.dcp_to_fmegatron(tmp_path / "dcp", tmp_path / "ours")
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]
    interop.save_state_dict(tmp_path / "ours", {"w": whole((50, 400), torch.float32)})
    chunk = tmp_path / "ours" / "arrays" / "w" / "c.0.0"
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CheckpointError, match="w: .*is damaged"):
        interop.fmegatron_to_dcp(tmp_path / "ours", tmp_path / "out")
    assert not (tmp_path / "out" / ".metadata").exists()


def test_the_program(tmp_path, python):
    write_megatron(tmp_path / "c")
    command = [sys.executable, "-m", "fmegatron.checkpoint", "show", str(tmp_path / "c")]
    done = python.run(command, timeout=600)
    assert done.returncode == 0 and '"common"' in done.stdout and "step 7" in done.stdout, done
