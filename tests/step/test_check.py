"""check: no finding on right steps, a finding with its line on wrong ones, for any number of ranks."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn, optim, step, tree
from fmegatron.collectives import Axes, all_gather, axis_index, enter, pmax, psum, reduce_scatter
from fmegatron.collectives.ops import declare
from fmegatron.layout import DataParallel, Layout, Mesh, Split
from fmegatron.step import State, check
from fmegatron.step.checker.entrypoints import check_traced
from tests.pairs import few, mixed
from tests.step.graph_mutants import mutants, problem, traced_problem
from tests.work import counted

MESH = Mesh(dp=2, fsdp=2, tp=2)
ADAMW = optim.adamw(1e-3)
RIGHT = {
    "plain": {},
    "sequence_parallel, tied": {"sequence_parallel": True, "tied": True},
    "bf16, z-loss, 2 microbatches": {"compute_dtype": torch.bfloat16, "z_loss": 1e-4, "microbatches": 2},
    "min-cut layers, masked, 2 microbatches": {"save": "mincut", "mask": True, "microbatches": 2},
    "remat, no clip": {"save": "inputs", "clip_norm": None, "sequence_parallel": True},
}


MESHES = [MESH, Mesh(dp=1, fsdp=1, tp=2), Mesh(dp=2, fsdp=4, tp=1), Mesh(dp=1, fsdp=1, tp=1)]


CASES = mixed(RIGHT, MESHES)


@pytest.mark.medium
@pytest.mark.parametrize("name, mesh", few(2, CASES, map(str, CASES)))
def test_right_steps_have_no_findings(name, mesh):
    report = check(*problem(mesh, ADAMW, layers=2, **RIGHT[name]))
    assert report.ok, str(report)


OPTIMIZERS = {"sgd": optim.sgd(1e-2), "momentum": optim.sgd(1e-2, momentum=0.9), "adamw": ADAMW}


@pytest.mark.medium
@pytest.mark.parametrize("optimizer", few(1, [(optimizer,) for optimizer in OPTIMIZERS.values()], OPTIMIZERS))
def test_one_head_on_each_rank(optimizer):
    mesh = Mesh(dp=1, fsdp=1, tp=4)
    report = check(*problem(mesh, optimizer, kv_heads=4))
    assert report.ok, str(report)


@pytest.mark.medium
def test_16384_ranks_are_no_more_work_than_8():
    calls = []
    for mesh in (Mesh(dp=64, fsdp=32, tp=8), MESH):
        with counted() as work:
            report = check(*_large(mesh))
        assert report.ok, str(report)
        calls.append(work.calls)
    assert calls[0] < 1.5 * calls[1]


def _large(mesh):
    rows = 2 * mesh["dp"] * mesh["fsdp"]
    return problem(mesh, optim.sgd(1e-2), rows=rows, dim=512, heads=16, kv_heads=8, ffn_dim=1024)


FIELDS = [
    {"clip_norm": None},
    {"strategy": DataParallel.hybrid()},
    {"layers": 2},
    {"strategy": DataParallel.zero1()},
    {"sequence_parallel": True, "tied": True, "kv_heads": 4},
    {"strategy": DataParallel.zero3(), "layers": 2},
]


@pytest.mark.medium
@pytest.mark.parametrize("fields", few(1, [(fields,) for fields in FIELDS], map(str, FIELDS)))
def test_every_broken_collective_is_found(fields):
    traced, given, wanted, data = traced_problem(*problem(MESH, optim.sgd(1e-2), **fields))
    assert check_traced(traced, MESH, given, wanted, data=data).ok
    silent, open_, count = [], [], 0
    for what, broken in mutants(traced, MESH):
        count += 1
        report = check_traced(broken, MESH, given, wanted, data=data)
        silent += [what] if report.ok else []
        open_ += [what] if report.unproven and not report.findings else []
    # Open: a `declare` over another axis leaves what it was to explain unexplained; a gather of another dim in a graph
    # that was traced for this one has shapes that no trace has.
    assert count > 50 and not silent and len(open_) < count / 4, open_
    assert check_traced(traced, MESH, given, wanted, data=data).ok  # every fault was taken back


# ---- faults in the code of a step, each with the line that it is on --------------------------------------------------
F32 = torch.float32
SPECS = {
    "w1": Layout((16, 32), F32, MESH, ("fsdp", "tp")),
    "gate_up": Layout((16, 64), F32, MESH, ("fsdp", Split("tp", parts=2))),
    "w2": Layout((32, 16), F32, MESH, ("tp", "fsdp")),
    "norm": Layout((16,), F32, MESH),
    "table": Layout((24, 16), F32, MESH, ("tp",)),
}
BATCH = {"ids": Layout((8, 6), torch.int64, MESH, (("dp", "fsdp"),))}
STATE = State(Layout((), torch.int64, MESH), SPECS, {"m": SPECS})


def toy(bug=None, stated=True):
    """A tensor-parallel layer with a norm, an embedding, SGD with momentum and clip; `bug` puts one fault into it."""
    axes = Axes(MESH)
    dp, fsdp, tp = axes["dp"], axes["fsdp"], axes["tp"]

    def loss_fn(p, batch):
        ids, table = batch["ids"], p["table"]
        own_ids = ids - axis_index(dp if bug == "vocab_axis" else tp) * table.shape[0]
        own = (own_ids >= 0) & (own_ids < table.shape[0])
        rows = declare(table, tp, backward=("sharded", 0))[own_ids.clamp(0, table.shape[0] - 1)] * own[..., None]
        x = psum(declare(rows, tp, forward="partial"), tp)
        norm = p["norm"]
        u = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm
        u = u if bug == "no_enter" else enter(u, tp)
        over = dp if bug == "gather_axis" else fsdp
        w1, gate_up, w2 = (all_gather(p[k], over, d) for k, d in (("w1", 0), ("gate_up", 0), ("w2", 1)))
        h = F.gelu(u @ w1)
        gate, up = (u @ gate_up).chunk(2, -1)
        o = (h + F.silu(gate) * up) @ w2
        if bug == "nonlinear":
            o = F.gelu(o)
        if bug == "bias":
            o = o + norm
        if bug == "residual":
            o = o + x
        if bug == "cat":
            o = torch.cat([o, x], -1)[..., :16]
        if bug != "no_psum":
            o = psum(o, tp)
        if bug == "psum_twice":
            o = psum(o, tp)
        if bug == "softmax":
            o = o + torch.softmax(u @ w1, -1) @ w1.t()
        if bug == "local_max":
            o = o - psum((u @ w1).amax(-1, keepdim=True), tp)
        if bug == "sharded_and_whole":
            o = o * (u @ w1)[..., :1].expand_as(o)
        x = x + o
        loss = x.square().mean() if bug == "mean" else x.square().sum() / 768
        return loss, {"loss": psum(loss.detach(), axes["dp"] if bug == "metric" else axes["dp", "fsdp"])}

    def train_step(state, batch):
        (_, metrics), grads = step.value_and_grad(loss_fn)(state.params, batch)
        raw = grads
        grads = step.reduce_gradients(grads)
        if bug == "no_reduction":
            grads = raw
        if bug == "one_leaf":
            grads = {**grads, "norm": raw["norm"]}
        if bug == "reduce_again":
            grads = {**grads, "table": psum(grads["table"], dp)}
        if bug == "tp_again":
            grads = {**grads, "norm": psum(grads["norm"], tp)}
        of = raw if bug == "clip_raw" else grads  # of gradients that it knows to be wrong it takes no norm
        norm = optim.global_norm(as_reduced(of, SPECS) if bug == "clip_raw" or (bug in UNTRUE and stated) else of)
        if bug == "clip_local":
            norm = sum(g.square().sum() for g in grads.values()).sqrt()
        grads = tree.map(lambda g: g * (1.0 / (norm + 1.0)), grads)
        m = tree.map(lambda m, g: 0.9 * m + g, state.opt["m"], raw if bug == "opt_raw" else grads)
        params = tree.map(lambda p, m: p - 0.1 * m, state.params, m)
        if bug == "swap":
            params = {**params, "w1": params["w1"] + pmax(params["w1"], tp)}
        if bug == "scatter_whole":
            params = {**params, "norm": all_gather(reduce_scatter(params["norm"], dp, 0), dp, 0)}
        return State(state.step + 1, params, {"m": m}), {**metrics, "grad_norm": norm}

    return train_step


@pytest.mark.medium
def test_the_right_toy():
    report = check(toy(), STATE, BATCH)
    assert report.ok, str(report)


FAULTS = {
    "vocab_axis": "does not depend on the rank|do not depend on the rank",
    "no_enter": "norm.*partial|partial.*|pending sum",
    "gather_axis": "all_gather of dim 0 of a value that is replicated|sharded",
    "nonlinear": "pending sum goes into a non-linear op",
    "bias": "counts once per rank",
    "residual": "counts once per rank",
    "cat": "counts once per rank",
    "no_psum": "pending|counts once",
    "psum_twice": "already replicated: 2 times too large",
    "softmax": "softmax over a sharded dim",
    "local_max": "psum of a value that is partial .max.",
    "sharded_and_whole": "piece of every shard",
    "mean": "mean over a sharded dim",
    "metric": "metric|loss is partial|the output",
    "no_reduction": "",
    "one_leaf": "",
    "reduce_again": "already replicated",
    "tp_again": "already replicated",
    "clip_raw": "",
    "clip_local": "",
    "opt_raw": "",
    "swap": "",
    "scatter_whole": "already replicated",
}


# Gradients that do not lie as they must, or are not known to: a norm refuses them, unless they are stated to.
UNTRUE = ("no_reduction", "one_leaf", "reduce_again", "tp_again")


@pytest.mark.parametrize("bug", UNTRUE)
def test_a_norm_refuses_gradients_that_are_not_reduced_or_not_known(bug):
    with pytest.raises(ValueError, match="global_norm: .*(still pending over dp|layout is not known)"):
        check(toy(bug, stated=False), STATE, BATCH)


# Of those that the list of mutants (test_mutants.py) has too, some for their messages.
QUICK = ("vocab_axis", "bias", "cat", "softmax", "local_max", "sharded_and_whole", "mean", "swap", "scatter_whole")


@pytest.mark.long
@pytest.mark.parametrize("bug", [pytest.param(b, marks=() if b in QUICK else pytest.mark.slow) for b in FAULTS])
def test_a_fault_in_the_code_is_found(bug):
    report = check(toy(bug), STATE, BATCH)
    assert report.findings
    assert re.search(FAULTS[bug], str(report)), str(report)


@pytest.mark.medium
def test_a_finding_names_line_axis_and_fix_and_can_be_silenced():
    report = check(toy("psum_twice"), STATE, BATCH)
    lines = Path(__file__).read_text().splitlines()
    first = report.findings[0]
    assert "psum(o, tp)" in lines[int(first.at.split(":")[1].split()[0]) - 1]
    assert (first.op, first.axis, first.fix) == ("psum", "tp", "remove it")
    with pytest.raises(ValueError, match=r"train_step: \d+ findings? of the check.*\n.*psum over 'tp'"):
        report.require("train_step")
    quiet = check(toy("psum_twice"), STATE, BATCH, allow={f.at.split(" ")[0]: "a test" for f in report.findings})
    assert quiet.ok and quiet.silenced and "silenced (a test)" in str(quiet)


def test_an_op_without_a_rule_is_unproven_with_the_outputs_that_depend_on_it():
    def odd(state, batch):
        lengths = torch.tensor([8, 8])
        norm = torch.segment_reduce(state.params["w1"], "sum", lengths=lengths[:1]).sum() + state.params["norm"]
        return state._replace(params={**state.params, "norm": norm}), {}

    report = check(odd, STATE, BATCH)
    assert not report.ok and not report.findings and report.unproven_outputs == ("0/params/norm",)
    (one,) = report.unproven
    assert one.at.startswith("test_check.py:") and one.op == "segment_reduce" and one.axes == ("fsdp", "tp")
    assert "no rule for aten.segment_reduce.default" in one.why and "0/params/norm may be wrong" in str(report)
    assert check(odd, STATE, BATCH, allow={one.at: "one segment"}).ok


def test_a_line_of_a_file_whose_name_has_spaces_can_be_silenced():
    code = "def odd(state, batch):\n    return state, {'loss': batch['ids'].sum()}\n"
    names: dict = {}
    exec(compile(code, "my step.py", "exec"), names)
    report = check(names["odd"], STATE, BATCH)
    assert {one.at for one in report.findings} == {"my step.py:2"}
    assert check(names["odd"], STATE, BATCH, allow={"my step.py:2": "a test"}).ok


@pytest.mark.medium
def test_no_op_hides_the_mistakes_behind_it():
    """An op without a rule is taken apart as torch itself does: a sum that is missing behind it is found."""

    def forgets(ops):
        def train_step(state, batch):
            def loss_fn(p):
                return (ops(batch["images"]).flatten(1)[:, :16] * p["norm"]).square().sum() / 64

            (loss, _), grads = step.value_and_grad(loss_fn)(state.params)
            axes = Axes(MESH)["dp", "fsdp"]
            norm = state.params["norm"] - 0.1 * grads["norm"]
            return state._replace(params={**state.params, "norm": norm}), {"loss": psum(loss.detach(), axes)}

        return train_step

    batch = {"images": Layout((8, 3, 4, 4), F32, MESH, (("dp", "fsdp"),))}
    for ops in (
        lambda x: F.pixel_unshuffle(x, 2),
        lambda x: torch.fft.rfft2(x).abs(),
        lambda x: F.grid_sample(
            x, F.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3), x.shape, False), "nearest", "zeros", False
        ),
        lambda x: F.pixel_shuffle(F.pad(x, (1, 1, 1, 1), mode="reflect").repeat(1, 4, 1, 1), 2),
    ):
        report = check(forgets(ops), STATE, batch)
        assert {f.axis for f in report.findings} == {"dp", "fsdp"}, str(report)
        assert {f.op for f in report.findings} == {"sub"}, str(report)  # of the update


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_parameter_that_the_loss_does_not_use(microbatches):
    specs = {"norm": SPECS["norm"], "unused": SPECS["w1"]}
    axes = Axes(MESH)

    def loss_fn(p, batch):
        loss = (batch["x"] * p["norm"]).square().sum() / 64
        return loss, {"loss": psum(loss.detach(), axes["dp", "fsdp"])}

    train_step = step.build_train_step(loss_fn, ADAMW, specs, axes, microbatches=microbatches)
    state = step.state_specs({k: tree.ArraySpec(x, 0) for k, x in specs.items()}, ADAMW)
    rows = DataParallel(("dp", "fsdp")).batch_layout((8, 16), F32, MESH, microbatches)
    report = check(train_step, state, {"x": rows})
    assert report.ok, str(report)


def as_reduced(grads, layouts):
    """Gradients that state, against the truth, that they were summed."""
    return tree.place(tree.map(torch.detach, grads), layouts)


def test_the_line_of_the_user_comes_first():
    """Behind it the line of the library: of an op in the library, and of a gradient that its caller did not sum."""
    mesh = Mesh(dp=2, tp=2)
    layouts = {"norm": Layout((16,), F32, mesh), "w": Layout((16, 32), F32, mesh, (None, "tp"))}
    batch = {"x": Layout((8, 16), F32, mesh, ("dp",))}

    def train_step(state, batch):
        def loss_fn(p):
            u = nn.rms_norm(batch["x"], p["norm"])  # and no enter
            y = nn.rms_norm(u @ p["w"], torch.ones(16))  # of a shard
            return y.square().sum() / 64

        _, grads = step.value_and_grad(loss_fn)(state)
        size = optim.global_norm(as_reduced(grads, layouts))  # and no psum over dp
        return state, {"size": size}

    lines = Path(__file__).read_text().splitlines()

    def of(comment):
        return f"test_check.py:{next(i for i, line in enumerate(lines, 1) if comment in line and 'def of' not in line)}"

    said = str(check(train_step, layouts, batch))
    assert f"{of('# of a shard')} (in fmegatron/nn/norm.py:" in said, said

    def forgetful(state, batch):
        def loss_fn(p):
            return (nn.rms_norm(batch["x"], p["norm"]) @ p["w"]).square().sum() / 64

        _, grads = step.value_and_grad(loss_fn)(state)
        return state, {"size": optim.global_norm(as_reduced(grads, layouts))}  # and nothing was summed

    found = check(forgetful, layouts, batch).findings
    assert found and all(one.at.startswith("test_check.py:") for one in found)
    assert any(one.at.startswith(f"{of('# and nothing was summed')} (in fmegatron/optim/") for one in found), found
