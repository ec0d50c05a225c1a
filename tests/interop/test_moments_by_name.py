"""Moments belong to the parameters of their names, in whatever order two programs register them."""

import pytest
import torch
import torch.distributed.checkpoint

from fmegatron import interop


class Layers(torch.nn.Module):
    def __init__(self, order, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        for name in order:
            setattr(self, name, torch.nn.Linear(4, 4))

    def forward(self, x):
        return sum(getattr(self, name)(x) * (i + 2) for i, name in enumerate(sorted(dict(self.named_children()))))


def trained(net, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def grouped(net, turn=1):
    decays = [x for name, x in net.named_parameters() if "weight" in name][::turn]
    others = [x for name, x in net.named_parameters() if "weight" not in name][::turn]
    return torch.optim.AdamW([{"params": decays, "lr": 1e-2}, {"params": others, "weight_decay": 0.0}], lr=2e-2)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("order", ["abc", "bca", "cba"])
def test_another_order_of_registration(tmp_path, order, fresh, groups):
    make = grouped if groups else lambda net, turn=1: torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, other = Layers("abc"), Layers(order, 1)
    optimizer, another = make(net), make(other, -1)
    trained(net, optimizer)
    if not fresh:
        trained(other, another, 1)
    interop.save_state_dict(tmp_path / "c", {"model": net, "optimizer": optimizer})
    own = [[id(x) for x in group["params"]] for group in another.param_groups]
    interop.load_state_dict(tmp_path / "c", {"model": other, "optimizer": another})
    assert own == [[id(x) for x in group["params"]] for group in another.param_groups]
    of = dict(net.named_parameters())
    for name, x in other.named_parameters():
        for key, value in optimizer.state[of[name]].items():
            assert torch.equal(another.state[x][key], value), (name, key)
    trained(net, optimizer)
    trained(other, another)
    assert all(torch.equal(x, of[name]) for name, x in other.named_parameters())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_dcp", [False, True])
def test_names_that_the_optimizer_was_given(tmp_path, is_dcp):
    """Without the module, whose names would count; also of torch's own checkpoint. Each group keeps its own names."""
    net, other = Layers("abc"), Layers("cba", 1)
    optimizer, another = (torch.optim.AdamW(list(x.named_parameters())) for x in (net, other))
    trained(net, optimizer)
    if is_dcp:
        torch.distributed.checkpoint.save({"o": optimizer.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        interop.save_state_dict(tmp_path / "c", {"o": optimizer})
    interop.load_state_dict(interop.source(tmp_path / "c"), {"o": another})
    of = dict(net.named_parameters())
    for name, x in other.named_parameters():
        assert torch.equal(another.state[x]["exp_avg"], optimizer.state[of[name]]["exp_avg"]), name
    assert another.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]


@pytest.mark.parametrize("order", ["abc", "cba"])
@pytest.mark.parametrize("was_named", [False, True])
def test_names_of_groups_on_one_side_only(tmp_path, was_named, order):
    """The module beside the optimizer says whose moments they are, whichever of the two was made of names."""
    net, other = Layers("abc"), Layers(order, 1)
    named = (torch.optim.AdamW(list(x.named_parameters())) for x in (net, other))
    plain = (torch.optim.AdamW(x.parameters()) for x in (net, other))
    (optimizer, _), (_, another) = (named, plain) if was_named else (plain, named)
    trained(net, optimizer)
    interop.save_state_dict(tmp_path / "c", {"model": net, "optimizer": optimizer})
    before = another.state_dict()["param_groups"][0].get("param_names")
    interop.load_state_dict(tmp_path / "c", {"model": other, "optimizer": another})
    of = dict(net.named_parameters())
    for name, x in other.named_parameters():
        assert torch.equal(another.state[x]["exp_avg"], optimizer.state[of[name]]["exp_avg"]), name
    assert another.param_groups[0].get("param_names") == before


def test_a_tied_parameter_has_several_names(tmp_path):
    """The first to be registered is noted; another program may register another one first."""
    net, other = Layers("abc"), Layers("cba", 1)
    for one in (net, other):
        one.c.weight = one.a.weight
    optimizer, another = (torch.optim.AdamW(x.parameters()) for x in (net, other))
    trained(net, optimizer)
    interop.save_state_dict(tmp_path / "c", {"model": net, "optimizer": optimizer})
    interop.load_state_dict(tmp_path / "c", {"model": other, "optimizer": another})
    of = dict(net.named_parameters(remove_duplicate=False))
    for name, x in other.named_parameters(remove_duplicate=False):
        assert torch.equal(another.state[x]["exp_avg"], optimizer.state[of[name]]["exp_avg"]), name


def test_other_parameters_are_refused(tmp_path):
    """By their names; and nothing is changed. State dicts have no names: they go by number, as torch's do."""
    net, other = Layers("abc"), Layers("abd")
    optimizer = torch.optim.AdamW(net.parameters())
    another = torch.optim.AdamW(other.parameters())
    trained(net, optimizer)
    interop.save_state_dict(tmp_path / "c", {"model": net, "optimizer": optimizer})
    with pytest.raises(ValueError, match="wanted the same names: c.bias, c.weight, d.bias, d.weight"):
        interop.load_state_dict(tmp_path / "c", {"model": other, "optimizer": another})
    assert not another.state
    state = {"optimizer": torch.optim.AdamW(Layers("abc").parameters()).state_dict()}
    interop.load_state_dict(tmp_path / "c", state, strict="subset")
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], optimizer.state[net.a.weight]["exp_avg"])
    moved = torch.optim.AdamW([{"params": [net.a.weight]}, {"params": [*net.parameters()][1:]}])
    with pytest.raises(ValueError):
        interop.load_state_dict(tmp_path / "c", {"model": net, "optimizer": moved})
