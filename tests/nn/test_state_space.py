"""The ops of Mamba-2 against the recurrence and torch's convolution, fp64: values and each gradient."""

import pytest
import torch
import torch.nn.functional as F

from fmegatron import nn
from fmegatron.collectives import Axes
from fmegatron.layout import Layout, Mesh
from fmegatron.nn.state_space import causal_conv, gated_rms_norm, ssd_step
from fmegatron.nn.state_space import segments as segments_of_nn
from fmegatron.testing import assert_parity

ONE = Axes(Mesh())["tp"]
B, S, H, P, N = 2, 13, 4, 3, 5
DOCUMENTS = torch.tensor(
    [[0, 0, 0, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0], [7] * 13]
)  # an id that comes back is another document


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + len(shape)))


def inputs(groups, length=S):
    x, b, c = draw(B, length, H, P), draw(B, length, groups, N, seed=1), draw(B, length, groups, N, seed=2)
    dt, a = F.softplus(draw(B, length, H)), -draw(H).exp()
    return [t.requires_grad_() for t in (x, dt, a, b, c)]


def recurrence(x, dt, a, b, c, documents=None, state=None):
    """Token by token, as the definition has it."""
    b, c = (t.repeat_interleave(H // t.shape[2], 2) for t in (b, c))
    h = torch.zeros(B, H, P, N, dtype=x.dtype) if state is None else state
    out = []
    for t in range(x.shape[1]):
        if documents is not None and t:
            h = h * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        h = h * (dt[:, t] * a).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append((h * c[:, t, :, None]).sum(-1))
    return torch.stack(out, 1), h


def scan(given, chunk, **others):
    return nn.ssd(*given, chunk=chunk, tp=ONE, grouped=given[3].shape[2] > 1, **others)


def assert_equal(got, want, leaves):
    """Two pairs of results, and the gradients of some function of both."""
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    grads = [torch.autograd.grad(sum((x.sin() * x).sum() for x in pair), leaves) for pair in (got, want)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(("groups", "chunk"), [(1, 4), (2, 13), (4, 64), (2, 1), (1, 12)])
def test_the_scan_is_the_recurrence(groups, chunk, packed):
    given, state = inputs(groups), draw(B, H, P, N).requires_grad_()
    documents = DOCUMENTS if packed else None
    segments = segments_of_nn(DOCUMENTS) if packed else None
    got = scan(given, chunk, segments_BS=segments, state_BHPN=state)
    assert_equal(got, recurrence(*given, documents, state), [*given, state])


def test_one_token_after_the_other():
    given = inputs(2)
    with torch.no_grad():
        want, last = scan(given, 4)
        x, dt, a, b, c = given
        _, state = scan([t if t is a else t[:, :6] for t in given], 4)
        for t in range(6, S):
            y, state = ssd_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], state)
            torch.testing.assert_close(y, want[:, t], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, last, rtol=1e-11, atol=1e-11)


def test_long_steps_do_not_overflow():
    """exp of what lies between two tokens only: a decay of e^-800 within a chunk gives no 0/0, forward and backward."""
    x, dt, a, b, c = (t.float().detach().requires_grad_() for t in inputs(1))
    y, _ = scan((x, dt * 100, a * 3, b, c), 13)
    grads = torch.autograd.grad(y.square().sum(), (x, dt, a, b, c))
    assert all(t.isfinite().all() for t in (y, *grads))


@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_is_torchs(bias):
    x, w, b = draw(B, S, 6).requires_grad_(), draw(4, 6).requires_grad_(), draw(6).requires_grad_()
    want = F.conv1d(x.mT, w.t()[:, None], b if bias else None, padding=3, groups=6)[..., :S].mT
    assert_equal((causal_conv(x, w, b if bias else None),), (want,), [x, w, b][: 2 + bias])
    late = causal_conv(x[:, 7:], w, b if bias else None, before_BWC=x[:, 4:7])
    torch.testing.assert_close(late, want[:, 7:])


def test_documents_have_a_convolution_each():
    x, w = draw(B, S, 6), draw(4, 6)
    got = causal_conv(x, w, segments_BS=segments_of_nn(DOCUMENTS))
    for lo, hi in ((0, 3), (3, 5), (5, 9), (9, 13)):
        torch.testing.assert_close(got[:1, lo:hi], causal_conv(x[:1, lo:hi], w))
    torch.testing.assert_close(got[1:], causal_conv(x[1:], w))


def test_segments_go_on_behind_a_part_of_a_row():
    parts = DOCUMENTS[:, :5], DOCUMENTS[:, 5:]
    assert segments_of_nn(parts[1], parts[0][:, -1]).tolist() == [[1, 1, 1, 1, 2, 2, 2, 2], [0] * 8]
    assert segments_of_nn(DOCUMENTS)[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("groups", [1, 4])
def test_the_gated_norm_on_a_mesh(groups):
    x, gate, w, weights = draw(3, 5, 16), draw(3, 5, 16, seed=1), draw(16), draw(3, 5, 16, seed=2)
    z = (x * F.silu(gate)).unflatten(-1, (groups, -1))
    want = (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2) * w

    def of_mesh(mesh):
        tp = Axes(mesh)["tp"]

        def step(x, gate, w, weights):
            leaves = [t.detach().requires_grad_() for t in (x, gate, w)]
            y = gated_rms_norm(*leaves, groups, tp)
            return y, *torch.autograd.grad((y * weights).sum(), leaves)

        return step

    torch.testing.assert_close(of_mesh(Mesh())(x, gate, w, weights)[0], want)
    mesh = Mesh(tp=2)
    wide, narrow = Layout((3, 5, 16), x.dtype, mesh, (None, None, "tp")), Layout((16,), x.dtype, mesh, ("tp",))
    layouts = (wide, wide, narrow, wide)
    assert_parity(of_mesh, mesh, x, gate, w, weights, layouts=layouts, out_layouts=(wide, wide, wide, narrow))


def test_groups_that_tp_cuts():
    with pytest.raises(ValueError, match=r"groups: got 3, wanted 1 or a multiple of tp=2; choose a divisor as tp"):
        gated_rms_norm(draw(2, 6), draw(2, 6), draw(6), 3, Axes(Mesh(tp=2))["tp"])
