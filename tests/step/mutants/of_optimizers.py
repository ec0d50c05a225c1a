"""Wrong versions of `optimizers.py`."""

from tests.step.mutants.mutate import Mutant as M

TO = "d_LMN = all_to_all(d_LMN, tp, split_dim=0, concat_dim=2)"
FROM = "d_LMN = all_to_all(d_LMN, tp, split_dim=2, concat_dim=0)"
ROW = "psum(squares_MN.sum(1), tp) / N"
COLUMN = "psum(squares_MN.sum(0), fsdp) / M"
SIZE = 'size_d = (psum(d_MN.square().sum(), axes["fsdp", "tp"]) / (M * N)).sqrt()'
LION = "torch.tanh(50 * (0.9 * m_M + 0.1 * g_M)), 0.99 * m_M + 0.01 * g_M"

MUTANTS = (
    # ---- Muon
    M("muon_of_shards", "Every rank makes its own columns orthogonal.",
      f"{TO}\n        d_LMN = orthogonal(d_LMN)\n        {FROM}",
      "pass\n        d_LMN = orthogonal(d_LMN)\n        pass"),
    M("muon_of_columns", "Matrices are not exchanged: products of columns are terms of a sum.",
      "d_LMN = orthogonal(d_LMN)",
      "d_LMN = orthogonal(wrong.fm.all_to_all(d_LMN, tp, 2, 0)).repeat(1, 1, tp.size)[:2]"),
    M("muon_exchange_axis", "Matrices are exchanged over fsdp, whose ranks hold the same columns.",
      TO, "d_LMN = all_to_all(d_LMN, fsdp, split_dim=0, concat_dim=2)"),
    M("muon_exchange_dim", "Rows are put together where columns are split.",
      TO, "d_LMN = all_to_all(d_LMN, tp, split_dim=0, concat_dim=1).reshape(L // tp.size, M, N)"),
    M("muon_back_axis", "Matrices come back over fsdp.",
      FROM, "d_LMN = all_to_all(d_LMN, fsdp, split_dim=2, concat_dim=0)"),
    M("muon_back_by_gather", "Each rank takes its own columns of what all gathered, in the order of rows.",
      FROM, "d_LMN = wrong.fm.all_gather(d_LMN[:, :, : N // tp.size], tp, 0)"),
    M("muon_rows_not_gathered", "Only this rank's rows of fsdp are made orthogonal.",
      "d_LMN = all_gather(d_LMN, fsdp, 1)", "d_LMN = d_LMN.repeat(1, fsdp.size, 1)"),
    M("muon_rows_twice", "Rows are cut by the index along dp instead of fsdp.",
      "d_LMN = shard(d_LMN, fsdp, 1)", "d_LMN = shard(d_LMN, dp, 1)"),
    M("muon_summed", "Whole updates of all ranks are added up.",
      "d_LMN = orthogonal(d_LMN)", "d_LMN = psum(orthogonal(d_LMN), tp)"),
    M("muon_local_scale", "The scale is made of the shape of a shard.",
      "d_LMN * 0.2 * max(M, N) ** 0.5", "d_LMN * 0.2 * max(d_LMN.shape[1:]) ** 0.5", "simulate"),
    M("muon_norm_of_shard", "Matrices are divided by the norm of this rank's rows before they are exchanged.",
      "d_LMN = g_LMN + 0.9 * m_LMN", "d_LMN = g_LMN / g_LMN.square().sum((1, 2), keepdim=True).sqrt() + 0.9 * m_LMN"),
    M("muon_raw", "Momentum adds gradients that are not summed over dp.",
      'muon(g["w_LMN"], state["muon"])', 'muon(raw["w_LMN"], state["muon"])'),
    M("muon_order", "A quintic term with the wrong sign.", "1.5 * x_LMN - 0.5 * a_LMM", "1.5 * x_LMN + 0.5 * a_LMM",
      "simulate"),
    # ---- Adafactor
    M("row_local", "A row's mean is that of this rank's columns.", ROW, "squares_MN.mean(1)"),
    M("row_not_summed", "A row's sum leaves out other ranks' columns.", ROW, "squares_MN.sum(1) / N"),
    M("row_axis", "A row's sum runs over fsdp.", ROW, "psum(squares_MN.sum(1), fsdp) / N"),
    M("row_local_count", "A row's sum is divided by this rank's number of columns.",
      ROW, "psum(squares_MN.sum(1), tp) / squares_MN.shape[1]", "simulate"),
    M("column_local", "A column's mean is that of this rank's rows.", COLUMN, "squares_MN.mean(0)"),
    M("column_dp", "A column's sum runs over dp too.", COLUMN, 'psum(squares_MN.sum(0), axes["dp", "fsdp"]) / M'),
    M("column_sharded_twice", "A column's sum is taken over tp, which splits the columns.",
      COLUMN, "psum(squares_MN.sum(0), tp) / M"),
    M("mean_local", "The mean of all rows is that of this rank's.", "mean = psum(row_M.sum(), fsdp) / M",
      "mean = row_M.mean()"),
    M("size_local", "The size of an update is that of this rank's shard.", SIZE,
      "size_d = d_MN.square().mean().sqrt()"),
    M("size_one_axis", "The size of an update is summed over one of two axes.", SIZE,
      SIZE.replace('axes["fsdp", "tp"]', "tp")),
    M("size_over_replicas", "The size of an update counts replicas.", SIZE,
      SIZE.replace('axes["fsdp", "tp"]', 'axes["dp", "fsdp", "tp"]'), "simulate"),
    M("size_max", "The largest element of a shard stands for the size.", SIZE, "size_d = d_MN.abs().amax()"),
    M("squares_raw", "Squares of gradients that are not summed over dp.",
      'adafactor(g["u_MN"], p["u_MN"]', 'adafactor(raw["u_MN"], p["u_MN"]'),
    # ---- Lion, norms
    M("lion_sign_of_terms", "The sign is taken on each replica, then summed.",
      'lion(g["b_M"], state["lion"])', 'lion(raw["b_M"], state["lion"])'),
    M("lion_vote", "Signs of replicas that agree are added up.", LION,
      "psum(torch.tanh(50 * (0.9 * m_M + 0.1 * g_M)), dp), 0.99 * m_M + 0.01 * g_M"),
    M("lion_noise", "Every rank rounds its copy by random numbers of its own.", LION,
      "torch.tanh(50 * (0.9 * m_M + 0.1 * g_M)) + wrong.own_noise(m_M, dp), 0.99 * m_M + 0.01 * g_M"),
    M("lion_sorted", "Elements of a shard are sorted among themselves.", LION,
      "torch.tanh(50 * (0.9 * m_M + 0.1 * g_M).sort()[0]), 0.99 * m_M + 0.01 * g_M", "simulate"),
    M("group_norm_axes", "The norm of a group is summed over all axes of the mesh.",
      "axes[[a for a in SHAPES[k][1] if a]]", 'axes["fsdp", "tp"]'),
    M("group_norm_local", "The norm of a group is that of this rank.",
      "psum(x.square().sum(), axes[[a for a in SHAPES[k][1] if a]]).sqrt()", "x.square().sum().sqrt()"),
)  # fmt: skip
