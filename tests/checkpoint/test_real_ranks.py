"""The same with real processes and gloo: save on 4 ranks, restore on 2; one failing rank ends all."""

import torch

from fmegatron import checkpoint
from fmegatron.collectives import connect
from fmegatron.layout import Layout, Mesh, Split

SHAPE = (128, 768)


def layout_on(mesh):
    return {"w": Layout(SHAPE, torch.float32, mesh, ("fsdp", Split("tp", parts=3))), "n": Layout((), torch.int64, mesh)}


def whole():
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)


def local(layout, rank):
    x = torch.empty(layout.local_shape(rank))
    for box in layout.boxes(rank):
        box.view(x).copy_(whole()[box.slices])
    return x


def save_part(rank, path, broken_rank):
    mesh = Mesh(fsdp=2, tp=2)
    layouts = layout_on(mesh)
    with connect(mesh, device="cpu") as world:
        manager = checkpoint.Manager(path, keep=1, world=world)
        state = {"w": local(layouts["w"], rank), "n": torch.tensor(5)}
        manager.save(1, state, layouts, {"note": "four ranks"})
        if rank == broken_rank:
            state["w"] = state["w"].double()
        try:
            manager.save(2, state, layouts)
        except (RuntimeError, ValueError) as error:
            return type(error).__name__, str(error)


def restore_part(rank, path):
    mesh = Mesh(fsdp=1, tp=2)
    layouts = layout_on(mesh)
    with connect(mesh, device="cpu") as world:
        step, state, metadata = checkpoint.Manager(path, world=world).restore_latest(layouts)
        return step, metadata, torch.equal(state["w"], local(layouts["w"], rank)), int(state["n"])


def test_four_ranks_to_two(ranks, tmp_path):
    failures = ranks.run(save_part, str(tmp_path), 3)
    assert [kind for kind, _ in failures] == ["FailedOnRank"] * 3 + ["ValueError"]
    assert all("w: got dtype f64, wanted f32" in text for _, text in failures)
    assert ranks.run(restore_part, str(tmp_path), ranks=2) == [(1, {"note": "four ranks"}, True, 5)] * 2
