"""Optimizers that look at more than one element, written by hand on sharded leaves: Muon, Adafactor, Lion.

Muon exchanges the shards of a stack of matrices over tp, so that every rank holds some whole ones; Adafactor's means
and sizes are sums over the axes that split a dim. The mutants of `of_optimizers.py` are this file with a line changed.
"""

import torch

from fmegatron.collectives import Axes, all_gather, all_to_all, enter, psum, shard
from fmegatron.layout import Layout, Mesh
from fmegatron.step import value_and_grad

L, M, N, B = 4, 8, 12, 16
SHAPES = {"w_LMN": ((L, M, N), (None, "fsdp", "tp")), "u_MN": ((M, N), ("fsdp", "tp")), "b_M": ((M,), ("fsdp",))}


def layouts(mesh: Mesh) -> tuple:
    """Layouts of the arguments (state, batch)."""
    p = {k: Layout(shape, torch.float64, mesh, spec) for k, (shape, spec) in SHAPES.items()}
    row, col = Layout((M,), torch.float64, mesh, ("fsdp",)), Layout((N,), torch.float64, mesh, ("tp",))
    state = {"p": p, "muon": p["w_LMN"], "row_M": row, "col_N": col, "lion": p["b_M"]}
    return state, {"x_BM": Layout((B, M), torch.float64, mesh, (("dp", "fsdp"),))}


def values() -> tuple:
    """Global arguments."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape, low=-0.5):
        return torch.rand(shape, generator=generator, dtype=torch.float64) + low

    state = {"p": {k: draw(s) for k, (s, _) in SHAPES.items()}, "muon": draw((L, M, N)) * 0.1}
    return state | {"row_M": draw((M,), 0.1), "col_N": draw((N,), 0.1), "lion": draw((M,))}, {"x_BM": draw((B, M))}


def orthogonal(g_LMN: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz on whole matrices: towards the nearest semi-orthogonal ones."""
    x_LMN = g_LMN / (g_LMN.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    for _ in range(2):
        a_LMM = x_LMN @ x_LMN.transpose(1, 2)
        x_LMN = 1.5 * x_LMN - 0.5 * a_LMM @ x_LMN
    return x_LMN


def make_step(mesh: Mesh):
    """step(state, batch) -> (state, metrics) over the symbolic axes dp, fsdp, tp of a mesh."""
    axes = Axes(mesh)
    dp, fsdp, tp = axes["dp"], axes["fsdp"], axes["tp"]

    def loss_fn(p, batch):
        w_LMN, u_MN, b_M = (
            all_gather(p["w_LMN"], fsdp, 1),
            all_gather(p["u_MN"], fsdp, 0),
            all_gather(p["b_M"], fsdp, 0),
        )
        x_BM = enter(batch["x_BM"] + b_M, tp)
        h_LBN = torch.tanh(x_BM @ w_LMN) + x_BM @ u_MN
        y_B = psum(h_LBN.square().sum((0, 2)), tp)
        return (y_B - 1).square().sum() / B

    def muon(g_LMN, m_LMN):
        m_LMN = 0.9 * m_LMN + g_LMN
        d_LMN = g_LMN + 0.9 * m_LMN
        d_LMN = all_gather(d_LMN, fsdp, 1)
        d_LMN = all_to_all(d_LMN, tp, split_dim=0, concat_dim=2)
        d_LMN = orthogonal(d_LMN)
        d_LMN = all_to_all(d_LMN, tp, split_dim=2, concat_dim=0)
        d_LMN = shard(d_LMN, fsdp, 1)
        return d_LMN * 0.2 * max(M, N) ** 0.5, m_LMN

    def adafactor(g_MN, p_MN, row_M, col_N):
        squares_MN = g_MN.square() + 1e-12
        row_M = 0.9 * row_M + 0.1 * psum(squares_MN.sum(1), tp) / N
        col_N = 0.9 * col_N + 0.1 * psum(squares_MN.sum(0), fsdp) / M
        mean = psum(row_M.sum(), fsdp) / M
        d_MN = g_MN / (row_M[:, None] * col_N[None, :] / mean).sqrt()
        size_d = (psum(d_MN.square().sum(), axes["fsdp", "tp"]) / (M * N)).sqrt()
        size_p = (psum(p_MN.square().sum(), axes["fsdp", "tp"]) / (M * N)).sqrt()
        return d_MN * size_p.clamp(min=1e-3) / (size_d / 0.02).clamp(min=1), row_M, col_N

    def lion(g_M, m_M):
        return torch.tanh(50 * (0.9 * m_M + 0.1 * g_M)), 0.99 * m_M + 0.01 * g_M

    def step(state, batch):
        (loss, _), raw = value_and_grad(loss_fn)(state["p"], batch)
        g = {k: psum(x, dp) for k, x in raw.items()}
        p, d = state["p"], {}
        d["w_LMN"], m_LMN = muon(g["w_LMN"], state["muon"])
        d["u_MN"], row_M, col_N = adafactor(g["u_MN"], p["u_MN"], state["row_M"], state["col_N"])
        d["b_M"], m_M = lion(g["b_M"], state["lion"])
        new = {k: x - 0.02 * d[k] for k, x in p.items()}
        norms = {k: psum(x.square().sum(), axes[[a for a in SHAPES[k][1] if a]]).sqrt() for k, x in g.items()}
        kept = {"muon": m_LMN, "row_M": row_M, "col_N": col_N, "lion": m_M}
        return {"p": new, **kept}, {"loss": psum(loss, axes["dp", "fsdp"]), "norms": norms}

    return step
