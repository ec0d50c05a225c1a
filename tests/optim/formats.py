"""Formats of optimizer state as rules, for the parameters of `table`; more parameters, with flattened leaves."""

import torch

from fmegatron import optim, tree
from fmegatron.layout import Layout, Mesh, Split
from fmegatron.optim import contrib
from fmegatron.optim.contrib import compressed
from fmegatron.optim.contrib.blockwise import float16
from fmegatron.optim.contrib.formats import Bfloat16, Float32, NoMaster, Remainder
from fmegatron.tree import ArraySpec, Normal

ALL = {"smallest": 0}  # the leaves of the tests are small
FP16_LEAF = ("master/.*norm", Float32())  # the parameter of the table that may be float16: no remainder for it


def blocks(form, moment, **options):
    """The rule for a moment of the table's parameters; edges of shards cut its embedding every 3 elements."""
    return (f"{moment}(?!/embed)", form(block=2, **ALL, **options))


FORMATS = {
    "bf16": [("adam", Bfloat16()), FP16_LEAF, ("master", Remainder())],
    "bf16-stochastic": [("adam", Bfloat16(stochastic=True)), FP16_LEAF, ("master", NoMaster())],
    "fp16": [blocks(float16, "m"), blocks(float16, "v", root=True)],
    "fp8": [
        blocks(contrib.float8, "m"),
        blocks(contrib.float8, "v", dtype=torch.float8_e5m2, root=True),
        FP16_LEAF,
        ("master", Remainder()),
    ],
    "int8": [blocks(contrib.int8, "m"), blocks(contrib.int8, "v", root=True), FP16_LEAF, ("master", NoMaster())],
    "int8-linear": [blocks(contrib.int8, "m", linear=True), blocks(contrib.int8, "v", linear=True, root=True)],
}


def adamw_in(rules):
    """AdamW in these formats, for any mesh."""
    return lambda: compressed(optim.adamw(1e-2), rules, key=7)


def flat_specs(dtype, mesh):
    """Leaves that are flattened over fsdp and dp in every way, and interleaved ones; widths that blocks of 2 divide."""
    shapes = {
        "rows": Layout((4, 2, 3), dtype, mesh, flat=("fsdp", "dp")),  # ranges of whole rows, of an odd length
        "within": Layout((2, 3, 4), dtype, mesh, flat=("fsdp",)),
        "of_dim0": Layout((4, 6), dtype, mesh, ("tp",), flat=("fsdp",)),
        "of_dim1": Layout((3, 8), dtype, mesh, (None, "tp"), flat=("fsdp",)),
        "of_both": Layout((6, 2, 4), dtype, mesh, ("dp", None, "tp"), flat=("fsdp",)),
        "interleaved": Layout((2, 12), dtype, mesh, (None, Split("tp", (4, 8)))),
        "flat_interleaved": Layout((3, 16), dtype, mesh, (None, Split("tp", (8, 8))), flat=("fsdp",)),
    }
    return {name: ArraySpec(layout, Normal(0.5)) for name, layout in shapes.items()}


def flat_params(dtype):
    """The parameters of `flat_specs`, whole."""
    layouts = tree.layouts(flat_specs(dtype, Mesh(dp=1, fsdp=1, tp=1)))
    whole = tree.map(lambda layout: ArraySpec(layout.replace(flat=()), Normal(0.5)), layouts)
    return tree.init(whole, key=3, rank=0)
