"""Nested dicts of arrays over optree: map, paths, check, arithmetic, keys of randomness, init from specs."""

from fmegatron.moved import no_name as _no_name
from fmegatron.tree.arithmetic import add, scale, subtract
from fmegatron.tree.checks import check
from fmegatron.tree.initialize import init
from fmegatron.tree.keys import fold_in
from fmegatron.tree.labels import layout_of
from fmegatron.tree.pictures import show
from fmegatron.tree.placed import layouts, place
from fmegatron.tree.shapes import local, specs
from fmegatron.tree.spec import ArraySpec, Normal, Uniform, copies, named, zeros_like
from fmegatron.tree.structure import leaves, map, merge, partition, paths
from fmegatron.tree.text_dump import dump

__all__ = [
    "ArraySpec",
    "Normal",
    "Uniform",
    "add",
    "check",
    "copies",
    "dump",
    "fold_in",
    "init",
    "layout_of",
    "layouts",
    "leaves",
    "local",
    "map",
    "merge",
    "named",
    "partition",
    "paths",
    "place",
    "scale",
    "show",
    "specs",
    "subtract",
    "zeros_like",
]

globals()["__getattr__"] = _no_name(__name__)
