"""Sequences that cp splits: positions, windows, scans, alignments, choices, packed documents, poolings."""

import torch

from fmegatron import step
from fmegatron.collectives import all_gather, axis_index, ppermute, psum, shard
from tests.step.arrivals.frame import descend, sgd, step_of, summed

ATTENTION = {"wq": "8,12", "wk": "8,12", "wv": "8,12", "wo": "12,8"}


def positions(x, cp, how=""):
    """[S_cp]: of a rank's tokens in the whole sequence."""
    n = x.shape[1]
    return torch.arange(n, device=x.device) + (0 if how == "positions_from_zero" else axis_index(cp, x) * n)


def rotated(x, at):
    """RoPE by hand on [B, S, H, 4]."""
    angle = at[:, None].to(x.dtype) * torch.tensor([1.0, 0.1], dtype=x.dtype, device=x.device)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@step_of(
    "cp2 cp3 dp2·cp2",
    ATTENTION,
    "gathered rotated_late",
    "positions_from_zero mask_from_zero own_keys keys_not_rotated_by_owner",
)
def rope(axes, how):
    """Causal attention with rotary positions by hand, keys and values of all ranks gathered."""
    data, cp = axes["dp", "cp"], axes["cp"]

    def heads(x, w):
        return (x @ w).unflatten(-1, (3, 4))

    def part(w, b):
        x, at = b["seq"], positions(b["seq"], cp, how)
        q, k, v = rotated(heads(x, w["wq"]), at), heads(x, w["wk"]), heads(x, w["wv"])
        keys_at = torch.arange(x.shape[1] * cp.size, device=x.device)
        if how == "own_keys":
            k, keys_at = rotated(k, at), at
        elif how == "rotated_late":
            k, v = rotated(all_gather(k, cp, 1), keys_at), all_gather(v, cp, 1)
        elif how == "keys_not_rotated_by_owner":
            k, v = all_gather(rotated(k, keys_at[: x.shape[1]]), cp, 1), all_gather(v, cp, 1)
        else:
            k, v = all_gather(rotated(k, at), cp, 1), all_gather(v, cp, 1)
        rows = torch.arange(x.shape[1], device=x.device) if how == "mask_from_zero" else positions(x, cp)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
        weights = scores.masked_fill(keys_at > rows[:, None], -1e9).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2) @ w["wo"]
        return ((out - x).square().mean(-1) * b["mask"]).sum() / psum(b["mask"].sum(), data)

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "cp2 cp3 dp2·cp2",
    {"taps": "3,8", "mix": "8,8"},
    "halo gathered",
    "zeros_before wrong_side@cp3 one_of_two own_rows_of_gathered",
)
def window(axes, how):
    """A causal window of three tokens, whose first two are the rank's before."""
    data, cp = axes["dp", "cp"], axes["cp"]

    def part(w, b):
        x, n = b["seq"], b["seq"].shape[1]
        tail = x[:, -2:]
        if how in ("gathered", "own_rows_of_gathered"):
            whole = all_gather(x, cp, 1)
            whole = torch.cat([torch.zeros_like(whole[:, :2]), whole], 1)
            wide = torch.stack([whole[:, i : i + n * cp.size] for i in range(3)])
            wide = wide[:, :, :n] if how == "own_rows_of_gathered" else shard(wide, cp, 2)
            seen = torch.einsum("tbsd,td->bsd", wide, w["taps"])
        else:
            before = ppermute(tail, cp, -1 if how == "wrong_side" else 1)
            first = axis_index(cp, x) == 0
            if how == "zeros_before":
                before = torch.zeros_like(tail)
            elif how == "one_of_two":
                before = torch.cat([torch.zeros_like(before[:, :1]), before[:, 1:]], 1)
            before = torch.where(first, torch.zeros_like(before), before)
            wide = torch.cat([before, x], 1)
            seen = sum(wide[:, i : i + n] * w["taps"][i] for i in range(3))
        error = ((seen @ w["mix"] - x).square().mean(-1) * b["mask"]).sum()
        return error / psum(b["mask"].sum(), data)

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "cp2 cp3",
    {"gate": "8,8", "into": "8,8"},
    "carried gathered",
    "no_carry carry_undecayed last_rank_only@cp3 carry_of_gathered_all gathered_and_sharded",
)
def gated_scan(axes, how):
    """h = a h + u: each rank scans its part, and carries on what the ranks before have left."""
    cp = axes["cp"]

    def scan(a, u):
        h, every = torch.zeros_like(u[:, 0]), []
        for i in range(u.shape[1]):
            h = a[:, i] * h + u[:, i]
            every.append(h)
        return torch.stack(every, 1)

    def part(w, b):
        x = b["seq"]
        a, u = torch.sigmoid(x @ w["gate"]), x @ w["into"]
        if how in ("gathered", "gathered_and_sharded"):
            h = scan(all_gather(a, cp, 1), all_gather(u, cp, 1))
            # the transpose of shard brings the whole gradient to all ranks, which then is summed n times
            h = shard(h, cp, 1) if how == "gathered_and_sharded" else h.index_select(1, positions(x, cp))
        else:
            h, decay = scan(a, u), a.cumprod(1)
            ends = all_gather(torch.stack([decay[:, -1], h[:, -1]])[None], cp, 0)
            carry, here = torch.zeros_like(u[:, 0]), axis_index(cp, x)
            for rank in range(ends.shape[0]):
                before = rank < here
                if how == "last_rank_only":
                    before = rank == here - 1
                elif how == "carry_of_gathered_all":
                    before = rank <= here
                carry = torch.where(before, ends[rank, 0] * carry + ends[rank, 1], carry)
            if how == "carry_undecayed":
                h = h + carry[:, None]
            elif how != "no_carry":
                h = h + decay * carry[:, None]
        return (h - x).square().sum() / (12 * 12 * 8)

    return lambda w, b: descend(part, w, b, cp)


