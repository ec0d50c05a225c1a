"""The decoder's loss is its definition on any mesh, for any number of microbatches, and the check proves it."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision, psum
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.array_specs import init
from fmegatron.model.mtp import ahead
from fmegatron.model.rope import Rope
from fmegatron.step.checker.entrypoints import check_call
from fmegatron.testing import simulate
from fmegatron.testing.compare_ranks import relative_error
from tests.definition import loss_of, mean_of
from tests.fresh_state import fresh_state
from tests.pairs import few

B, S, V, F64 = 16, 8, 48, torch.float64
DATA = ("dp", "fsdp", "ep")
STRATEGIES = {"zero3": DataParallel(DATA, *[("fsdp",)] * 3), "zero2": DataParallel(DATA, (), ("fsdp",), ("fsdp",))}
SIZES = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_seq": S, "vocab_multiple": 8}
llama = functools.partial(model.llama, V, **SIZES, precision=Precision.fp64())
ROUTER = nn.Router(4, 2, normalised=True)
NORM = model.RMSNorm()
ATTENTION = model.Part("attention", model.Attention(4, 2, 4, Rope(4)), NORM)
BLOCK = (ATTENTION, model.Part("mlp", model.MLP(24), NORM))
SPARSE = (ATTENTION, model.Part("mlp", model.MoE(ROUTER, 8, z_loss=0.05), NORM))
further = functools.partial(model.Decoder, V, 16, max_seq=S, norm=NORM, vocab_multiple=8, precision=Precision.fp64())
MESHES = {
    "one": Mesh(), "dp2": Mesh(dp=2), "fsdp2": Mesh(fsdp=2), "tp2": Mesh(tp=2), "dp2 tp2": Mesh(dp=2, tp=2),
    "cp2": Mesh(cp=2), "ep2": Mesh(ep=2), "fsdp2 cp2": Mesh(fsdp=2, cp=2),
}  # fmt: skip


class Case(NamedTuple):
    decoder: model.Decoder
    batch: str
    how: dict = {}  # noqa: RUF012  (never changed)
    loss: Any = None  # None: model.loss


def from_logits(params, given, decoder, axes, save):
    """nll[B, S] of whole logits."""
    logits_BSV = model.logits(params, given["tokens"], decoder, axes, save)
    return nn.cross_entropy(logits_BSV, given["labels"], axes["tp"], decoder.vocab_size)


def preferences(params, batch, decoder, axes, save=None, beta=0.5, losses=model.token_losses):
    """DPO (arXiv 2305.18290, equation 7): a mean over pairs of which each is a row, equal on the ranks of cp."""

    def logp_B(side):
        given = {"tokens": batch[side], "labels": batch[f"{side}_labels"]}
        nll_BS, _ = losses(params, given, decoder, axes, save)
        return -psum((nll_BS * batch[f"{side}_mask"]).sum(1), axes.sequence)

    margin_B = logp_B("chosen") - logp_B("rejected") - (batch["ref_chosen"] - batch["ref_rejected"])
    over = tuple(name for name in axes.data if name not in axes.sequence.names)
    w, mean = batch["weight"], functools.partial(step.mean, over=over)
    loss = {"dpo": mean(-(F.logsigmoid(beta * margin_B) * w).sum(), w.sum())}
    return loss, {"accuracy": mean(((margin_B > 0) * w).sum(), w.sum())}


def moe(**losses):
    return llama(mlp=model.MoE(ROUTER, 8, **losses))


CASES = {
    "weights of 0.01": Case(llama(), "small"),
    "mask": Case(llama(), "01"),
    "padding, labels of -100": Case(llama(tied=True, loss_chunks=2), "padded"),
    "lm and z, weights": Case(llama(z_loss=0.1), "weights"),
    "MTP, weights": Case(further((BLOCK,) * 2, mtp=model.MTP(BLOCK, 2, 0.3)), "ahead"),
    "MTP of experts": Case(further((BLOCK, SPARSE), mtp=model.MTP(SPARSE, 1, 0.3)), "ahead"),
    "experts: z, balance of sequences, padding": Case(moe(sequence_balance=0.1, z_loss=0.05), "padded"),
    "experts: balance of the batch, padding": Case(moe(balance=0.1, z_loss=0.05), "padded", {"twice": True}),
    "preferences": Case(llama(), "pairs", loss=functools.partial(preferences, losses=from_logits)),
    "preferences of token_losses": Case(llama(tied=True, loss_chunks=2), "pairs", loss=preferences),
}


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Nothing counts in rows 2 to 7: of 4 microbatches the second is empty, and the first on one of two ranks."""
    g = torch.Generator().manual_seed(3)
    batch = {name: torch.randint(0, V, (B, S), generator=g) for name in ("tokens", "labels")}
    rows = torch.arange(B)[:, None]
    some = (rows < 2) | (rows > 7)
    if kind == "01":
        batch["mask"] = (torch.rand(B, S, generator=g) < 0.9 - 0.05 * rows) & some
    if kind in ("weights", "padded"):
        batch["mask"] = torch.tensor([0.02, 0.5, 1.3], dtype=F64)[torch.randint(0, 3, (B, S), generator=g)] * some
    if kind == "small":
        batch["mask"] = torch.full((B, S), 0.01, dtype=F64)
    if kind == "padded":  # padding behind the text; "not learned from" is another thing: mask 0 in rows 2 to 7
        real = torch.arange(S) < torch.tensor([8, 3, 5, 8, 2, 7, 4, 1]).repeat(2)[:, None]
        batch["documents"] = torch.where(real, 0, -1)
        batch["labels"] = torch.where(real, batch["labels"], -100)
    if kind == "ahead":
        batch["mask"] = torch.rand(B, S, generator=g, dtype=F64) * some
        batch = dict(ahead(batch, 2))
    if kind == "pairs":
        sides = [f"{side}{what}" for side in ("chosen", "rejected") for what in ("", "_labels")]
        batch = {name: torch.randint(0, V, (B, S), generator=g) for name in sides}
        for side in ("chosen", "rejected"):
            batch[f"{side}_mask"] = (torch.rand(B, S, generator=g) < 0.7).double()
            batch[f"ref_{side}"] = -10 * torch.rand(B, generator=g, dtype=F64)
        batch["weight"] = torch.tensor([1.0, 0.3, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0.1, 1, 1, 0, 3], dtype=F64)
    return batch


