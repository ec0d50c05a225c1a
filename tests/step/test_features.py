"""Seventeen features, each built of a loss, an optimizer and specs alone: proven by the check, and equal to one rank.

Only what users write is used here: `step.build` and `model.build`, and the public names that their loss functions call.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

from fmegatron import model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import DataParallel, Mesh
from fmegatron.testing import assert_parity, parity

WIDE = torch.float64
ROWS, SEQ, VOCAB = 8, 6, 30
TEXTS = {"tokens": (ROWS, SEQ), "labels": (ROWS, SEQ)}
POINTS = {"x": ((ROWS, 6), WIDE), "y": ((ROWS, 4), WIDE)}


# ---- batches of all ranks --------------------------------------------------------------------------------------------
def texts(i, rows=ROWS):
    """Random tokens, of which some labels do not count: other rows have other numbers of them."""
    draw = torch.Generator().manual_seed(i)
    tokens = torch.randint(0, VOCAB, (rows, SEQ + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(rows, SEQ, generator=draw) < 0.3] = -100
    return {"tokens": tokens[:, :-1].contiguous(), "labels": labels}


def more_texts(i):
    return texts(i, 2 * ROWS)


def points(i):
    draw = torch.Generator().manual_seed(i)
    return {name: torch.randn(shape, generator=draw, dtype=dtype) for name, (shape, dtype) in POINTS.items()}


def masked(i):
    kept = torch.arange(ROWS * 4).view(ROWS, 4) % (3 + i) > 0
    return {**points(i), "mask": kept.long()}


def pairs(i):
    draw = torch.Generator().manual_seed(i)
    return {"texts": torch.randint(0, VOCAB, (ROWS, 2, SEQ + 1), generator=draw)}


# ---- a network of one's own ------------------------------------------------------------------------------------------
NET = {
    "first": (6, 10),
    "bias": (10,),
    "blocks": {"w": (3, 10, 10), "norm": (3, 10)},
    "last": (10, 4),
    "unused": (5, 3),
}


def specs_of(shapes, mesh, strategy, rules=(), stacked="blocks/.*"):
    init = [(r"(.*/)?norm", 1.0), (r"(.*/)?bias", 0.0), (".*", tree.Normal(0.3))]
    return tree.specs(shapes, mesh, rules, init, WIDE, strategy, stacked)


def block(x, w):
    return x + torch.tanh(nn.rms_norm(x, w["norm"]) @ w["w"])


def outputs(p, x, blocks):
    return blocks(torch.tanh(x @ p["first"] + p["bias"])) @ p["last"]


def in_turn(stack):
    """The blocks of weights that are there in full."""
    layers = [tree.map(lambda x, i=i: x[i], stack) for i in range(stack["w"].shape[0])]
    return lambda x: functools.reduce(block, layers, x)


def squares(params, batch):
    p = nn.gather_tree(params)
    error = (outputs(p, batch["x"], in_turn(p["blocks"])) - batch["y"]).square()
    if "mask" not in batch:
        return step.mean(error.sum(), error.numel())
    return step.mean((error * batch["mask"]).sum(), batch["mask"].sum())


def net(mesh, strategy, optimizer, batch=POINTS, **options):
    return step.build(squares, optimizer, specs_of(NET, mesh, strategy), batch, shards=True, **options)


ADAMW = optim.adamw(1e-2, weight_decay=0.1)


def own_stack(mesh):
    """Layers that are compiled once and gathered one by one, in a loss of one's own."""
    specs = specs_of(NET, mesh, DataParallel.zero3())

    def loss(params, batch):
        layouts = tree.layouts(params)
        blocks = step.layers(block, params["blocks"], layouts["blocks"], Axes(mesh))
        p = nn.gather_tree({name: x for name, x in params.items() if name != "blocks"})
        error = (outputs(p, batch["x"], blocks) - batch["y"]).square()
        return step.mean(error.sum(), error.numel())

    return step.build(loss, ADAMW, specs, POINTS, shards=True)


