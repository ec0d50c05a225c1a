"""One contract for every optimizer: structure, dtypes, layouts kept; pure; resumable; init on specs tells the state."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fmegatron import optim, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.optim import adamw, optimizer, scale_by_adam, sgd
from fmegatron.optim.clipping import GradNorm
from fmegatron.tree.arithmetic import working_dtype
from fmegatron.tree.structure import flatten
from tests.optim.table import (
    COMPRESSED,
    DTYPES,
    EVERY,
    ONE,
    TABLE,
    assert_same,
    grads_of,
    loss_of,
    make_params,
    make_specs,
    run,
)
from tests.pairs import each_value, product

every_optimizer = pytest.mark.parametrize("opt", [row.make() for row in EVERY.values()], ids=EVERY)


# Formats of fewer bytes do nothing to float64, and to float32 what they do to moments of bfloat16 parameters.
WEAK = [pytest.param(name, dtype, marks=pytest.mark.slow) for name in COMPRESSED for dtype in ("fp32", "fp64")]
NAMES = [*each_value(TABLE, DTYPES), *each_value(COMPRESSED, ["bf16", "mixed"]), *WEAK]
CASES = [
    pytest.param(EVERY[name].make(), DTYPES[dtype], marks=case.marks, id=f"{dtype}-{name}")
    for case in NAMES
    for name, dtype in [case.values]
]
every_case = pytest.mark.parametrize(("opt", "dtypes"), CASES)


def facts(x):
    """Structure, shape and dtype of every leaf."""
    paths, leaves, spec = flatten(x)
    return spec, {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in zip(paths, leaves, strict=True)}


@pytest.mark.parametrize("row", EVERY.values(), ids=EVERY)
def test_the_state_is_what_the_table_says(row):
    state = (row.alone or row.make)().init({"w": torch.ones(3, 2)})
    assert set(tree.paths(state)) == row.state
    assert all(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(state))
    counts = [leaf for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True) if path.endswith("count")]
    assert [(count.dtype, tuple(count.shape)) for count in counts] == [(torch.int64, ())]


@every_case
def test_structure_shapes_and_dtypes_are_kept(opt, dtypes):
    params = make_params(dtypes)
    state = opt.init(params)
    new_params, new_state = opt.update(grads_of(params), state, params)
    assert facts(new_params) == facts(params)
    assert facts(new_state) == facts(state)
    assert new_state.get("opt", new_state)["count"] == 1


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype", "mesh"), product(EVERY, DTYPES, [ONE, Mesh(fsdp=2, tp=2)]))
def test_init_on_specs_is_the_spec_of_init_on_params(name, dtype, mesh):
    row, dtypes = EVERY[name], DTYPES[dtype]
    specs = make_specs(dtypes, mesh)
    opt = row.make()
    state_specs = opt.init(specs)
    layouts = tree.layouts(state_specs)
    for rank in range(mesh.size):
        state = opt.init(tree.init(specs, key=0, rank=rank))
        tree.check(state, layouts, rank)
        made = tree.init(state_specs, key=0, rank=rank)
        assert facts(made) == facts(state)
        assert_same(made, state)
    of_param = dict(zip(tree.paths(specs), tree.leaves(tree.layouts(specs)), strict=True))
    for path, layout in zip(tree.paths(layouts), tree.leaves(layouts), strict=True):
        names = (path, path.removesuffix("/codes"), path.removesuffix("/scale"))  # of what is stored in blocks
        if not (sources := [of_param[name] for name in of_param if any(p.endswith("/" + name) for p in names)]):
            assert layout == Layout((), layout.dtype, mesh), path
        elif row.state_like_params:
            assert layout == sources[0].replace(dtype=working_dtype(sources[0].dtype)), path


@every_case
def test_pure(opt, dtypes):
    params = make_params(dtypes)
    state = opt.init(params)
    arguments = (grads_of(params), *reversed(run(opt, params, state, range(2))))
    before = tree.map(torch.clone, arguments)
    first = opt.update(*arguments)
    assert_same(before, arguments)
    assert_same(first, opt.update(*arguments))
    old = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(arguments)}
    assert not old & {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(first)}


@every_optimizer
def test_the_state_shares_no_storage_with_the_parameters(opt):
    params = make_params(DTYPES["mixed"])
    leaves = tree.leaves((params, opt.init(params)))
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)


@pytest.mark.long
@every_case
def test_resumed_is_bitwise_the_uninterrupted_run(opt, dtypes, tmp_path):
    params = make_params(dtypes)
    state = opt.init(params)
    whole = run(opt, params, state, range(6))
    torch.save(run(opt, params, state, range(3)), tmp_path / "half")
    assert_same(run(opt, *torch.load(tmp_path / "half"), range(3, 6)), whole)


@every_case
def test_it_accumulates_and_descends(opt, dtypes):
    params = make_params(dtypes)
    state = opt.init(params)
    after, end = run(opt, params, state, range(30))
    assert loss_of(after, 30) < 0.9 * loss_of(params, 30)
    assert end.get("opt", end)["count"] == 30
    fresh, _ = run(opt, after, state, range(1))
    continued, _ = run(opt, after, end, range(1))
    if set(state) > {"count", "master"}:
        assert any(not torch.equal(x, y) for x, y in zip(tree.leaves(fresh), tree.leaves(continued), strict=True))


@every_optimizer
def test_an_update_clips_to_the_limit_that_it_is_given(opt):
    params = make_params(DTYPES["fp32"])
    state, grads = opt.init(params), grads_of(params)
    norm = optim.global_norm(grads)
    given = opt.update(grads, state, params, GradNorm(norm, 0.5))[0]
    assert_same(given, opt.update(optim.clip(grads, norm, 0.5), state, params)[0])
    unlimited = opt.update(grads, state, params, GradNorm(norm))
    assert_same(unlimited, opt.update(grads, state, params))


@pytest.mark.parametrize("opt", [row.make() for row in EVERY.values() if row.by_leaf])
def test_a_part_of_the_tree_is_updated_like_the_whole(opt):
    """So a step may update one layer's shards at a time."""
    params = make_params(DTYPES["mixed"])
    params, state = run(opt, params, opt.init(params), range(3))
    grads = grads_of(params)
    whole, whole_state = opt.update(grads, state, params)

    def part(x):  # keep the branch "blocks" wherever the parameters' tree stands
        if isinstance(x, dict):
            return {"blocks": x["blocks"]} if "blocks" in x else {name: part(value) for name, value in x.items()}
        return x

    one, one_state = opt.update(part(grads), part(state), part(params))
    assert_same(one, part(whole))
    assert_same(one_state, part(whole_state))