def given(name: str) -> dict[str, torch.Tensor]:
    """The batch of a case, with as many tokens ahead as its decoder predicts."""
    of, batch = CASES[name].decoder, batch_of(CASES[name].batch)
    depths = 0 if of.mtp is None else of.mtp.depths
    return {k: x[..., :depths].contiguous() if "ahead" in k else x for k, x in batch.items()}


@functools.cache
def wanted(name: str):
    """(loss, {name: mean}, parameters, gradients) on one rank by plain autograd."""
    case, axes = CASES[name], Axes(Mesh())
    params, g = init(case.decoder, Mesh(), 0), torch.Generator().manual_seed(7)
    params = tree.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=g, dtype=x.dtype), params)
    leaves = tree.map(lambda x: x.clone().requires_grad_(), params)
    parts, metrics = (case.loss or model.loss)(leaves, given(name), case.decoder, axes)
    shown = parts | {k: x for k, x in metrics.items() if isinstance(x, step.Part)}
    shown.pop("imbalance", None)  # of loads of a microbatch
    loss = loss_of(parts)
    found = torch.autograd.grad(loss, tree.leaves(leaves), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(found, tree.leaves(leaves), strict=True)]
    return loss.detach(), {k: mean_of(x).detach() for k, x in shown.items()}, params, grads


