"""Muon, SOAP, Lion and Adafactor against torch.optim or against the paper's algorithm written out."""

import functools
import math

import numpy as np
import pytest
import torch

from fmegatron import optim, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.optim import contrib
from fmegatron.optim.orthogonalized import COEFFICIENTS, orthogonalize, scale_by_muon

STEPS = 12


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def stacked(params, layers):
    """Params that know which of them are stacks of layers: `layers` is a pattern of their paths."""
    specs = tree.specs(tree.map(lambda x: tuple(x.shape), params), Mesh(), dtype=torch.float64, stacked=layers)
    return tree.place(params, specs)


def newton_schulz(G, steps=5, eps=1e-7):
    """The blog post's zeropower_via_newtonschulz5, in the dtype of G."""
    a, b, c = COEFFICIENTS
    X = G.T if G.size(0) > G.size(1) else G
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        A = X @ X.T
        B = b * A + c * A @ A
        X = a * X + B @ X
    return X.T if G.size(0) > G.size(1) else X


def reference_muon(w, grads, lr, momentum, nesterov, weight_decay, scale):
    """One matrix [in, out], as Jordan's Muon with decoupled decay does it."""
    w, m = w.clone(), torch.zeros_like(w)
    rows, columns = w.shape
    factor = {"original": math.sqrt(max(1, columns / rows)), "rms": 0.2 * math.sqrt(max(rows, columns)), "none": 1.0}
    for g in grads:
        m.lerp_(g, 1 - momentum)
        u = g.lerp(m, momentum) if nesterov else m
        w.mul_(1 - lr * weight_decay).sub_(lr * factor[scale] * newton_schulz(u))
    return w


