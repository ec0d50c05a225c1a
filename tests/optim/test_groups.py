"""Parameter groups: rates, decay, choice of optimizer, frozen leaves without gradient and state, muP, and errors."""

import dataclasses

import pytest
import torch

from fmegatron import optim, tree
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.optim import Group, contrib, grouped, scale_by_adam
from fmegatron.optim.sign_descent import scale_by_lion
from fmegatron.step import State, build_train_step, jit, state_specs, trace
from fmegatron.tree import ArraySpec, Normal
from tests.fresh_state import fresh_state


def draw(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed/table": (6, 4), "blocks/w": (2, 4, 4), "blocks/norm": (2, 4), "head/w": (4, 6)}
    out = {}
    for path, shape in shapes.items():
        room, name = path.split("/")
        out.setdefault(room, {})[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return out


def descend(opt, params, steps=6):
    state = opt.init(params)
    for i in range(steps):
        params, state = opt.update(draw(i + 1), state, params)
    return params, state


RULES = [
    ("embed", Group(lr=0.1)),
    ("head/w", Group(rate=optim.linear(3e-2, 10), lr=2.0, weight_decay=0.0)),
    ("blocks/norm", Group(weight_decay=0.2)),
]


def test_groups_are_torchs_param_groups():
    rate = optim.cosine(1e-2, 10, 2)
    params, _ = descend(grouped(rate, RULES, weight_decay=0.1, adam=scale_by_adam(0.9, 0.95)), draw())
    leaves = tree.map(lambda x: x.clone().requires_grad_(), draw())
    wanted = {"embed": (0.1, 0.1, rate), "head": (2.0, 0.0, optim.linear(3e-2, 10)), "w": (1, 0.1, rate)}
    wanted["norm"] = (1, 0.2, rate)
    of = {"embed": leaves["embed"]["table"], "head": leaves["head"]["w"], **leaves["blocks"]}
    groups = [{"params": [of[name]], "weight_decay": decay} for name, (_, decay, _) in wanted.items()]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for i in range(6):
        for group, (factor, _, schedule) in zip(reference.param_groups, wanted.values(), strict=True):
            group["lr"] = factor * schedule(i)
        for leaf, g in zip(tree.leaves(leaves), tree.leaves(draw(i + 1)), strict=True):
            leaf.grad = g
        reference.step()
    for path, x, y in zip(tree.paths(params), tree.leaves(params), tree.leaves(leaves), strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-14, msg=path)


def test_each_leaf_has_the_optimizer_of_its_rule():
    rules = [("embed|head", Group(optimizer="lion"))]
    opt = grouped(1e-2, rules, weight_decay=0.0, adam=scale_by_adam(), lion=scale_by_lion())
    params, state = descend(opt, draw())
    assert [path for path in tree.paths(state) if path != "count"] == [
        "adam/m/blocks/norm", "adam/m/blocks/w", "adam/v/blocks/norm", "adam/v/blocks/w",
        "lion/embed/table", "lion/head/w",
    ]  # fmt: skip
    adam, _ = descend(optim.adamw(1e-2, weight_decay=0.0), draw())
    lion, _ = descend(optim.lion(1e-2, weight_decay=0.0), draw())
    assert torch.equal(params["blocks"]["w"], adam["blocks"]["w"])
    assert torch.equal(params["head"]["w"], lion["head"]["w"])


# ---- frozen ----------------------------------------------------------------------------------------------------------
def frozen_optimizer():
    return grouped(1e-2, [("embed|blocks/w", Group(frozen=True))], adam=scale_by_adam())


def test_frozen_leaves_have_no_state_and_come_back_as_they_were():
    opt = frozen_optimizer()
    start = draw(dtype=torch.bfloat16)
    params, state = descend(opt, start)
    assert [path for path in tree.paths(state) if "table" in path or path.endswith("blocks/w")] == []
    assert sum("master" in path for path in tree.paths(state)) == 2
    assert params["embed"]["table"] is start["embed"]["table"] and params["blocks"]["w"] is start["blocks"]["w"]
    assert not torch.equal(params["head"]["w"], start["head"]["w"])
    some = tree.partition(draw(1), opt.trains)[0]  # None in place of a gradient will do
    assert torch.equal(opt.update(some, opt.init(start), start)[0]["head"]["w"],
                       opt.update(draw(1), opt.init(start), start)[0]["head"]["w"])  # fmt: skip


def linear_loss(params, batch):
    x = params["embed"]["table"][batch]
    for w, norm in zip(params["blocks"]["w"], params["blocks"]["norm"], strict=True):
        x = torch.tanh((x * norm) @ w)
    loss = (x @ params["head"]["w"]).square().mean()
    return loss, {"loss": loss.detach()}


@pytest.mark.medium
@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_gradient_of_a_frozen_leaf_is_computed(microbatches):
    mesh = Mesh(dp=1, fsdp=1)
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), draw())
    batch = torch.arange(6)

    def products(opt, params=None):
        step = build_train_step(linear_loss, opt, layouts, Axes(mesh), microbatches=microbatches, clip_norm=1.0)
        state = fresh_state(draw(), opt)
        graph = trace(step, (state, batch)).graph_module.graph
        return step, state, sum("embedding_dense_backward" in str(n.target) or "index_put" in str(n.target)
                                for n in graph.nodes), sum("mm" in str(n.target) for n in graph.nodes)  # fmt: skip

    step, state, scattered, frozen_products = products(frozen_optimizer())
    _, _, _, all_products = products(optim.adamw(1e-2))
    assert scattered == 0
    if microbatches == 1:
        assert frozen_products == all_products - 2  # the gradients of the two w
    new, metrics = jit(step, backend="eager")(state, batch)
    # The same as the gradient of everything of which some is thrown away.
    leaves = tree.map(lambda x: x.clone().requires_grad_(), draw())
    linear_loss(leaves, batch)[0].backward()
    used = [leaves["blocks"]["norm"].grad, leaves["head"]["w"].grad]
    norm = torch.cat([g.flatten() for g in used]).norm()
    torch.testing.assert_close(metrics["grad_norm"], norm)
    grads = tree.map(lambda x: x.grad, leaves)
    opt = frozen_optimizer()
    wanted, _ = opt.update(optim.clip(tree.partition(grads, opt.trains)[0], norm, 1.0), opt.init(draw()), draw())
    for x, y in zip(tree.leaves(new.params), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(x, y)


def test_a_donated_step_keeps_frozen_leaves():
    mesh = Mesh(dp=1)
    opt = frozen_optimizer()
    layouts = tree.map(lambda x: Layout(tuple(x.shape), x.dtype, mesh), draw())
    step = jit(build_train_step(linear_loss, opt, layouts, Axes(mesh)), donate=0, backend="eager")
    state = fresh_state(draw(), opt)
    for _ in range(3):
        state, _ = step(state, torch.arange(6))
    assert torch.equal(state.params["embed"]["table"], draw()["embed"]["table"])
    assert not torch.equal(state.params["head"]["w"], draw()["head"]["w"])
    specs = tree.map(ArraySpec, layouts)
    assert isinstance(state_specs(specs, opt), State)
    tree.check(state, state_specs(specs, opt), rank=0)


def test_partition_and_merge():
    x = {"a": 1, "b": [2, {"c": 3}]}
    chosen, rest = tree.partition(x, lambda path: path != "b/0")
    assert (chosen, rest) == ({"a": 1, "b": [None, {"c": 3}]}, {"a": None, "b": [2, {"c": None}]})
    assert tree.merge(chosen, rest) == x == tree.merge(rest, chosen)


# ---- muP -------------------------------------------------------------------------------------------------------------
def mup_specs(width):
    def spec(*shape, init=None):
        return ArraySpec(Layout(shape, torch.float32, Mesh(dp=1)), init or Normal(0.02))

    blocks = {"w": spec(2, width, 4 * width), "norm": spec(2, width, init=1.0)}
    blocks = {name: dataclasses.replace(x, stacked=True) for name, x in blocks.items()}
    return {"embed": {"table": spec(50, width)}, "blocks": blocks, "head": {"w": spec(width, 50)}}


def test_mup_is_table_3():
    wide, base = mup_specs(64), mup_specs(16)
    assert contrib.mup_multipliers(wide, base) == {"blocks/w": 0.25, "embed/table": 1.0, "head/w": 0.25}
    stds = tree.map(lambda spec: getattr(spec.init, "std", None), contrib.mup_init(wide, base))
    assert stds == {"embed": {"table": 0.02}, "blocks": {"w": 0.01, "norm": None}, "head": {"w": 0.005}}
    with pytest.raises(ValueError, match="mup: head/w: .*same number of dims"):
        contrib.mup_multipliers(wide, base | {"head": {"w": ArraySpec(Layout((4,), torch.float32, Mesh()))}})


def test_multipliers_scale_the_rate():
    factors = {"head/w": 0.25}
    opt = grouped(1e-2, [("head", Group(lr=2.0))], multipliers=factors, weight_decay=0.1, adam=scale_by_adam())
    halved, plain = descend(opt, draw()), descend(optim.adamw(5e-3), draw())
    assert torch.allclose(halved[0]["head"]["w"], plain[0]["head"]["w"], rtol=1e-13)


def test_errors_for_people():
    adam = {"adam": scale_by_adam()}
    for make, message in [
        (lambda: grouped(1e-3, [("embd", Group())], **adam).init(draw()), r"'embd', which matches no path \(did you"),
        (lambda: grouped(1e-3, [("blocks/.*", Group()), ("blocks/w", Group(lr=2.0))], **adam).init(draw()),
         "'blocks/w' for leaves such as blocks/w,.*'blocks/.\\*', wanted.*; put the narrower rule first"),
        (lambda: grouped(1e-3, [("head", Group(optimizer="adm"))], **adam),
         r"'adm', wanted one of adam \(did you mean"),
        (lambda: grouped(1e-3, [("hea(d", Group())], **adam), "regular expression"),
        (lambda: grouped(1e-3, []), "no transform"),
        (lambda: grouped(-1.0, [], **adam), "learning_rate: got -1.0"),
        (lambda: grouped(1e-3, [], weight_decay=-1, **adam), "weight_decay: got -1"),
        (lambda: grouped(1e-3, [(".*", Group(frozen=True))], **adam).init(draw()), "nothing to update"),
        (lambda: Group(lr=-1.0), "lr: got -1.0"),
        (lambda: Group(weight_decay=-0.1), "weight_decay: got -0.1"),
        (lambda: Group(rate=float("nan")), "learning_rate: got nan"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()
