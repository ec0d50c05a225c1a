"""Checkpoints loaded into optimizers that have not made a step: the state is made as what is stored has it."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import StepLR

from fmegatron import checkpoint
from fmegatron.interop import load_state_dict, save_state_dict
from tests.interop.models import build, full, same, state_of, train

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False, capturable=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd momentum fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


class Net(nn.Module):
    """Two layers, one of them in bf16, a parameter that is frozen and one that never gets a gradient."""

    def __init__(self, seed=0, low=torch.bfloat16):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4, bias=False).to(low)
        self.frozen, self.unused = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(2, 5))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)).to(self.down.weight.dtype)).float() * self.frozen.sum()


def step(net, optimizer):
    if not optimizer.param_groups[0].get("capturable"):  # which makes a step on accelerators only
        net(torch.arange(24.0).view(4, 6) / 24).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:  # what its first step makes there
        for p in group["params"]:
            if p.requires_grad:
                entry = optimizer.state.setdefault(p, {"step": torch.zeros(())})
                entry["step"] += 1
                entry["exp_avg"] = torch.full_like(p, entry["step"].item())
                entry["exp_avg_sq"] = torch.full_like(p, 0.5)


def state_after(optimizer):
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("way", ["objects", "state dicts"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_bit(tmp_path, kind, way):
    """Saved after two steps; a new process loads it into a model and an optimizer that have made none, and goes on."""
    # torch's own load rounds all of a bf16 parameter's state to bf16, products of rates, too; and two equal runs of its
    # fused SGD over two dtypes do not end with equal bits.
    low = torch.float32 if kind in ("nadam", "asgd", "sgd momentum fused") else torch.bfloat16
    net = Net(low=low)
    optimizer = OPTIMIZERS[kind](net.parameters())
    for _ in range(2):
        step(net, optimizer)
    save_state_dict(tmp_path / "c", {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    other = Net(seed=1, low=low)
    fresh = OPTIMIZERS[kind](other.parameters())
    if way == "objects":
        load_state_dict(tmp_path / "c", {"model": other, "optimizer": fresh})
    else:
        state = {"model": other.state_dict(), "optimizer": fresh.state_dict()}
        load_state_dict(tmp_path / "c", state)
        fresh.load_state_dict(state["optimizer"])
    for _ in range(2):
        assert same(state_after(fresh), state_after(optimizer)), kind
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True)), kind
        step(net, optimizer)
        step(other, fresh)


def test_groups_and_their_options(tmp_path):
    """Options are those that were saved, as torch's own load has it; parameters without state stay so."""

    def made(seed, lr):
        net = Net(seed)
        groups = [
            {"params": [net.down.weight, net.unused], "weight_decay": 0.0},
            {"params": [net.up.weight, net.up.bias], "lr": lr / 2},
        ]
        return net, torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9))

    net, optimizer = made(0, 0.1)
    step(net, optimizer)
    save_state_dict(tmp_path / "c", {"optimizer": optimizer})
    _, fresh = made(1, 0.3)
    load_state_dict(tmp_path / "c", {"optimizer": fresh})
    assert same(state_after(fresh), state_after(optimizer)) and [g["lr"] for g in fresh.param_groups] == [0.1, 0.05]
    assert sorted(fresh.state_dict()["state"]) == [0, 2, 3]


