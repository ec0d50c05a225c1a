"""Low-rank adapters: proven and equal to one rank on every mesh, merged, generated with, saved apart, and refused."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from fmegatron import checkpoint, model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision, connect
from fmegatron.layout import DataParallel, Mesh
from fmegatron.model.families.registry import family_of
from fmegatron.step.partition import Policy
from fmegatron.testing import join, simulate, split
from fmegatron.testing.compare_ranks import relative_error
from fmegatron.tree.spec import Constant, Init
from fmegatron.tree.structure import map_with_path
from tests.definition import loss_of
from tests.model import settings
from tests.model.test_mamba import hybrid
from tests.model.test_mtp import further
from tests.model.test_reference import tiny
from tests.pairs import few
from tests.step.proven import proven_and_equal
from tests.step.tiny import SCALAR

ZERO3, HSDP = DataParallel.zero3(), DataParallel.hsdp()
EXPERTS = DataParallel(*[("dp", "fsdp", "ep")] * 4)
RULES = [("lora/.*/[ab]", optim.Group()), (".*", optim.Group(frozen=True))]
OPTIMIZER = optim.grouped(1e-2, RULES, adam=optim.scale_by_adam())
RANDOM: Init = tree.Normal(0.3)  # of b, so that gradients of a are not 0

SP = {"sequence_parallel": True}


def family(name):
    """A small decoder of a family, as a function of its options."""
    config = settings.CONFIGS[name]
    of = family_of(config).decoder
    return functools.partial(of, config, precision=Precision.fp64(), vocab_multiple=4)


class Case(NamedTuple):
    """What is adapted, and where.

    make: the decoder, of options. match: paths. mesh, strategy, save, microbatches, options: of its step.
    """

    make: Callable
    match: str
    mesh: Mesh
    options: dict
    strategy: DataParallel = ZERO3
    save: Policy | None = "mincut"
    microbatches: int = 1

    @property
    def decoder(self):
        return self.make(**self.options)

    def specs(self, mesh=None, b: Init = RANDOM):
        """{"base", "lora"}."""
        base = model.specs(self.decoder, mesh or self.mesh, strategy=self.strategy)
        lora = model.lora(self.decoder, base, match=self.match, rank=3, alpha=6.0)
        lora = map_with_path(lambda p, s: s.replace(init=b) if p.endswith("/b") else s, lora)
        return {"base": base, "lora": lora}

    def loss(self, params, batch, mesh, adapted=model.adapted):
        axes = Axes(mesh, data=self.strategy.tokens)
        return model.loss(adapted(params["base"], params["lora"]), batch, self.decoder, axes=axes, save=self.save)

    def scalar(self, params, batch, adapted):
        """The mean over the tokens of all ranks."""
        parts, _ = self.loss(params, batch, self.mesh, adapted)
        return step.means({"lm": parts["lm"]}, Axes(self.mesh, data=self.strategy.tokens))["lm"]

    def train_step(self, mesh):
        loss = functools.partial(self.loss, mesh=mesh)
        return step.build_train_step(loss, OPTIMIZER, self.specs(mesh), microbatches=self.microbatches)

    def state_specs(self, mesh=None):
        return step.state_specs(self.specs(mesh), OPTIMIZER)

    @property
    def one(self):
        return Mesh(**dict.fromkeys(self.mesh.names, 1))

    @property
    def rows(self):
        length = self.decoder.max_seq
        layout = self.strategy.batch_layout((8, length), torch.int64, self.mesh, self.microbatches)
        return dict.fromkeys(("tokens", "labels"), layout)

    def batch(self, i=0):
        shape = (8, self.decoder.max_seq + 1)
        ids = torch.randint(0, 46, shape, generator=torch.Generator().manual_seed(i))
        return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def check(self):
        return step.check(self.train_step(self.mesh), self.state_specs(), self.rows)


ALL = "wqkv|wo|w_gate_up|w_down"
LLAMA, MIXTRAL, DEEPSEEK = family("llama"), family("mixtral"), family("deepseek_v3")
CASES = {
    "tp, plain": Case(LLAMA, ALL, Mesh(tp=2), {}, save=None),
    "sequence": Case(LLAMA, ALL, Mesh(tp=2), SP),
    "fsdp": Case(LLAMA, ALL, Mesh(fsdp=2), {}),
    "hsdp": Case(LLAMA, ALL, Mesh(dp=2, tp=2), {}, HSDP),
    "all at once": Case(LLAMA, ALL, Mesh(dp=2, fsdp=2, tp=2), SP, HSDP, "inputs", 2),
    "zero1": Case(LLAMA, ALL, Mesh(fsdp=2, tp=2), {}, DataParallel.zero1(), microbatches=2),
    "head and table": Case(LLAMA, "head|table", Mesh(fsdp=2, tp=2), {}),
    "head in chunks": Case(tiny, "head|wo", Mesh(fsdp=2, tp=2), {**SP, "loss_chunks": 4}),
    "tied": Case(family("qwen2"), "table|wo", Mesh(tp=2), SP),
    "copies": Case(tiny, "wq|wkv|wo", Mesh(tp=4), {**SP, "kv_copies": True}),
    "experts": Case(MIXTRAL, "wqkv|up|down", Mesh(ep=2), {}, EXPERTS),
    "experts, all": Case(MIXTRAL, "wqkv|wo|up|down|router", Mesh(fsdp=2, ep=2, tp=2), SP, EXPERTS),
    "latents": Case(DEEPSEEK, "attention/(q|kv)_(down|up)|wo|shared/.*", Mesh(tp=2), SP),
    "state": Case(hybrid, "w_in|w_groups|w_out|conv|conv_groups", Mesh(tp=2), SP),
    "state in groups": Case(functools.partial(hybrid, 4), "w_in|w_groups|conv_groups", Mesh(fsdp=2, tp=2), {}),
    "further tokens": Case(further, "proj|mtp/.*/wo", Mesh(tp=2), SP),
}


def cases(*names):
    """Of these by default, and the others in `make test-all`."""
    return [pytest.param(c, id=n, marks=() if n in names else pytest.mark.slow) for n, c in CASES.items()]


# ---- on meshes -------------------------------------------------------------------------------------------------------
@pytest.mark.medium
@pytest.mark.parametrize("case", cases("all at once", "experts"))
def test_proven_and_equal_to_one_rank(case):
    specs = case.state_specs()
    state = tree.init(case.state_specs(case.one), 0, 0)
    layouts = (tree.layouts(specs), case.rows)
    found = proven_and_equal(case.train_step, case.mesh, state, case.batch, layouts=layouts, steps=2, floor=1e-12)
    assert found.worst[1] < 1e-10
    before = dict(zip(tree.paths(state.params), tree.leaves(state.params), strict=True))
    moved = {p for p, x in before.items() if not torch.equal(x, found.sharded.gather(f"0/params/{p}"))}
    assert moved == {p for p in before if p.endswith(("/a", "/b"))}
    assert not [p for p in tree.paths(specs.opt) if "base" in p or "scale" in p]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("experts"))
def test_merged_is_adapted(case):
    params = tree.init(case.specs(case.one), 0, 0)
    layouts, losses = tree.layouts(case.specs()), []
    merge = functools.partial(model.merged, axes=Axes(case.mesh, data=case.strategy.tokens))
    for joined in (model.adapted, merge):
        run = lambda p, b, joined=joined: case.scalar(p, b, joined)  # noqa: E731
        losses.append(simulate(run, case.mesh, params, case.batch(), layouts=(layouts, case.rows)).gather(""))
    assert abs(losses[0] - losses[1]) < 1e-12
    of_base = simulate(
        lambda p: merge(p["base"], p["lora"]), case.mesh, params, layouts=(layouts,), out_layouts=layouts["base"]
    )
    wanted = tree.map(nn.dense, model.adapted(params["base"], params["lora"]), is_leaf=_is_low_rank)
    for path, x in zip(tree.paths(wanted), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(of_base.gather(path), x, rtol=1e-13, atol=1e-15)


def _is_low_rank(w):
    return isinstance(w, nn.LowRank)


@pytest.mark.parametrize("case", cases("sequence", "state"))
def test_gradients_are_those_of_autograd_through_the_dense_sum(case):
    specs, axes = case.specs(case.one), Axes(case.one, data=case.strategy.tokens)
    params = tree.map(lambda t: t.clone().requires_grad_(), tree.init(specs, 0, 0))
    whole = model.adapted(params["base"], params["lora"])
    plain = tree.map(nn.dense, whole, is_leaf=_is_low_rank)
    pairs = {p: t for p, t in zip(tree.paths(params["lora"]), tree.leaves(params["lora"]), strict=True) if "pairs" in p}
    dense, ours = (
        torch.autograd.grad(loss_of(model.loss(w, case.batch(), case.decoder, axes)[0]), list(pairs.values()))
        for w in (plain, whole)
    )
    assert max(relative_error(y, x) for x, y in zip(dense, ours, strict=True)) < 1e-10


# ---- wrong ones ------------------------------------------------------------------------------------------------------
WRONG = {
    "not entered behind the gather": ("sequence", "fmegatron.nn.gather.of_products", lambda w, layouts, axis: w),
    "not entered with other tokens": ("experts, all", "fmegatron.nn.entered", lambda w, axis: w),
    "a latent not entered": ("latents", "fmegatron.nn.entered", lambda w, axis: w),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name",), few(1, [(name,) for name in WRONG]))
def test_a_missing_sum_over_tp_is_refused(name, monkeypatch):
    case, place, change = WRONG[name]
    monkeypatch.setattr(place, change)
    report = CASES[case].check()
    assert not report.ok and "tp" in str(report)


# ---- beside training -------------------------------------------------------------------------------------------------
def test_generation_uses_the_adapters():
    case = CASES["experts"]
    specs = case.specs(Mesh())
    params, axes = tree.init(specs, 0, 0), Axes(Mesh())
    prompts = [case.batch()["tokens"][0, :5], case.batch()["tokens"][1, :2]]
    texts = []
    for weights in (
        model.adapted(params["base"], params["lora"]),
        model.merged(params["base"], params["lora"]),
        params["base"],
    ):
        writer = model.inference(weights, case.decoder, axes)
        texts.append(model.generate(writer, prompts, 8, temperature=0))
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def steps_and_text_on_rank(rank, name):
    """(state after two compiled steps, a text of it) of a real rank."""
    case = CASES[name]
    with connect(case.mesh) as world:
        train = step.jit(case.train_step(case.mesh), donate=0, world=world, patches=SCALAR)
        state = tree.init(case.state_specs(), 0, rank)
        for i in range(2):
            state, _ = train(state, split(case.batch(i), case.rows)[rank])
        return state, text_of(case, state.params, Axes(case.mesh, world, case.strategy.tokens))


def text_of(case, params, axes):
    """Eight tokens behind each of two prompts."""
    weights, tokens = model.adapted(params["base"], params["lora"]), case.batch()["tokens"]
    writer = model.inference(weights, case.decoder, axes)
    return model.generate(writer, [tokens[0, :5], tokens[1, :2]], 8, temperature=0)


@pytest.mark.parametrize(("name",), few(0, [("sequence",), ("fsdp",), ("experts",)]))  # half a minute and more each
def test_compiled_on_gloo_ranks_and_generated_there(ranks, name):
    case = CASES[name]
    found = ranks.run(steps_and_text_on_rank, name, ranks=case.mesh.size)
    state, rows = tree.init(case.state_specs(case.one), 0, 0), tree.map(lambda x: x.replace(mesh=case.one), case.rows)
    for i in range(2):
        layouts = (tree.layouts(case.state_specs(case.one)), rows)
        state = simulate(case.train_step(case.one), case.one, state, case.batch(i), layouts=layouts).outputs[0][0]
    got = join([of_rank for of_rank, _ in found], tree.layouts(case.state_specs()))
    for path, a, b in zip(tree.paths(state), tree.leaves(got), tree.leaves(state), strict=True):
        assert relative_error(a, b, 1e-12) <= 1e-10, path
    params = tree.place(state.params, case.specs(case.one))
    wanted = text_of(case, params, Axes(case.one, data=case.strategy.tokens))
    assert all(torch.equal(text, wanted) for _, text in found)


def test_what_is_trained_is_saved_apart_and_restored_onto_another_mesh(tmp_path):
    case = CASES["fsdp"]
    whole = tree.init(case.specs(Mesh()), 0, 0)["lora"]
    checkpoint.save(tmp_path / "lora", whole)
    for mesh in (Mesh(fsdp=2, tp=2), Mesh(tp=2)):
        target = case.specs(mesh)["lora"]
        for rank in range(mesh.size):
            got = checkpoint.restore(tmp_path / "lora", target, rank=rank)
            wanted = tree.init(case.specs(mesh), 0, rank)["lora"]
            assert all(map(torch.equal, tree.leaves(got), tree.leaves(wanted)))
            assert tree.layouts(got) == tree.layouts(target)


# ---- specs and errors ------------------------------------------------------------------------------------------------
def test_the_tree_is_the_same_on_every_mesh_and_without_a_strategy():
    of = CASES["state"].decoder  # three matrices side by side in w_in, two in w_groups
    trees = [
        model.lora(of, model.specs(of, mesh, strategy=strategy), match="w_in|w_groups|wqkv", rank=2, alpha=2)
        for mesh in (Mesh(), Mesh(fsdp=2), Mesh(tp=2), Mesh(fsdp=2, tp=4))
        for strategy in (None, ZERO3)
    ]
    shapes = [tree.map(lambda s: (s.shape, s.dtype, s.stacked), t) for t in trees]
    assert all(s == shapes[0] for s in shapes)
    assert sum(len(tree.leaves(t)) for t in trees[:1]) == 2 * (3 + 2 + 3) + 3


def test_factors_lie_as_the_matrix_does():
    of = LLAMA()
    base = model.specs(of, Mesh(fsdp=2, tp=2), strategy=ZERO3)
    found = model.lora(of, base, match="wqkv|wo", rank=2, alpha=3, dtype=torch.float32)["blocks"]["attention"]
    a, b = (s.layout for s in found["wqkv"].pairs[0])
    assert a.axes(1) == ("fsdp",) and a.axes(2) == () and b.axes(1) == () and b.axes(2) == ("tp", "fsdp")
    a, b = (s.layout for s in found["wo"].pairs[0])
    assert a.axes(1) == ("tp", "fsdp") and b.axes(1) == () and b.axes(2) == ("fsdp",)
    assert a.dtype == b.dtype == found["wo"].scale.dtype == torch.float32
    assert found["wo"].scale.init == Constant(1.5) and found["wo"].scale.shape == (2,)
    assert {s.strategy for s in tree.leaves(found)} == {ZERO3} and all(s.stacked for s in tree.leaves(found))


def test_nothing_is_added_at_the_start():
    case = CASES["fsdp"]
    params = tree.init(case.specs(Mesh(), b=0.0), 0, 0)
    adapted, plain = (
        loss_of(model.loss(w, case.batch(), case.decoder)[0])
        for w in (model.adapted(params["base"], params["lora"]), params["base"])
    )
    assert torch.equal(adapted, plain)


BAD = {
    "match": ({"match": "wq"}, r"match='wq', which no path has, wanted some of blocks/attention/wo, "),
    "a vector": (
        {"match": "attention.*"},
        r"blocks/attention_norm: got shape \(2, 16\), wanted a matrix; match some of ",
    ),
    "rank 0": ({"rank": 0}, "rank: got 0, wanted a whole number of at least 1; .* freeze pairs"),
    "rank of text": ({"rank": "8"}, "rank: got '8'"),
    "alpha": ({"alpha": float("nan")}, "alpha: got nan, wanted a number above 0"),
    "pattern": ({"match": "("}, "wanted a regular expression"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    changes, message = BAD[name]
    of = LLAMA()
    with pytest.raises(ValueError, match=message):
        model.lora(of, model.specs(of, Mesh()), **{"match": "wqkv", "rank": 2, "alpha": 4, **changes})


def test_trees_that_do_not_belong_together_are_refused():
    of = LLAMA()
    base = model.specs(of, Mesh())
    found = model.lora(of, base, match="wo", rank=2, alpha=4)
    with pytest.raises(ValueError, match="lora: got specs of another model, .*:\n.*got nothing, wanted a"):
        model.lora(tiny(), {"blocks": base["blocks"]}, match="wo", rank=2, alpha=4)
    for wrong, message in (
        (
            {"block": found["blocks"]},
            "adapters: block: got one of a leaf that the base has not, .*did you mean blocks",
        ),
        ({"blocks": {"attention": found["blocks"]["attention"]["wo"]}}, "adapters: blocks/attention: got an? Adapter"),
        ({"blocks": {"attention": {"wo": base["blocks"]}}}, "adapters: blocks/attention/wo: got a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            model.adapted(base, wrong)
    params = tree.init({"base": base, "lora": found}, 0, 0)
    with pytest.raises(ValueError, match="wo: got a tensor whose layout is not known"):
        model.merged(tree.map(torch.clone, params["base"]), params["lora"])


@dataclass(frozen=True)
class Own(model.PerToken):
    """A mixer that does with its matrix what only a tensor has."""

    how: Callable

    def arrays(self, dim):
        return {"in": {"w": model.Array((dim, dim), ("fsdp",))}, "gain": model.Array((dim,))}

    def __call__(self, u, w, at):
        return self.how(u, w["in"]["w"])


def _functional(u, w):
    return torch.nn.functional.linear(u, w)


@pytest.mark.parametrize("how", [lambda u, w: u @ w.t(), lambda u, w: u @ (w + w), _functional], ids=["t", "+", "F"])
def test_a_mixer_that_takes_a_weight_for_a_tensor_is_told_which(how):
    of, mesh = tiny(mlp=Own(how)), Mesh()
    base = model.specs(of, mesh)
    params = tree.init({"base": base, "lora": model.lora(of, base, match="in/w|wo", rank=2, alpha=4)}, 0, 0)
    with pytest.raises((AttributeError, TypeError), match="LowRank") as caught:
        model.loss(model.adapted(params["base"], params["lora"]), CASES["copies"].batch(), of, save="mincut")
    assert caught.value.__notes__[0] == "Arrays with adapters (model.lora): mlp/in/w"
    right = tiny(mlp=Own(lambda u, w: u @ w))
    parts, _ = model.loss(model.adapted(params["base"], params["lora"]), CASES["copies"].batch(), right)
    assert loss_of(parts).isfinite()


def test_experts_in_bf16_need_a_rank_of_whole_rows():
    of = MIXTRAL(precision=Precision.bf16())
    base = model.specs(of, Mesh())
    assert model.lora(of, base, match="up", rank=8, alpha=4)
    with pytest.raises(ValueError, match=r"blocks/mlp/up: got rank=3, wanted a multiple of 8: .* take rank=8"):
        model.lora(of, base, match="up", rank=3, alpha=4)


OF_WIRES = [(Precision.bf16(),), (Precision.fp8_wire(),)]


@pytest.mark.slow
@pytest.mark.parametrize(("precision",), few(1, OF_WIRES, ["bf16", "8 bits on the wire"]))
def test_wide_factors_beside_a_narrow_base(precision):
    """Of fp32 in the parameters, of the compute dtype in products; scales and all travel as their matrices do."""
    mesh, of = Mesh(fsdp=2, tp=2), LLAMA(precision=precision)
    base = model.specs(of, mesh, strategy=ZERO3)
    specs = {"base": base, "lora": model.lora(of, base, match=ALL, rank=2, alpha=4, dtype=torch.float32)}

    def loss_fn(params, batch):
        return model.loss(model.adapted(params["base"], params["lora"]), batch, of, save="mincut")

    train_step = step.build_train_step(loss_fn, OPTIMIZER, specs, precision=precision)
    report = step.check(train_step, step.state_specs(specs, OPTIMIZER), CASES["fsdp"]._replace(mesh=mesh).rows)
    assert report.ok and not report.unproven, report
