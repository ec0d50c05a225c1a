"""Nested dicts of arrays over optree: map, paths, check, arithmetic, keys of randomness, init from specs."""

from fmegatron.tree.arithmetic import add, cast, count, dot, scale, squared_norm, stored, subtract, working_dtype
from fmegatron.tree.check import check, require_mesh
from fmegatron.tree.dump import dump
from fmegatron.tree.init import init
from fmegatron.tree.keys import fold_in
from fmegatron.tree.labels import layout_of
from fmegatron.tree.placed import layouts, place
from fmegatron.tree.shapes import local, specs
from fmegatron.tree.show import Shown, show
from fmegatron.tree.spec import (
    ArraySpec,
    Constant,
    Init,
    Normal,
    Uniform,
    copies,
    named,
    ones,
    zeros,
    zeros_like,
)
from fmegatron.tree.structure import (
    Tree,
    did_you_mean,
    flatten,
    in_words,
    leaves,
    map,
    map_with_path,
    merge,
    neither_norm_nor_bias,
    partition,
    paths,
    structure_difference,
    unflatten,
)

__all__ = [
    "ArraySpec",
    "Constant",
    "Init",
    "Normal",
    "Shown",
    "Tree",
    "Uniform",
    "add",
    "cast",
    "check",
    "copies",
    "count",
    "did_you_mean",
    "dot",
    "dump",
    "flatten",
    "fold_in",
    "in_words",
    "init",
    "layout_of",
    "layouts",
    "leaves",
    "local",
    "map",
    "map_with_path",
    "merge",
    "named",
    "neither_norm_nor_bias",
    "ones",
    "partition",
    "paths",
    "place",
    "require_mesh",
    "scale",
    "show",
    "specs",
    "squared_norm",
    "stored",
    "structure_difference",
    "subtract",
    "unflatten",
    "working_dtype",
    "zeros",
    "zeros_like",
]