@pytest.mark.long
@every_case
def test_it_traces_without_data_and_without_promotion(opt, dtypes):
    """No host synchronisation (fake tensors have no values), no float64 arithmetic on narrower leaves."""
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        params = tree.map(mode.from_tensor, make_params(dtypes))
        state = opt.init(params)
        graph = make_fx(lambda *args: opt.update(*args))(params, state, params).graph
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() and torch.float64 not in dtypes:
            assert value.dtype != torch.float64, node


def test_errors_for_people():
    for make, message in [
        (lambda: adamw(-1.0), "learning_rate: got -1.0"),
        (lambda: adamw(float("nan")), "learning_rate"),
        (lambda: adamw(1e-3, b1=1.0), "b1: got 1.0"),
        (lambda: adamw(1e-3, b2=-0.1), "b2: got -0.1"),
        (lambda: adamw(1e-3, eps=-1), "eps: got -1"),
        (lambda: adamw(1e-3, weight_decay=-0.1), "weight_decay: got -0.1"),
        (lambda: adamw(1e-3, decay="norm"), r"\['norm'\]"),
        (lambda: sgd(1e-3, momentum=1.0), "momentum: got 1.0"),
        (lambda: sgd(1e-3, nesterov=True), "momentum: got 0"),
        (lambda: optimizer(master=scale_by_adam()), "'master'"),
        (lambda: adamw(1e-3).init({}), "nothing to update"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    opt, params = adamw(1e-3), make_params(DTYPES["fp32"])
    with pytest.raises(ValueError, match="embed: got nothing, wanted a dict of table"):
        opt.update({"blocks": params["blocks"]}, opt.init(params), params)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: optim.adamw(1e-3, betas=(0.9, 0.95)),
            r"adamw: got .*'betas', wanted \(learning_rate, b1, .*; give b1 and b2",
        ),
        (lambda: optim.adamw(lr=1e-3), r"adamw: got .*, wanted \(learning_rate, .*; the rate comes first"),
        (lambda: optim.adamw(1e-3, mask={}), r"adamw: got .*'mask', wanted .*; give decay="),
        (lambda: optim.sgd(), r"sgd: got .*missing .*'learning_rate', wanted \(learning_rate"),
        (lambda: optim.adamw(1e-3, decay=True), r"where: got True, wanted .*; \[\"\"\] is every leaf"),
        (
            lambda: optim.skip_nonfinite(optim.sgd(0.1), optim.LossScale()),
            r"skip_nonfinite: got .*positional.*, wanted \(opt, clip_norm, spike, loss_scale\)",
        ),
    ],
)
def test_arguments_of_other_libraries(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
