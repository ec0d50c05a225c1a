"""Fake clusters: ranks as threads, a directory for each node, states whose bits name their step and rank."""

import contextlib
import json
import re
import shutil
import warnings

import torch

from fmegatron import tree
from fmegatron.checkpoint import Manager
from fmegatron.checkpoint.files.parse import parse_manifest
from fmegatron.checkpoint.local.replicas import LocalReplicas
from fmegatron.checkpoint.local.shard import content_id
from fmegatron.layout import Layout, Mesh, Split
from tests.checkpoint.fake_world import assert_same_bits, cut_tree, run
from tests.checkpoint.tokens import files_of, reseal

RUN = "run"


def layouts_on(mesh):
    """Sharded, replicated, uneven (shards of ranks differ in size), flattened, 0-d, empty and fp8 leaves."""
    tp = "tp" if "tp" in mesh else None
    return {
        "w": Layout((8, 16), torch.float32, mesh, ("fsdp", tp and Split(tp, parts=2))),
        "uneven": Layout((5, 7), torch.bfloat16, mesh, ("fsdp",)),
        "flat": Layout((3, 11), torch.float32, mesh, flat=("fsdp",)),
        "fp8": Layout((9,), torch.float8_e4m3fn, mesh),
        "empty": Layout((0, 3), torch.float32, mesh),
        "step": Layout((), torch.int64, mesh),
    }


def state(layouts, step):
    """Global arrays of random bits: NaN, infinity and denormals among them."""
    generator = torch.Generator().manual_seed(step)

    def bits(layout):
        size = (*layout.shape, layout.dtype.itemsize)
        data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        return data.view(layout.dtype).reshape(layout.shape)

    return {**tree.map(bits, layouts), "step": torch.tensor(step)}


def resign(shard, manifest, ids=None, pointer=True):
    """Put an altered manifest (text, or JSON) into a shard, with a marker and a pointer that fit; with ids, among them
    a right one of the shard's own."""
    if ids is not None:
        about = manifest["metadata"].get("replica")
        if isinstance(about, dict) and isinstance(about.get("shards"), list):
            about["shards"] = [f"{one:016x}" for one in ids]
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError):
                ids[about["rank"]] = content_id(parse_manifest(json.loads(json.dumps(manifest))))
                about["shards"] = [f"{one:016x}" for one in ids]
    data = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    before = (shard / "COMPLETE").read_bytes()
    reseal(files_of(shard), data)
    if not pointer:
        (shard / "COMPLETE").write_bytes(before)


class Cluster:
    """`size` ranks, `spacing` on each node; each node has a directory in `root`."""

    def __init__(self, root, size=4, spacing=1, layouts=None, **options):
        self.root, self.size, self.spacing = root, size, spacing
        self.layouts = layouts or layouts_on(Mesh(fsdp=size))
        self.options = {"spacing": spacing, "portion_bytes": 128, **options}

    def directory(self, rank):
        return self.root / f"node-{rank // self.spacing}"

    def replicas(self, rank, world=None, **options):
        return LocalReplicas(self.directory(rank), RUN, world, **{**self.options, **options})

    def save(self, step, **options):
        """What each rank got."""
        local = cut_tree(state(self.layouts, step), self.layouts)
        return run(
            self.size,
            lambda world: self.replicas(world.rank, world, **options).save(
                step, local[world.rank], self.layouts, {"step": step, "loss": 0.1}
            ),
        )

    def restore(self, layouts=None, fallback=None, **options):
        """([what each rank got], [texts of warnings]); fallback: the directory of a Manager, or a function."""
        layouts = layouts or self.layouts

        def restore(world):
            last = fallback if fallback is None or callable(fallback) else Manager(fallback, world=world)
            return self.replicas(world.rank, world).restore_latest(layouts, fallback=last, **options)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = run(self.size, restore)
        return got, [str(w.message) for w in caught]

    def kept(self, rank):
        """(step, rank) of all shards in the directory of a rank."""
        return sorted((step, of) for step, _, of in self.replicas(rank).shelf.keys())

    def paths(self):
        """All files, by name."""
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def shards(self):
        """The directories of all shards, by name."""
        return sorted(p for p in self.root.rglob("step_*") if p.parent.name == RUN)

    def content(self):
        """What every file holds; numbers of saves, tokens and the times of leases are no part of it."""
        random = re.compile(rb"(?<=rank_\d{5}\.)[0-9a-f]{16}|(?<=[/\"])[0-9a-f]{12}(?=[/\"])")
        found = [(random.sub(b"*", bytes(path)), path) for path in self.paths()]
        assert len(dict(found)) == len(found), "one save of each shard"
        return {
            name: random.sub(b"*", path.read_bytes()) if path.name == "COMPLETE" else path.read_bytes()
            for name, path in found
        }

    def wipe(self, *ranks):
        for rank in ranks:
            shutil.rmtree(self.directory(rank), ignore_errors=True)

    def assert_restored(self, got, step):
        local = cut_tree(state(self.layouts, step), self.layouts)
        for rank, result in enumerate(got):
            if isinstance(result, BaseException):
                raise result
            assert result[0] == step and result[2] == {"step": step, "loss": 0.1}
            assert_same_bits(result[1], local[rank], f"rank {rank}")
