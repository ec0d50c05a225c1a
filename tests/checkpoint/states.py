"""Whole training states for reshard tests: a dense decoder with AdamW and masters, and an MoE tree; on any mesh."""

import itertools
import math

import torch

from fmegatron import model, optim, tree
from fmegatron.layout import Layout, Mesh, Rules, Split
from fmegatron.model import llama
from fmegatron.tree.structure import map_with_path

CONFIG = llama(
    vocab_size=70, dim=24, layers=4, heads=4, kv_heads=4, ffn_dim=36, max_seq=8, vocab_multiple=24,
    param_dtype=torch.bfloat16,
)  # fmt: skip


def meshes(most=8):
    """Meshes of up to `most` ranks over pp, dp, fsdp and tp; some with other orders of the ranks."""
    found = []
    for pp, dp, fsdp, tp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3, 4), (1, 2, 4)):
        if pp * dp * fsdp * tp <= most:
            found.append(Mesh(pp=pp, dp=dp, fsdp=fsdp, tp=tp))
            if dp * pp > 1 and tp > 1:
                mesh = Mesh(tp=tp, pp=pp, dp=dp, fsdp=fsdp)
                found.append(mesh.view(order=("pp", "tp", "dp", "fsdp"), pp=pp, dp=dp, fsdp=fsdp, tp=tp))
    return found


def covering_pairs(meshes, features):
    """Few pairs of meshes such that every feature of a source meets every feature of a target. Greedy."""
    pairs = list(itertools.product(range(len(meshes)), repeat=2))
    bits = {}  # each meeting of two features is a bit, and what a pair of meshes shows is one whole number

    def mask(source, target):
        meetings = itertools.product(features(meshes[source]), features(meshes[target]))
        return sum(1 << bits.setdefault(meeting, len(bits)) for meeting in meetings)

    wanted = {pair: mask(*pair) for pair in pairs}
    left = (1 << len(bits)) - 1
    while left:
        best = max(pairs, key=lambda pair: ((wanted[pair] & left).bit_count(), -abs(pair[0] - pair[1])))
        left &= ~wanted[best]
        yield meshes[best[0]], meshes[best[1]]


def features(mesh):
    """What of a mesh matters to layouts: the size of each axis, and whether ranks are in another order."""
    return {*((name, int(mesh[name])) for name in mesh.names), ("order", len(mesh.digits))}


def dense(mesh, virtual=False):
    """Layouts of parameters (stacked layers over pp, in virtual stages if asked), moments and masters.

    Moments and masters are cut once more over dp, as flat ranges (ZeRO-1) where they are matrices.
    """
    stages = Split("pp", parts=2) if virtual and mesh["pp"] == 2 else "pp"
    rules = Rules(
        [
            (r"embed/table", ("tp", "fsdp")),
            (r"blocks/attention/wqkv", (stages, "fsdp", "tp")),
            (r"blocks/attention/wo", (stages, "tp", "fsdp")),
            (r"blocks/mlp/w_gate_up", (stages, "fsdp", "tp")),
            (r"blocks/mlp/w_down", (stages, "tp", "fsdp")),
            (r"head/w", ("fsdp", "tp")),
            (r"blocks/\w+_norm", (stages,)),
            (r"final_norm", ()),
        ]
    )
    specs = model.specs(CONFIG, mesh, rules)
    state = tree.layouts({"params": specs, "opt": optim.adamw(1e-3).init(specs)})

    def zero(path, layout):
        flat = path.startswith("opt/") and len(layout.shape) > 1 and "dp" not in layout.sharded
        return layout.replace(flat=("dp",)) if flat else layout

    return map_with_path(zero, state) | {
        "step": Layout((), torch.int64, mesh),
        "key": Layout((2,), torch.int64, mesh),
    }


def experts(mesh):
    """Layouts of an MoE tree: dense leaves on the mesh, experts on a view that folds dp·fsdp·tp into edp·ep·etp."""
    n, L, E, D, F = mesh["dp"] * mesh["fsdp"] * mesh["tp"], 4, 6, 8, 12
    ep = next(k for k in (3, 2, 4, 6, 1) if n % k == 0 and (n // k) <= 4)
    etp = math.gcd(n // ep, 2)
    if len(mesh.digits) == 1:
        own = Mesh(pp=mesh["pp"], dp=mesh["dp"], fsdp=mesh["fsdp"], tp=mesh["tp"])
        folded = own.view(pp=mesh["pp"], edp=n // ep // etp, ep=ep, etp=etp)
    else:
        folded = Mesh(pp=mesh["pp"], edp=n // ep // etp, ep=ep, etp=etp)

    def on(mesh, shape, *spec, dtype=torch.bfloat16, flat=()):
        return Layout(shape, dtype, mesh, spec, flat=flat)

    def moe(dtype, flat=()):
        return {
            "router": on(mesh, (L, D, E), "pp", "fsdp", dtype=torch.float32),
            "w_in": on(folded, (L, E, D, 2 * F), "pp", "ep", None, Split("etp", (F, F)), dtype=dtype, flat=flat),
            "w_out": on(folded, (L, E, F, D), "pp", "ep", "etp", dtype=dtype, flat=flat),
            "shared": on(mesh, (L, D, 2 * F), "pp", "fsdp", Split("tp", 2), dtype=dtype),
        }

    f32 = torch.float32
    moments = {"m": moe(f32, ("edp",)), "v": moe(f32, ("edp",)), "master": moe(f32, ("edp",))}
    fp8 = on(folded, (L, E, D), "pp", ("ep", "edp"), dtype=torch.float8_e4m3fn)
    counts = on(folded, (L, E), None, "ep", dtype=torch.int64)
    return {"params": moe(torch.bfloat16), "opt": moments, "scales": fp8, "tokens": counts}