def test_objects_and_values_beside_each_other(tmp_path):
    """At any depth; what is no object is given back in the dict; what is not asked for is an error as ever."""
    net = Net()
    optimizers = [torch.optim.SGD(net.up.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(net.down.parameters())]
    schedulers = [StepLR(o, 1, 0.5) for o in optimizers]
    for o in optimizers:
        step(net, o)
    [s.step() for s in schedulers]
    save_state_dict(
        tmp_path / "c",
        {
            "run": {"model": net, "optimizers": optimizers, "schedulers": schedulers},
            "epoch": 3,
            "seen": torch.tensor(7),
        },
    )
    other = Net(seed=1)
    fresh = [torch.optim.SGD(other.up.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(other.down.parameters())]
    after = [StepLR(o, 1, 0.5) for o in fresh]
    state = {"run": {"model": other, "optimizers": fresh, "schedulers": after}, "epoch": 0, "seen": torch.tensor(0)}
    load_state_dict(tmp_path / "c", state)
    assert state["run"]["model"] is other and state["run"]["optimizers"] is fresh and state["epoch"] == 3
    assert state["seen"] == 7 and [s.last_epoch for s in after] == [1, 1]
    for a, b in zip([other, *fresh, *after], [net, *optimizers, *schedulers], strict=True):
        assert same(copy.deepcopy(a.state_dict()), copy.deepcopy(b.state_dict()))
    with pytest.raises(ValueError, match="stored but not asked for: .*run/schedulers"):
        load_state_dict(
            tmp_path / "c", {"run": {"model": other, "optimizers": fresh}, "epoch": 0, "seen": state["seen"]}
        )


def test_another_optimizer_is_refused(tmp_path):
    """Nothing is loaded, and the state dict is as it was."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    save_state_dict(tmp_path / "c", {"optimizer": optimizer})
    for other in (torch.optim.SGD(Net().parameters(), momentum=0.9), torch.optim.AdamW(Net().up.parameters())):
        state = {"optimizer": other.state_dict()}
        before = copy.deepcopy(state)
        with pytest.raises(ValueError, match="stored but not asked for"):
            load_state_dict(tmp_path / "c", state)
        assert same(state, before)
        with pytest.raises(ValueError, match="stored but not asked for"):
            load_state_dict(tmp_path / "c", {"optimizer": other})
        assert not other.state


def test_neither_side_has_made_a_step(tmp_path):
    optimizer, fresh = (torch.optim.AdamW(Net().parameters()) for _ in range(2))
    save_state_dict(tmp_path / "c", {"optimizer": optimizer})
    load_state_dict(tmp_path / "c", {"optimizer": fresh})
    assert not fresh.state
    stepped = Net()
    used = torch.optim.AdamW(stepped.parameters())
    step(stepped, used)
    with pytest.raises(ValueError, match="optimizer/state/2/exp_avg: not in the checkpoint"):
        load_state_dict(tmp_path / "c", {"optimizer": used})


def test_some_parameters_have_state_already(tmp_path):
    """A parameter that gets its first gradient later: only its entries are made."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    net.unused.grad = torch.ones(2, 5)
    optimizer.step()
    save_state_dict(tmp_path / "c", {"optimizer": optimizer})
    other = Net(seed=1)
    half = torch.optim.AdamW(other.parameters())
    step(other, half)
    load_state_dict(tmp_path / "c", {"optimizer": half})
    assert same(state_after(half), state_after(optimizer))


def test_rules_rename_on_the_way(tmp_path):
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    state = optimizer.state_dict()
    save_state_dict(
        tmp_path / "c", {"opt": {"state": state["state"]}, "optimizer": {"param_groups": state["param_groups"]}}
    )
    fresh = torch.optim.AdamW(Net(seed=1).parameters())
    load_state_dict(tmp_path / "c", {"optimizer": fresh}, rules=[checkpoint.rename("opt/(.*)", r"optimizer/\1")])
    assert same(state_after(fresh), state_after(optimizer))


def test_state_that_is_nested_is_refused(tmp_path):
    """LBFGS keeps lists: what was a list is not told by its path."""
    net = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    save_state_dict(tmp_path / "c", {"optimizer": optimizer})
    with pytest.raises(ValueError, match="a list or dict inside the state.*let it take one step"):
        load_state_dict(tmp_path / "c", {"optimizer": torch.optim.LBFGS(nn.Linear(3, 1).parameters(), max_iter=3)})


# ---- on ranks, as DTensors


def save_on_ranks(rank, path, kind, size):
    net, optimizer = build(kind, size)
    save_state_dict(path, {"model": net, "optimizer": optimizer})
    now = full(state_of(net, optimizer))
    train(net, optimizer)
    then = full(state_of(net, optimizer))
    if rank == 0:
        torch.save((now, then), f"{path}.wanted")
    dist.barrier()


def load_on_ranks(rank, path, kind, size):
    now, then = torch.load(f"{path}.wanted", weights_only=False)
    net, optimizer = build(kind, size, seed=7, steps=0)
    state = state_of(net, optimizer)
    try:
        load_state_dict(path, state)
        refused = False
    except ValueError as error:
        refused = "pass the optimizer itself" in str(error) and not state["optimizer"]["state"]
    load_state_dict(path, {"model": net, "optimizer": optimizer})
    right = same(full(state_of(net, optimizer)), now)
    like = all(
        isinstance(x, DTensor) == isinstance(p, DTensor) and getattr(x, "placements", 0) == getattr(p, "placements", 0)
        for p, entry in optimizer.state.items()
        for x in entry.values()
        if x.shape == p.shape
    )
    train(net, optimizer)  # as the one that was saved went on
    after = full(state_of(net, optimizer))
    close = all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(leaves(after), leaves(then), strict=True)
    )  # sums over ranks go in another order on another mesh
    return refused, right, like, len(optimizer.state) == 5, close


def leaves(value):
    if isinstance(value, dict | list | tuple):
        for _, item in sorted(value.items()) if isinstance(value, dict) else enumerate(value):
            yield from leaves(item)
    elif torch.is_tensor(value):
        yield value


@pytest.mark.long
@pytest.mark.parametrize("kind, size", [("fsdp", 4), ("fsdp_tp", 4)])
def test_dtensors_on_any_mesh(ranks, tmp_path, kind, size):
    """The moments lie like their parameters; a state dict alone does not say how, and is refused with the fix."""
    path = str(tmp_path / "c")
    ranks.run(save_on_ranks, path, kind, size, ranks=size)
    for other, count in (("fsdp", 2), ("tp", 2), ("fsdp_tp", 4)):
        got = ranks.run(load_on_ranks, path, other, count, ranks=count)
        assert got == [(True,) * 5] * count, (other, got)


def load_replicated(rank, path):
    net, optimizer = Net(seed=1), None
    optimizer = torch.optim.AdamW(net.parameters())
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    load_state_dict(path, state)
    optimizer.load_state_dict(state["optimizer"])
    return full(optimizer.state_dict())


def test_plain_replicas_need_no_object(ranks, tmp_path):
    """As under DDP: every rank holds all, so the state dict says enough."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    save_state_dict(tmp_path / "c", {"model": net, "optimizer": optimizer})
    for got in ranks.run(load_replicated, str(tmp_path / "c"), ranks=2):
        assert same(got, state_after(optimizer))