def compared(name: str, mesh: Mesh, n: int, save, strategy: DataParallel):
    """(largest relative error of loss, means and gradients, the report of the check)."""
    case, optimizer = CASES[name], optim.sgd(1.0)
    axes, layouts = Axes(mesh, data=mesh.axes(strategy.tokens)), model.layouts(case.decoder, mesh, strategy=strategy)
    of = {"decoder": case.decoder, "axes": axes, "save": save}
    loss_fn = functools.partial(case.loss or model.loss, **of)
    how = {"microbatches": n, "clip_norm": None, **(case.how if n > 1 else {})}
    train = step.build_train_step(loss_fn, optimizer, layouts, axes, strategy=strategy, **how)
    loss, means, params, grads = wanted(name)
    specs = step.state_specs(model.specs(case.decoder, mesh, strategy=strategy), optimizer, strategy)
    batch = given(name)
    rows = {k: strategy.batch_layout(tuple(x.shape), x.dtype, mesh, n) for k, x in batch.items()}
    at = (tree.layouts(specs), rows)
    sim = simulate(train, mesh, fresh_state(params, optimizer), batch, layouts=at)
    report = check_call(sim.traced, mesh, (), "train_step", {}, speak=False)
    after, metrics = sim.globals()
    errors = [relative_error(metrics["loss"], loss), *(relative_error(metrics[k], x) for k, x in means.items())]
    for p, new, g in zip(tree.leaves(params), tree.leaves(after.params), grads, strict=True):
        errors.append(float(((p - new) - g).abs().max() / g.abs().max().clamp(min=1e-300)))
    return max(errors), report


POSSIBLE = [
    (name, mesh, n, save, "zero3")
    for name in CASES
    for mesh in MESHES
    for n in (1, 2, 4)
    for save in (None, "mincut")
    if ("experts" in name or mesh != "ep2") and (save is None or mesh in ("one", "dp2 tp2", "cp2", "ep2"))
]
POSSIBLE += [(name, "fsdp2", 4, "mincut", "zero2") for name in CASES]


@pytest.mark.medium
@pytest.mark.parametrize(("name", "mesh", "n", "save", "strategy"), few(3, POSSIBLE))
def test_it_is_the_definition(name, mesh, n, save, strategy):
    worst, report = compared(name, MESHES[mesh], n, save, STRATEGIES[strategy])
    assert worst <= 1e-10 and report.ok, f"{worst}\n{report}"


def test_padding_is_not_what_is_not_learned_from():
    """Router losses count the tokens that are no padding, whatever the mask; the loss counts what is learned from."""
    of, axes = moe(sequence_balance=0.1, z_loss=0.05), Axes(Mesh())
    batch = given("experts: z, balance of sequences, padding")
    parts, _ = model.loss(init(of, Mesh(), 0), batch, of, axes)
    shown, real = step.means(parts, axes), batch["documents"] >= 0
    assert shown["router_z/count"] == shown["sequence_balance/count"] == real.sum()
    assert shown["lm/count"] == (batch["mask"] * real).sum()
    stated = {k: x for k, x in batch.items() if k != "documents"} | {"padding": ~real, "documents": real * 0}
    other, _ = model.loss(init(of, Mesh(), 0), stated, of, axes)
    assert step.means(other, axes)["router_z/count"] == real.sum()


def test_a_statistic_called_loss_is_refused():
    """What a mixer added to the loss before it had `losses`."""

    class Old(model.PerToken):
        def arrays(self, dim):
            return {"w": model.Array((dim,))}

        def __call__(self, u, w, at):
            return u * w["w"], {"loss": u.sum()}

        def __hash__(self):
            return 0

        def __eq__(self, other):
            return type(self) is type(other)

    of = model.Decoder(V, 16, ((model.Part("old", Old(), NORM),),), S, NORM, precision=Precision.fp64())
    with pytest.raises(ValueError, match=r"Old of the part 'old': got a statistic 'loss', .* a method losses"):
        model.loss(init(of, Mesh(), 0), batch_of("plain"), of, Axes(Mesh()))
