"""Global arrays cut into local tensors and put together again, by boxes alone."""

import math

import torch

from fmegatron.layout import Split


def numbered(shape, dtype=torch.float32) -> torch.Tensor:
    """A global array in which every element has a value of its own."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape).to(dtype)


def cut(x: torch.Tensor, layout) -> list[torch.Tensor]:
    """The local tensor of every rank."""
    locals_ = []
    for rank in range(layout.mesh.size):
        local = torch.full(layout.local_shape(rank), -1.0, dtype=x.dtype)
        for box in layout.boxes(rank):
            box.view(local).copy_(x[box.slices])
        locals_.append(local)
    return locals_


def reference_local(x: torch.Tensor, layout, rank: int) -> torch.Tensor:
    """A rank's local tensor by torch.chunk in sequence, written from the definition and without boxes."""

    def assigned(t, dim):
        split, index = layout.spec[dim], layout.mesh.index(rank, layout.axes(dim))
        order = split.order or range(layout.mesh.extent(layout.axes(dim)))
        return [piece for piece, holder in zip(t.split(split.sizes, dim), order, strict=True) if holder == index]

    def take(t, dim, axes):
        for name in axes:
            chunks = t.chunk(layout.mesh[name], dim) if t.shape[dim] else ()
            i = layout.mesh.coordinates(rank)[name]
            t = chunks[i] if i < len(chunks) else t.narrow(dim, t.shape[dim], 0)
        return t

    for dim in range(x.ndim):
        if isinstance(layout.spec[dim], Split) and layout.spec[dim].assigned:
            pieces = assigned(x, dim)
        else:
            pieces = [take(part, dim, layout.axes(dim)) for part in x.split(layout.parts[dim], dim)]
        x = torch.cat(pieces or [x.narrow(dim, 0, 0)], dim)
    return take(x.flatten(layout.flat_from), layout.flat_from, layout.flat) if layout.flat else x


def execute(src, dst, locals_: list[torch.Tensor], plans) -> list[torch.Tensor]:
    """What all ranks hold after they followed their plans, messages exchanged through mailboxes per pair of ranks."""
    mail: dict[tuple[int, int], list[torch.Tensor]] = {}
    for rank, plan in enumerate(plans):
        for send in plan.sends:
            mail.setdefault((rank, send.peer), []).append(send.src.view(locals_[rank]).clone())
    results = []
    for rank, plan in enumerate(plans):
        if rank >= dst.mesh.size:
            assert not plan.receives and not plan.local
            continue
        out = torch.full(dst.local_shape(rank), -1.0, dtype=locals_[0].dtype)
        for copy in plan.local:
            copy.dst.view(out).copy_(copy.src.view(locals_[rank]))
        for receive in plan.receives:
            message = mail[receive.peer, rank].pop(0)  # in order: the k-th send is the k-th receive
            assert message.shape == receive.dst.shape
            receive.dst.view(out).copy_(message)
        results.append(out)
    assert not any(mail.values()), "messages that nobody received"
    return results