def zero1(mesh):
    return net(mesh, DataParallel.zero1(), ADAMW)


def zero2_of_microbatches_with_masks(mesh):
    batch = {**POINTS, "mask": (ROWS, 4)}
    return net(mesh, DataParallel.zero2(), ADAMW, batch, microbatches=2, precision=Precision.fp64())


def hybrid(mesh):
    return net(mesh, DataParallel.hybrid(), ADAMW)


def own_tp(mesh):
    """Columns, then rows, split over tp by rules of one's own."""
    rules = [("up", (None, "tp")), ("down", ("tp",))]
    specs = specs_of({"up": (6, 12), "down": (12, 4), "bias": (4,)}, mesh, DataParallel.zero3(), rules)

    def loss(params, batch):
        p, tp = nn.gather_tree(params), Axes(mesh)["tp"]
        hidden = torch.tanh(nn.column_parallel(batch["x"], p["up"], tp))
        error = (nn.row_parallel(hidden, p["down"], tp) + p["bias"] - batch["y"]).square()
        return step.mean(error.sum(), error.numel())

    return step.build(loss, ADAMW, specs, POINTS, shards=True)


def frozen(mesh):
    rules = [("first|blocks/w", optim.Group(frozen=True))]
    return net(mesh, DataParallel.zero3(), optim.grouped(1e-2, rules, adam=optim.scale_by_adam()))


def averages(mesh):
    return net(mesh, DataParallel.hsdp(), optim.averaged(ADAMW, 0.9))


def loss_scale(mesh):
    scale = optim.LossScale(initial=2.0**10, growth_interval=1)
    return net(mesh, DataParallel.zero3(), optim.skip_nonfinite(ADAMW, loss_scale=scale))


def teacher(mesh):
    """Distilled by hand: both networks are parameters, the teacher's are frozen, and no gradient flows through it."""
    strategy = DataParallel.zero3()
    specs = {name: specs_of(NET, mesh, strategy) for name in ("student", "teacher")}

    def loss(params, batch):
        p = nn.gather_tree(params)
        student, wanted = (outputs(p[name], batch["x"], in_turn(p[name]["blocks"])) for name in ("student", "teacher"))
        kl = F.kl_div(student.log_softmax(-1), wanted.detach().log_softmax(-1), reduction="none", log_target=True)
        return {
            "distilled": step.mean(kl.sum(), len(kl)),
            "task": 0.5 * step.mean((student - batch["y"]).square().sum(), batch["y"].numel()),
        }

    rules = [("teacher/.*", optim.Group(frozen=True))]
    return step.build(loss, optim.grouped(1e-2, rules, adam=optim.scale_by_adam()), specs, POINTS, shards=True)