@pytest.mark.long
@pytest.mark.parametrize("scale, nesterov", [("original", True), ("rms", True), ("none", False)])
def test_muon_is_the_papers_matrix_by_matrix(scale, nesterov):
    """Stacks, tall and wide, square; q, k, v and heads as matrices of their own; AdamW for the rest."""
    params = {"blocks": {"wqkv": draw(3, 6, 12), "w_gate_up": draw(3, 6, 8), "down": draw(3, 8, 6)}, "norm": draw(3, 6)}
    params = stacked(params, ".*")
    parts = {"blocks/wqkv": (6, 3, 3), "blocks/w_gate_up": (4, 4), "blocks/down": (6,)}
    grads = [tree.map(lambda x, i=i: draw(*x.shape, seed=i + 1), params) for i in range(STEPS)]
    rules = [("wqkv", (6, 3, 3)), ("blocks/w_gate_up", 2)]
    opt = optim.muon(0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.1, scale=scale, parts=rules)
    got, state = params, opt.init(params)
    for g in grads:
        got, state = opt.update(g, state, got)
    for name, sizes in parts.items():
        leaf = name.removeprefix("blocks/")
        for layer in range(3):
            whole = params["blocks"][leaf][layer].split(list(sizes), -1)
            pieces = [[g["blocks"][leaf][layer].split(list(sizes), -1)[i] for g in grads] for i in range(len(sizes))]
            wanted = [reference_muon(w, g, 0.02, 0.9, nesterov, 0.1, scale) for w, g in zip(whole, pieces, strict=True)]
            torch.testing.assert_close(got["blocks"][leaf][layer], torch.cat(wanted, -1), rtol=1e-11, atol=1e-12)
    adam, alone = optim.adamw(0.02), {"norm": params["norm"]}  # it knows that it is a stack
    state = adam.init(alone)
    for g in grads:
        alone, state = adam.update({"norm": g["norm"]}, state, alone)
    assert torch.equal(got["norm"], alone["norm"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_iterates_in_the_dtype_that_it_is_given(dtype):
    """In float32 as the reference in float64, to float32's rounding; in bf16 not."""
    w, g = draw(6, 10, dtype=torch.float32), draw(6, 10, seed=1, dtype=torch.float32)
    opt = optim.muon(0.02, momentum=0.9, scale="rms", dtype=dtype)
    got = opt.update({"w": g}, opt.init({"w": w}), {"w": w})[0]["w"]
    wanted = reference_muon(w.double(), [g.double()], 0.02, 0.9, True, 0.1, "rms")
    error = (got.double() - wanted).abs().max() / 0.02
    assert error < 1e-5 if dtype == torch.float32 else 1e-4 < error < 0.1
    assert "float32" in repr(opt) or dtype == torch.bfloat16


@pytest.mark.parametrize("scale, theirs", [("original", "original"), ("rms", "match_rms_adamw")])
def test_muon_is_torchs(scale, theirs):
    """torch keeps weights as [out, in] and iterates in bf16, as we do for float32."""
    w = draw(6, 10, dtype=torch.float32)
    leaf = w.T.clone().requires_grad_()
    reference = torch.optim.Muon([leaf], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn=theirs)
    opt = optim.muon(0.02, momentum=0.9, scale=scale, weight_decay=0.1)
    params = {"w": w}
    state = opt.init(params)
    for i in range(STEPS):
        g = draw(6, 10, seed=i + 1, dtype=torch.float32)
        leaf.grad = g.T.clone()
        reference.step()
        params, state = opt.update({"w": g}, state, params)
        torch.testing.assert_close(params["w"], leaf.detach().T, rtol=0, atol=0.02 * (i + 1) * 2**-6)


def test_orthogonalize():
    x = draw(4, 5, 9)
    y = orthogonalize(x)
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    assert ((y * (u @ vh)).sum((-2, -1)) / y.norm(dim=(-2, -1)) / math.sqrt(5) > 0.95).all()
    torch.testing.assert_close(orthogonalize(x.mT).mT, y)
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 7])
def test_steps_on_gram_matrices_are_the_steps(steps):
    """Wide enough, x takes part in two products of three steps: the same numbers, and in bf16 as good as one by one."""
    x = draw(3, 4, 9)
    for got, one in zip(orthogonalize(x, steps), x, strict=True):
        torch.testing.assert_close(got, newton_schulz(one, steps), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("decay", [0.0, 1.0], ids=["gauss", "falling"])
def test_steps_on_gram_matrices_stand_bf16(decay):
    x = torch.arange(1, 65).double().pow(-decay)[:, None] * draw(64, 256)
    exact, low = orthogonalize(x), orthogonalize(x.bfloat16()).double()
    values = torch.linalg.svdvals(low)
    assert values.min() > 0.6 and values.max() < 1.3
    assert (exact * low).sum() > 0.99 * exact.norm() * low.norm()


def test_per_head_is_each_head():
    x = {"wq": draw(2, 6, 12)}
    opt = optim.muon(1.0, momentum=0.0, weight_decay=0.0, scale="none", parts=[("wq", 4)])
    moved, _ = opt.update(x, opt.init(x), {"wq": torch.zeros(2, 6, 12, dtype=torch.float64)})
    heads = torch.stack([orthogonalize(head) for head in x["wq"].split(3, -1)])
    torch.testing.assert_close(-moved["wq"], torch.cat(list(heads), -1))


def test_the_first_rule_of_parts_decides():
    """As in `grouped` and in `layout.Rules`: the narrower rule stands first."""

    def moved(*rules):
        opt, x = optim.muon(1.0, momentum=0.0, weight_decay=0.0, parts=rules), {"wq": draw(6, 12)}
        return opt.update(x, opt.init(x), x)[0]["wq"]

    assert torch.equal(moved(("wq", 4), ("w.*", 2)), moved(("wq", 4)))
    assert not torch.equal(moved(("wq", 4)), moved(("w.*", 2)))


def test_lion_is_algorithm_2():
    p, m, lr, b1, b2, decay = draw(5, 3), torch.zeros(5, 3, dtype=torch.float64), 0.01, 0.9, 0.99, 0.3
    opt = optim.lion(lr, b1, b2, decay)
    params = {"w": p}
    state = opt.init(params)
    for i in range(STEPS):
        g = draw(5, 3, seed=i + 1)
        c = b1 * m + (1 - b1) * g
        p = p - lr * (c.sign() + decay * p)
        m = b2 * m + (1 - b2) * g
        params, state = opt.update({"w": g}, state, params)
        torch.testing.assert_close(params["w"], p, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("weight_decay, clip", [(0.0, 1.0), (0.1, 1.5)])
def test_adafactor_is_torchs_layer_by_layer(weight_decay, clip):
    """torch caps the rate by 1/√t, which 0.01 is below; a stacked leaf is its layers, each a parameter of torch."""
    params = stacked({"w": draw(3, 6, 4), "norm": draw(3, 5), "scale": draw()}, "w|norm")
    leaves = {
        (path, i): layer.clone().requires_grad_()
        for path, x in params.items()
        for i, layer in enumerate(x if x.dim() > 1 else x[None])
    }
    settings = {"lr": 0.01, "d": clip, "weight_decay": weight_decay, "eps": (1e-15, 1e-3)}
    reference = torch.optim.Adafactor(list(leaves.values()), **settings)
    opt = contrib.adafactor(0.01, clip=clip, weight_decay=weight_decay, decay=lambda path: True)
    state = opt.init(params)
    assert {path: tuple(x.shape) for path, x in zip(tree.paths(state), tree.leaves(state), strict=True)} == {
        "count": (), "factored/row/w": (3, 6), "factored/col/w": (3, 4), "factored/full/norm": (3, 5),
        "factored/full/scale": (),
    }  # fmt: skip
    for step in range(STEPS):
        grads = tree.map(lambda x, s=step: 10.0 ** (s % 3 - 1) * draw(*x.shape, seed=s + 1), params)
        for (path, i), leaf in leaves.items():
            leaf.grad = (grads[path][i] if grads[path].dim() else grads[path]).clone()
        reference.step()
        params, state = opt.update(grads, state, params)
        for (path, i), leaf in leaves.items():
            got = params[path][i] if params[path].dim() else params[path]
            torch.testing.assert_close(got, leaf.detach(), rtol=1e-10, atol=1e-12, msg=f"{path} {i} step {step}")


def reference_soap(w, grads, lr, b1, b2, eps, weight_decay, left, right):
    """One matrix in numpy: L, R, their bases by one QR each step, and Adam between them."""
    w, (rows, columns) = w.numpy().copy(), w.shape
    M, V, L, R = np.zeros(w.shape), np.zeros(w.shape), np.zeros((rows, rows)), np.zeros((columns, columns))
    QL, QR = np.eye(rows), np.eye(columns)

    def refreshed(P, Q):
        return np.linalg.qr(P @ Q + 1e-6 * np.trace(P) / len(P) * Q)[0]

    for t, g in enumerate((g.numpy() for g in grads), 1):
        L, R = b2 * L + (1 - b2) * g @ g.T, b2 * R + (1 - b2) * g.T @ g
        QL, QR = refreshed(L, QL) if left else QL, refreshed(R, QR) if right else QR
        M = b1 * M + (1 - b1) * g
        V = b2 * V + (1 - b2) * (QL.T @ g @ QR) ** 2
        N = (QL.T @ M @ QR) / (1 - b1**t) / (np.sqrt(V / (1 - b2**t)) + eps)
        w = w - lr * (QL @ N @ QR.T + weight_decay * w)
    return torch.from_numpy(w)


@pytest.mark.parametrize("max_dim, left, right", [(100, True, True), (5, True, False), (3, False, False)])
def test_soap_is_the_papers_matrix_by_matrix(max_dim, left, right):
    """Stacks of matrices with one or two bases; with none it is AdamW."""
    w, grads = draw(3, 5, 7), [10.0 ** (i % 3 - 1) * draw(3, 5, 7, seed=i + 1) for i in range(STEPS)]
    opt = contrib.soap(0.02, b1=0.9, b2=0.95, max_dim=max_dim, weight_decay=0.1)
    params = {"w": w}
    state = opt.init(params)
    for g in grads:
        params, state = opt.update({"w": g}, state, params)
    for layer in range(3):
        wanted = reference_soap(w[layer], [g[layer] for g in grads], 0.02, 0.9, 0.95, 1e-8, 0.1, left, right)
        # Directions that no gradient has reached yet stand on the ridge, a millionth: rounding counts that much more.
        torch.testing.assert_close(params["w"][layer], wanted, rtol=1e-7, atol=1e-9)


def test_soap_finds_the_eigenvectors_and_so_sees_less_of_a_rotation_than_adam():
    """With gradients of fixed statistics the bases converge; what differs is from the steps before they have."""
    scales, turn = torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64), torch.linalg.qr(draw(4, 4, seed=9)).Q

    def run(opt, turn):
        params = {"w": torch.zeros(4, 4, dtype=torch.float64)}
        state = opt.init(params)
        for i in range(60):
            params, state = opt.update({"w": turn @ (scales[:, None] * draw(4, 4, seed=i))}, state, params)
        return turn.T @ params["w"], state

    def seen(opt):
        plain, rotated = run(opt, torch.eye(4, dtype=torch.float64))[0], run(opt, turn)[0]
        return (plain - rotated).norm() / plain.norm()

    opt = contrib.soap(0.01, b1=0.9, b2=0.99, weight_decay=0.0)
    assert seen(opt) < 0.5 * seen(optim.adamw(0.01, b1=0.9, b2=0.99, weight_decay=0.0))
    state = run(opt, turn)[1]["soap"]
    diagonal = state["left_basis"]["w"].T @ state["left"]["w"] @ state["left_basis"]["w"]
    assert (diagonal - diagonal.diag().diag()).norm() < 0.02 * diagonal.norm()


def test_errors_for_people():
    mesh = Mesh(tp=2)
    layout = Layout((4, 4), torch.float32, mesh, ("tp",))
    some = {"w": tree.place(torch.ones(2, 4), layout), "v": torch.ones(2, 4)}  # of two leaves one is known
    muon = functools.partial(optim.muon, 0.1)
    for make, message in [
        (lambda: muon(momentum=1.0), "momentum: got 1.0"),
        (lambda: muon(scale="adam"), "scale: got 'adam', wanted one of original, rms, none"),
        (lambda: scale_by_muon(steps=0), "steps: got 0"),
        (lambda: muon(matrices=["w"]).init({"w": torch.ones(3)}), r"muon: w: got shape \(3,\)"),
        (lambda: muon().init(some), r"muon: v: got a parameter whose layout is not known, and w, .*tree.place"),
        (lambda: _one_update(muon(parts=[("w", 3)])), r"got parts 3 of a last dim of size 4"),
        (lambda: optim.lion(1e-3, b1=1.0), "lion: b1: got 1.0"),
        (lambda: contrib.soap(0.1, b1=1.0), "soap: b1: got 1.0"),
        (lambda: contrib.soap(0.1, matrices=["w"]).init({"w": torch.ones(3)}), r"soap: w: got shape \(3,\)"),
        (lambda: contrib.soap(0.1).init(some), "soap: v: got a parameter whose layout is not known"),
        (lambda: contrib.adafactor(1e-3, clip=0), "clip: got 0"),
        (lambda: contrib.adafactor(1e-3, eps2=-1), "eps2: got -1"),
        (lambda: contrib.adafactor(1e-3, decay_power=0.8), "decay_power: got 0.8"),
        (lambda: contrib.adafactor(1e-3, eps=-1.0), "eps: got -1"),
        (lambda: contrib.adafactor(1e-3).init(some), "adafactor: v: got a parameter whose layout is not known"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def _one_update(opt):
    params = {"w": torch.ones(4, 4)}
    return opt.update(params, opt.init(params), params)
