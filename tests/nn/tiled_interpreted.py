"""The kernels of `nn.tiled_attention` in triton's interpreter, against the walk in fp64: the largest differences, JSON.

TRITON_INTERPRET=1 python -m tests.nn.tiled_interpreted. Two tiles of queries and of keys, grouped heads, values of
another width, rows that see nothing, sizes that no tile divides.
"""

import json
import sys

import torch

from fmegatron.nn import tiled_attention
from fmegatron.nn.attention_masks import Sight
from fmegatron.nn.tiled_attention import Dropped, tiled, tiled_backward

B, S, T, H, G, K, V = 2, 45, 52, 4, 2, 24, 16


def rand(*shape):
    return torch.randn(*shape).transpose(1, 2)


def cases(at):
    """{name: (mask, causal, cap, dropout)}."""
    q, k = at
    mask = torch.rand(B, 1, S, T) < 0.6
    words = torch.randint(0, 2**32, (2, B, S))
    dropped = Dropped(words, torch.arange(H) * T + 7 * T, 0.3)
    return {
        "causal": (None, True, None, None),
        "documents": (Sight(q, k), False, None, None),
        "window, cap": (Sight(q[:1], k[:1], 9), False, 2.0, None),
        "one row of positions": (Sight(q[:1, :1], k[:1, :1], 11), False, None, None),
        "mask": (mask, False, None, None),
        "cap, dropout": (None, True, 1.5, dropped),
        "documents, window, dropout": (Sight(q, k, 12), False, None, dropped),
    }


def main():
    """Print what differs."""
    torch.manual_seed(0)
    given = rand(B, S, H, K), rand(B, T, G, K), rand(B, T, G, V)
    at_q, at_k = (torch.stack((torch.randint(0, 30, (B, n)), torch.randint(0, 2, (B, n)))) for n in (S, T))
    at_q[0, 1, :20] -= 40  # these see nothing
    do, found = rand(B, S, H, V), {}
    for name, how in cases((at_q, at_k)).items():
        rest = tiled_attention._rest(*how)
        o, lse = (torch.empty_like(x) for x in tiled(*given, *how))
        tiled_attention._launched((*given, *rest), (o, lse))
        exact = tuple(x.double() for x in given)
        want = tiled(*exact, *how)
        grads = tuple(torch.empty_like(x) for x in given)
        out = do, want[0].float(), want[1].float()
        tiled_attention._launched((out[0], *given, *out[1:], *rest), grads)
        wanted = tiled_backward(exact, (do.double(), *want), *how)
        pairs = zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), (*want, *wanted), strict=True)
        found[name] = {key: (x.double() - y).nan_to_num(0.0, 9.0, 9.0).abs().max().item() for key, x, y in pairs}
        found[name]["hidden"] = float((lse.isinf() != want[1].isinf()).sum())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