@step_of(
    "cp2 cp3",
    {"emit": "8,6"},
    "shares own_gradient",
    "counted_on_each own_alignment gradient_psummed_of_shares ends_of_own",
)
def alignment(axes, how):
    """A CTC-like loss: the log-sum-exp over all monotone ways through six states, on gathered emissions."""
    cp = axes["cp"]

    def forward(logs):
        alpha = torch.full_like(logs[:, 0], -1e3)
        alpha = torch.cat([logs[:, 0, :1], alpha[:, 1:]], 1)
        for t in range(1, logs.shape[1]):
            before = torch.cat([torch.full_like(alpha[:, :1], -1e3), alpha[:, :-1]], 1)
            alpha = torch.logaddexp(alpha, before) + logs[:, t]
        return -torch.logsumexp(alpha[:, 3:], 1).mean()

    def part(w, b):
        logs = (b["seq"] @ w["emit"]).log_softmax(-1)
        if how == "own_alignment":
            return forward(logs) / cp.size
        every = all_gather(logs, cp, 1)
        if how == "own_gradient":
            here = axis_index(cp, logs)
            own = torch.cat([(logs - logs.detach()) * (here == rank) for rank in range(cp.size)], 1)
            return forward(every.detach() + own)
        if how == "ends_of_own":
            every = torch.cat([every[:, :-1], logs[:, -1:]], 1)
        return forward(every) / (1 if how == "counted_on_each" else cp.size)

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(part)(w, b)
        value = value if how in ("counted_on_each", "own_gradient") else psum(value, cp)
        grads = summed(grads, cp)
        return sgd(w, summed(grads, cp) if how == "gradient_psummed_of_shares" else grads), {"loss": value}

    return train_step


