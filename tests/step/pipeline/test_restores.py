"""Placements of one training state: checkpoints go from each to the next, and a Hugging Face folder opens into all."""

import torch

from fmegatron import checkpoint, model, optim, step, tree
from fmegatron.interop import hf
from fmegatron.layout import DataParallel, Mesh
from fmegatron.step import Pipeline
from fmegatron.step.pipeline import schedules
from tests.checkpoint.fake_world import run
from tests.checkpoint.test_reshard import state_for
from tests.interop.hf_folder import write

LAYERS, OPTIMIZER = 7, optim.adamw(1e-3)
PLACEMENTS = {
    "p=4": (Mesh(pp=4, dp=2), "zero1", Pipeline(schedules.one_f_one_b(4, 4), (2, 2, 2, 1))),
    "p=2": (Mesh(pp=2, fsdp=2), "zero3", Pipeline(schedules.zb_h1(2, 4), (4, 3))),
    "a V of 2": (Mesh(pp=2, tp=2), "replicated", Pipeline(schedules.zb_v(2, 4), (2, 2, 2, 1))),
    "no pp": (Mesh(fsdp=3), "zero3", None),
    "uneven, p=3": (Mesh(pp=3, dp=2), "zero2", Pipeline(schedules.one_f_one_b(3, 4), (4, 1, 2))),
}


def layouts_of(decoder, name, state=True):
    mesh, strategy, pipeline = PLACEMENTS[name]
    by = DataParallel.named(strategy)
    specs = model.specs(decoder, mesh, strategy=by, pipeline=pipeline)
    return tree.layouts(step.state_specs(specs, OPTIMIZER, by) if state else specs)


def assert_held(local, whole, layouts, rank):
    """What a rank holds is its part, bit for bit, and zeros where it has padding."""
    leaves = [tree.leaves(of) for of in (local, whole, layouts)]
    for path, x, w, layout in zip(tree.paths(layouts), *leaves, strict=True):
        rest = x.clone()
        for box in layout.boxes(rank):
            bits = (y.reshape(-1).view(torch.uint8) for y in (box.view(x), w[box.slices]))
            assert torch.equal(*bits), path
            box.view(rest).zero_()
        assert not rest.count_nonzero(), path


def restored(path, name, layouts):
    found = run(PLACEMENTS[name][0].size, lambda world: checkpoint.restore(path, layouts, world=world))
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def test_restores_from_one_placement_to_the_next(tmp_path):
    decoder = model.llama(vocab_size=61, dim=16, layers=LAYERS, heads=4, kv_heads=2, ffn_dim=24, max_seq=8)
    names = list(PLACEMENTS)
    whole = state_for(layouts_of(decoder, names[0]))
    for i, name in enumerate([*names, names[0]]):
        layouts = layouts_of(decoder, name)
        if not i:
            parts = [tree.map(lambda x, layout, r=rank: cut(x, layout, r), whole, layouts) for rank in range(8)]
        else:
            parts = restored(tmp_path / f"{i - 1}", name, layouts)
        for rank, local in enumerate(parts):
            assert_held(local, whole, layouts, rank)

        def save(world, path=tmp_path / f"{i}", parts=parts, layouts=layouts):
            checkpoint.save(path, parts[world.rank], layouts, world)

        assert run(len(parts), save) == [None] * len(parts)


def cut(x, layout, rank):
    found = torch.zeros(layout.local_shape(rank), dtype=x.dtype)
    for box in layout.boxes(rank):
        box.view(found).copy_(x[box.slices])
    return found


def test_a_folder_of_hugging_face_opens_into_all(tmp_path):
    write(tmp_path / "hf", num_hidden_layers=LAYERS, num_key_value_heads=2)
    decoder = hf.decoder(tmp_path / "hf", param_dtype=torch.bfloat16)
    whole = hf.load(tmp_path / "hf", decoder, model.layouts(decoder, Mesh()))
    for name in PLACEMENTS:
        layouts = layouts_of(decoder, name, state=False)
        for rank in range(PLACEMENTS[name][0].size):
            assert_held(hf.load(tmp_path / "hf", decoder, layouts, rank=rank), whole, layouts, rank)
