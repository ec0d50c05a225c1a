"""Steps with one mistake each that a CUDA device would not forgive; `tests.cuda.look` is given them by name."""

import torch
import torch.nn.functional as F

from fmegatron import step, tree
from fmegatron.layout import Layout, Mesh
from fmegatron.step.torch_private import outside_of_tracing

SEQ, WIDTH, HEADS = 176, 64, 2


def made(of_loss):
    """(a step of plain SGD, its mesh) whose loss is of_loss(q, k, v), each [B, H, S, K]."""
    mesh = Mesh()

    def loss_fn(params, batch):
        qkv = (batch["x"] @ params["w"]).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(-3))
        return of_loss(q, k, v).float().square().mean()

    def update(params, batch):
        (loss, _), grads = step.value_and_grad(loss_fn)(params, batch)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    layouts = {"w": Layout((WIDTH, 3 * WIDTH), torch.bfloat16, mesh)}
    return step.Description(update, layouts, {"x": Layout((2, SEQ, WIDTH), torch.bfloat16, mesh)}), mesh


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def right():
    """No mistake."""
    return made(causal)


def constant_on_cpu():
    """A number that stays where torch makes it."""
    return made(lambda q, k, v: causal(q, k, v) * torch.tensor(0.5))


def item():
    """The host reads a value."""
    return made(lambda q, k, v: causal(q, k, v) * q.float().mean().item())


def there_and_back():
    """A value travels to the host and back."""
    return made(lambda q, k, v: causal(q, k, v) + v.cpu().exp().to(v.device))


def dense_mask():
    """What a kernel knows by itself is given as a mask."""
    mask = lambda q: torch.ones(SEQ, SEQ, dtype=torch.bool, device=q.device).tril()  # noqa: E731
    return made(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q)))


def dense_scores():
    """Attention of two products."""
    return made(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)


def of_cpu_only():
    """An operator that was registered for the CPU alone."""
    library = torch.library.Library("fmegatron_mutant", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    torch.library.register_fake("fmegatron_mutant::twice", torch.empty_like, lib=library)

    def loss(q, k, v):
        return causal(q, k, v) + library_of(loss).twice(v.detach())

    loss.library = library  # which lives as long as the loss
    return made(loss)


def library_of(_):
    return torch.ops.fmegatron_mutant


def real_tensor():
    """A tensor of the device that is made while the step is traced."""

    def loss(q, k, v):
        with outside_of_tracing():
            torch.zeros(1, device=q.device)
        return causal(q, k, v)

    return made(loss)
