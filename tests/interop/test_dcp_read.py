"""DCP and Megatron torch_dist directories restored by us: any mesh, bit by bit, only what is needed."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fmegatron import checkpoint, interop, tree
from fmegatron.checkpoint import CheckpointError
from fmegatron.collectives import connect
from fmegatron.interop import dcp_read
from fmegatron.interop.dcp_read import dcp_objects, read_dcp_object
from fmegatron.layout import Layout, Mesh, Split
from tests.interop.models import build, full, state_of
from tests.interop.torch_layout import whole, write, write_megatron


def same_bits(got, wanted):
    bits = (x.contiguous().reshape(-1).view(torch.uint8) for x in (got, wanted))
    return got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(*bits)


def check_all_ranks(path, wanted, mesh, spec, **options):
    """Every rank's tensors under a spec (cut to the tensor's dims) are what the layout cuts out of the whole."""
    layouts = {name: Layout(x.shape, x.dtype, mesh, spec[: x.ndim]) for name, x in wanted.items()}
    for rank in range(mesh.size):
        got = checkpoint.restore(interop.source(path), layouts, rank=rank, **options)
        for name, layout in layouts.items():
            for box in layout.boxes(rank):
                assert same_bits(box.view(got[name]).contiguous(), wanted[name][box.slices]), (name, layout, rank)


MESHES = [
    (Mesh(), ()),
    (Mesh(pp=2, tp=2), ("pp", None, "tp")),
    (Mesh(fsdp=3), (None, "fsdp")),
    (Mesh(a=2, b=2), (("b", "a"),)),
]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("block", [16, 1 << 20])
def test_megatron_to_any_mesh(tmp_path, monkeypatch, verify, block):
    monkeypatch.setattr(dcp_read, "_BLOCK_BYTES", block)
    wanted = write_megatron(tmp_path)
    for mesh, spec in MESHES:
        check_all_ranks(tmp_path, wanted, mesh, spec, strict="subset", verify=verify)
    found = checkpoint.layouts(interop.source(tmp_path))
    assert found["decoder.layers.linear.weight"] == Layout((4, 8, 6), torch.bfloat16, Mesh())
    names = dcp_objects(tmp_path)
    assert names[:2] == ["rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"] and names[2] == "common"
    assert read_dcp_object(tmp_path, names[1]) == [{"seed": 1, "offset": 7}]
    assert read_dcp_object(tmp_path, "common") == {"iteration": 7, "args": {"lr": 0.1}}
    with pytest.raises(ValueError, match="did you mean common"):
        read_dcp_object(tmp_path, "comon")


DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


def test_every_dtype_and_empty_and_scalar(tmp_path):
    wanted = {f"{d}".removeprefix("torch."): whole((4, 6), d) for d in DTYPES}
    wanted |= {
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "cut": whole((9,), torch.int32),
    }
    pieces = {name: [((0,) * x.ndim, tuple(x.shape))] for name, x in wanted.items()}
    pieces["cut"] = [((0,), (4,)), ((4,), (5,))]
    pieces["int64"] = [((i, 0), (1, 6)) for i in range(4)]
    write(tmp_path, {name: (x, pieces[name]) for name, x in wanted.items()})
    for mesh, spec in ((Mesh(), ()), (Mesh(fsdp=3), ("fsdp",))):
        check_all_ranks(tmp_path, wanted, mesh, spec)


def test_shards_stored_without_dims_of_one_and_strided(tmp_path):
    layers = whole((3, 4, 6), torch.float32)
    tensors = {"w": (layers, [((i, 0, 0), (1, 4, 6)) for i in range(3)])}
    for i, blob in enumerate((lambda x: x[0], lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))):
        write(tmp_path / f"{i}", tensors, blob=blob)
        for mesh, spec in MESHES:
            check_all_ranks(tmp_path / f"{i}", {"w": layers}, mesh, spec)


def save_with_torch(rank, path, kind, size):
    net, optimizer = build(kind, size)
    state = state_of(net, optimizer)
    dcp.save(state, checkpoint_id=path)
    return full(state)


@pytest.mark.long
@pytest.mark.parametrize("kind, size", [("fsdp", 4), ("fsdp_tp", 4), ("tp", 2)])
def test_what_torch_saved_from_dtensors(ranks, tmp_path, kind, size):
    path = str(tmp_path / "c")
    state = ranks.run(save_with_torch, path, kind, size, ranks=size)[0]
    wanted = {f"model/{name}": x for name, x in state["model"].items()}
    for i, moments in state["optimizer"]["state"].items():
        wanted |= {f"optimizer/state/{i}/{name}": x for name, x in moments.items()}
    for mesh, spec in ((Mesh(), ()), (Mesh(fsdp=3), ("fsdp",)), (Mesh(a=2, b=2), ("b", "a"))):
        check_all_ranks(path, wanted, mesh, spec)
    assert read_dcp_object(path, "optimizer/param_groups/0/betas") == (0.9, 0.98)
    flat = {name: Layout(x.shape, x.dtype, Mesh(dp=3), flat="dp") for name, x in wanted.items()}
    parts = [checkpoint.restore(interop.source(path), flat, rank=rank) for rank in range(3)]
    assert all(torch.equal(torch.cat([p[name] for p in parts]), x.reshape(-1)) for name, x in wanted.items())


def restore_on_ranks(rank, path):
    mesh = Mesh(tp=2)
    layouts = {"decoder.layers.tp.weight": Layout((3, 4, 6), torch.float32, mesh, (None, None, Split("tp", 3)))}
    with connect(mesh, device="cpu") as world:
        got = checkpoint.restore(interop.source(path), layouts, world=world, strict="subset")
        wrong = {"decoder.layers.tp.weight": Layout((3, 4, 6 + rank), torch.float32, mesh)}
        with pytest.raises((ValueError, RuntimeError), match="stored with global shape"):
            checkpoint.restore(interop.source(path), wrong, world=world, strict="subset")
        return got["decoder.layers.tp.weight"]


def test_real_ranks(ranks, tmp_path):
    wanted = write_megatron(tmp_path)["decoder.layers.tp.weight"]
    first, second = ranks.run(restore_on_ranks, str(tmp_path), ranks=2)
    assert torch.equal(first, wanted[..., [0, 2, 4]]) and torch.equal(second, wanted[..., [1, 3, 5]])


def test_only_what_is_needed_is_read(tmp_path, monkeypatch):
    x = whole((8, 1000), torch.float32)
    write(tmp_path, {"w": (x, [((i, 0), (2, 1000)) for i in range(0, 8, 2)])})
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read.append(sum(map(len, into))) or preadv(fd, into, at))
    checkpoint.restore(interop.source(tmp_path), {"w": Layout(x.shape, x.dtype, Mesh(fsdp=4), ("fsdp",))}, rank=1)
    assert sum(read) == 2 * 1000 * 4
    read.clear()
    monkeypatch.setattr(dcp_read, "_BLOCK_BYTES", 4000)
    checkpoint.restore(
        interop.source(tmp_path), {"w": Layout(x.shape, x.dtype, Mesh(fsdp=8), ("fsdp",))}, rank=3, verify=False
    )
    assert sum(read) == 1000 * 4


def test_cast_strict_and_errors(tmp_path):
    write_megatron(tmp_path)
    whole_tree = checkpoint.layouts(interop.source(tmp_path))
    wide = {name: layout.replace(dtype=torch.float64) for name, layout in whole_tree.items()}
    with pytest.raises(ValueError, match="stored as bfloat16, wanted float64; pass cast=True"):
        checkpoint.restore(interop.source(tmp_path), wide)
    got = checkpoint.restore(interop.source(tmp_path), wide, cast=True)
    assert all(x.dtype is torch.float64 for x in got.values())
    with pytest.raises(ValueError, match="stored but not asked for: irregular, norm"):
        checkpoint.restore(interop.source(tmp_path), {k: v for k, v in whole_tree.items() if k.startswith("decoder")})
    with pytest.raises(ValueError, match=r"nrom: not in the checkpoint \(did you mean norm\?\)"):
        checkpoint.restore(interop.source(tmp_path), {"nrom": whole_tree["norm"]}, strict="subset")
    with pytest.raises(CheckpointError, match="no .metadata"):
        dcp_objects(tmp_path / "nowhere")


@pytest.mark.medium
def test_every_flipped_byte_is_noticed_or_does_not_matter(tmp_path):
    """Data files: an error that names the tensor, or the very same elements (bytes of padding, of unused members)."""
    x = whole((4, 16), torch.float32)
    write(tmp_path, {"w": (x, [((0, 0), (2, 16)), ((2, 0), (2, 16))])})
    file = next(p for p in tmp_path.iterdir() if p.suffix == ".distcp" and p.stat().st_size)
    good, layouts, errors = file.read_bytes(), checkpoint.layouts(interop.source(tmp_path)), 0
    for at in range(0, len(good), 3):
        bad = bytearray(good)
        bad[at] ^= 0x10
        file.write_bytes(bad)
        try:
            assert same_bits(checkpoint.restore(interop.source(tmp_path), layouts)["w"], x), at
        except CheckpointError as error:
            assert "w: its shard at" in str(error), error
            errors += 1
    assert errors > 60
    for size in (0, 10, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match="w: its file .* bytes, wanted at least"):
            checkpoint.restore(interop.source(tmp_path), layouts)
    file.unlink()
    with pytest.raises(CheckpointError, match="w: its file .*cannot be read"):
        checkpoint.restore(interop.source(tmp_path), layouts)


def test_rules_turn_megatrons_tree_into_ours(tmp_path):
    stored = write_megatron(tmp_path)
    rules = [
        checkpoint.rename(r"decoder\.layers\.(.*)\.weight", r"blocks/\1"),
        checkpoint.unstack("blocks/linear", "layers/{i}/linear"),
        checkpoint.transpose("blocks/tp", (0, 2, 1)),
    ]
    mesh = Mesh(tp=2)
    layouts = {
        "layers": {str(i): {"linear": Layout((8, 6), torch.bfloat16, mesh, (None, "tp"))} for i in range(4)},
        "blocks": {"tp": Layout((3, 6, 4), torch.float32, mesh, (None, "tp"))},
        "head": Layout((2,), torch.float32, mesh),
    }
    for rank in range(2):
        head = torch.ones(2)
        initial = tree.map(lambda layout, rank=rank: torch.zeros(layout.local_shape(rank), dtype=layout.dtype), layouts)
        got, missing, unexpected = checkpoint.restore(
            interop.source(tmp_path),
            layouts,
            rank=rank,
            rules=rules,
            strict="return_all",
            initial=initial | {"head": head},
        )
        assert missing == ("irregular", "norm") and unexpected == ("head",) and got["head"].eq(1).all()
        for i in range(4):
            wanted = stored["decoder.layers.linear.weight"][i][:, 3 * rank : 3 * rank + 3]
            assert same_bits(got["layers"][str(i)]["linear"], wanted)
        assert same_bits(got["blocks"]["tp"], stored["decoder.layers.tp.weight"].transpose(1, 2)[:, 3 * rank :][:, :3])