# ---- decoders --------------------------------------------------------------------------------------------------------
def llama(precision=None, **options):
    precision = precision or Precision.fp64()
    sizes = {"vocab_size": VOCAB, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_seq": SEQ}
    dtypes = {"param_dtype": precision.param, "compute_dtype": precision.compute, "precision": precision}
    return model.llama(**sizes, vocab_multiple=16, **dtypes, **options)


def decoder_tp(mesh):
    return model.build(llama(tied=True, z_loss=1e-3), ADAMW, mesh, (ROWS, SEQ), strategy="zero3")


def experts(mesh):
    """Two rows of a rank in each microbatch."""
    moe = model.MoE(nn.Router(4, 2), 12, balance=0.01, ep=("dp",))
    return model.build(llama(mlp=moe), ADAMW, mesh, (2 * ROWS, SEQ), strategy="zero1", microbatches=2, twice=True)


def moved_biases(mesh):
    moe = model.MoE(nn.Router(4, 2, scores="sigmoid"), 12, choice_bias=True, bias_rate=1e-2, ep=("dp",))
    return model.build(llama(mlp=moe), ADAMW, mesh, (ROWS, SEQ), strategy="hsdp")


def ring(mesh):
    return model.build(llama(context="ring"), ADAMW, mesh, (ROWS, SEQ), strategy="hsdp")


def muon(mesh):
    """Whole matrices, by the layouts of the optimizer's state."""
    return model.build(llama(), optim.muon(1e-2, dtype=WIDE), mesh, (ROWS, SEQ), strategy="zero3")


def eight_bits(mesh):
    decoder = llama(Precision.fp64(gather=torch.float8_e4m3fn))
    return model.build(decoder, ADAMW, mesh, (ROWS, SEQ), strategy="zero3")


def bf16(mesh):
    return model.build(llama(Precision.bf16()), ADAMW, mesh, (ROWS, SEQ), strategy="zero3", microbatches=2)


def reference(mesh):
    """A preference over a frozen copy of the model (arXiv 2305.18290)."""
    decoder = llama()
    policy = tree.named(model.specs(decoder, mesh, strategy=DataParallel.zero3()))
    specs = {"policy": policy, "reference": tree.copies(policy)}

    def log_p(params, texts):
        flat = texts.flatten(0, 1)
        rows = {"tokens": flat[:, :-1].contiguous(), "labels": flat[:, 1:].contiguous()}
        nll, _ = model.token_losses(params, rows, decoder, save="mincut")
        return -nll.sum(-1).view(-1, 2)

    def loss(params, batch):
        gain = log_p(params["policy"], batch["texts"]) - log_p(params["reference"], batch["texts"])
        margin = 0.1 * (gain[:, 0] - gain[:, 1])
        right = step.mean((margin > 0).to(margin.dtype).sum(), len(margin))
        return step.mean(-F.logsigmoid(margin).sum(), len(margin)), {"right": right}

    rules = [("reference/.*", optim.Group(frozen=True))]
    optimizer = optim.grouped(1e-2, rules, adam=optim.scale_by_adam())
    return step.build(loss, optimizer, specs, {"texts": (ROWS, 2, SEQ + 1)})


# ---- the proof -------------------------------------------------------------------------------------------------------
DATA, BOTH = Mesh(dp=2, fsdp=2), Mesh(fsdp=2, tp=2)
QUICK = {
    own_stack: (DATA, points),
    zero1: (DATA, points),
    zero2_of_microbatches_with_masks: (DATA, masked),
    hybrid: (DATA, points),
    own_tp: (BOTH, points),
    frozen: (Mesh(fsdp=4), points),
    averages: (DATA, points),
    loss_scale: (DATA, points),
    teacher: (DATA, points),
}
OF_DECODERS = {  # each takes seconds
    decoder_tp: (BOTH, texts),
    experts: (DATA, more_texts),
    moved_biases: (DATA, texts),
    ring: (Mesh(fsdp=2, cp=2), texts),
    muon: (BOTH, texts),
    eight_bits: (BOTH, texts),
    bf16: (DATA, texts),
    reference: (BOTH, pairs),
}
FEATURES = {**QUICK, **OF_DECODERS}
DAILY = [f for f in QUICK if f not in (zero1, hybrid, loss_scale)]  # which are in most other tests of steps


@pytest.mark.long
@pytest.mark.parametrize(
    "feature",
    [pytest.param(f, id=f.__name__, marks=[] if f in DAILY else pytest.mark.slow) for f in FEATURES],
)
def test_feature(feature):
    mesh, batch = FEATURES[feature]
    described = feature(mesh)
    report = step.check(*described)
    assert report.ok and not report.findings and not report.unproven, str(report)
    state = tree.init(feature(Mesh(**dict.fromkeys(mesh.names, 1))).state, key=0, rank=0)
    layouts = (described.state, described.batch)
    narrow = feature is bf16
    assert_parity(feature, mesh, state, batch, layouts=layouts, steps=2, fp64=narrow)
    if narrow:  # in its own dtypes: sums in another order, of numbers with 8 bits
        result = parity(feature, mesh, state, batch, layouts=layouts)
        for name in ("loss", "grad_norm"):
            assert result.sharded.metrics[name] == pytest.approx(result.single.metrics[name], rel=2.0**-8)


def test_there_are_seventeen():
    assert len(FEATURES) == 17