@step_of(
    "cp2 cp3 dp2·cp2",
    {"router": "8", "up": "8,12", "down": "12,8"},
    "of_all",
    "own_share own_threshold threshold_averaged",
)
def depths(axes, how):
    """Mixture of depths: four of a sequence's twelve tokens go through the block."""
    data, cp = axes["dp", "cp"], axes["cp"]

    def part(w, b):
        x = b["seq"]
        scores = x @ w["router"]
        if how in ("own_share", "threshold_averaged"):
            least = scores.topk(4 // (1 if how == "threshold_averaged" else cp.size), 1).values[:, -1:]
            least = psum(least, cp) / cp.size if how == "threshold_averaged" else least
        elif how == "own_threshold":
            least = scores.topk(scores.shape[1] // 3, 1).values[:, -1:]
        else:
            least = all_gather(scores, cp, 1).topk(4, 1).values[:, -1:]
        through = (scores >= least.detach()).to(x.dtype)[..., None]
        out = x + through * torch.sigmoid(scores)[..., None] * (torch.relu(x @ w["up"]) @ w["down"])
        return (out - x.flip(-1)).square().sum() / (12 * 12 * 8)

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "cp2 cp3 dp2·cp2",
    {"emb": "24,8", "out": "8,24"},
    "counted_over_ranks looked_up_gathered",
    "own_lengths own_documents length_averaged",
)
def packed(axes, how):
    """Each packed document counts once, however long; some of them go on on the next rank."""
    data, cp = axes["dp", "cp"], axes["cp"]

    def part(w, b):
        logs = (w["emb"][b["tok"]] @ w["out"]).log_softmax(-1)
        nll = -logs.gather(-1, b["tgt"][..., None])[..., 0]
        hot = torch.nn.functional.one_hot(b["seg"], 13).to(nll.dtype)
        if how == "looked_up_gathered":
            every = all_gather(b["seg"], cp, 1)
            length = (b["seg"][:, :, None] == every[:, None]).to(nll.dtype).sum(-1)
            return (nll / length).sum() / psum((1 / length).sum(), data)
        lengths = hot.sum(1) if how == "own_lengths" else psum(hot.sum(1), cp)
        if how == "length_averaged":
            lengths = lengths / cp.size
        weights = 1 / lengths.gather(1, b["seg"]).clamp(min=1)
        documents = psum((hot.sum(1) > 0).sum() if how != "counted_over_ranks" else weights.sum(), data)
        return (nll * weights).sum() / documents

    return lambda w, b: descend(part, w, b, data)


@step_of(
    "cp2 cp3 dp2·cp2",
    {"emb": "24,8", "head": "8,8", "last": "8"},
    "means once_in_cp",
    "means_of_ranks head_summed_over_all own_length lasts_of_own",
)
def pooled(axes, how):
    """A reward of a text: the masked mean of its tokens, and a head on that, which all ranks of cp compute alike."""
    dp, cp = axes["dp"], axes["cp"]

    def loss_fn(w, b):
        h, mask = torch.tanh(w["emb"][b["tok"]]), b["mask"][..., None]
        n = mask.sum(1)
        if how == "means_of_ranks":
            text = psum((h * mask).sum(1) / n.clamp(min=1), cp) / cp.size
        elif how == "lasts_of_own":
            text = psum(h[:, -1], cp) / cp.size
        else:
            text = psum((h * mask).sum(1), cp) / (n.clamp(min=1) if how == "own_length" else psum(n, cp))
        said = torch.relu(text @ w["head"]) @ w["last"]
        return (said - b["rew"]).square().sum() / 12

    def train_step(w, b):
        (value, _), grads = step.value_and_grad(loss_fn)(w, b)
        grads = summed(grads, dp)
        grads["emb"] = psum(grads["emb"], cp)
        if how == "head_summed_over_all":
            grads["head"], grads["last"] = psum(grads["head"], cp), psum(grads["last"], cp)
        elif how == "once_in_cp":
            grads["last"] = psum(grads["last"] * (axis_index(cp, value) == 0), cp)
        return sgd(w, grads), {"loss": psum(value, dp)}

    return train_step


@step_of(
    "cp2 cp3",
    {"value": "8", "more": "8,8"},
    "gathered suffixes",
    "own_part first_part_of_all carry_undiscounted future_of_all",
)
def returns(axes, how):
    """Discounted returns, the last token first, as targets of a value head."""
    cp = axes["cp"]

    def backwards(r):
        g, every = torch.zeros_like(r[:, 0]), []
        for i in reversed(range(r.shape[1])):
            g = r[:, i] + 0.9 * g
            every.insert(0, g)
        return torch.stack(every, 1)

    def part(w, b):
        r, n = b["adv"], b["adv"].shape[1]
        if how in ("gathered", "first_part_of_all"):
            every = backwards(all_gather(r, cp, 1))
            target = every[:, :n] if how == "first_part_of_all" else shard(every, cp, 1)
        else:
            target = backwards(r)
            heads = all_gather(target[:, :1], cp, 1)
            later = torch.zeros_like(target[:, 0])
            here = axis_index(cp, r)
            for rank in reversed(range(heads.shape[1])):
                behind = rank >= here if how == "future_of_all" else rank > here
                later = torch.where(behind, heads[:, rank] + 0.9**n * later, later)
            decay = 0.9 ** (n - torch.arange(n, device=r.device)).to(r.dtype)
            if how == "carry_undiscounted":
                decay = torch.ones_like(decay)
            target = target if how == "own_part" else target + decay * later[:, None]
        error = (torch.tanh(b["seq"] @ w["more"]) @ w["value"] - target).square() * b["mask"]
        return error.sum() / psum(b["mask"].sum(), cp)

    return lambda w, b: descend(part, w, b, cp)
