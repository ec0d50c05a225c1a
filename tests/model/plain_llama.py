"""A Llama in plain torch on whole weights, written from the paper, no code of fmegatron: the foreign reference.

Legend: B batch, S sequence, D width, H heads, K head width. Weights are the global arrays of fmegatron's tree.
"""

import torch
import torch.nn.functional as F


def rotate(x_BHSK, theta):
    """RoPE by complex numbers: pair (i, i + K/2) is one number, times exp(i * position * theta^(-2i/K))."""
    B, H, S, K = x_BHSK.shape
    frequency = theta ** (-torch.arange(0, K, 2, dtype=torch.float64) / K)
    turn = torch.polar(torch.ones(S, K // 2, dtype=torch.float64), torch.outer(torch.arange(S).double(), frequency))
    z = torch.complex(x_BHSK[..., : K // 2].double(), x_BHSK[..., K // 2 :].double()) * turn
    return torch.cat([z.real, z.imag], -1).to(x_BHSK.dtype)


def forward(params, tokens, c):
    """Logits [B, S, V] with the padded columns."""
    x = F.embedding(tokens, params["embed"]["table"])
    B, S, D = x.shape
    a, m = (part.mixer for part in c.blocks[0])
    K, rep, eps = a.head_dim, a.heads // a.kv_heads, c.norm.eps
    b = params["blocks"]
    for i in range(c.layers):
        u = F.rms_norm(x, (D,), b["attention_norm"][i], eps)
        q, k, v = (u @ b["attention"]["wqkv"][i]).split([a.heads * K, a.kv_heads * K, a.kv_heads * K], -1)
        q, k, v = (t.view(B, S, -1, K).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, a.rope.theta), rotate(k, a.rope.theta)
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
        score = (q @ k.mT) / K**0.5
        score = score.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), float("-inf"))
        x = x + (score.softmax(-1) @ v).transpose(1, 2).reshape(B, S, D) @ b["attention"]["wo"][i]
        u = F.rms_norm(x, (D,), b["mlp_norm"][i], eps)
        gate, up = (u @ b["mlp"]["w_gate_up"][i]).split(m.ffn_dim, -1)
        x = x + (F.silu(gate) * up) @ b["mlp"]["w_down"][i]
    x = F.rms_norm(x, (D,), params["final_norm"], eps)
    return x @ (params["embed"]["table"].mT if c.tied else params["head"]["w"])


def loss(params, batch, c):
    """Mean cross-entropy (weighted by the mask where there is one) plus z-loss."""
    scores = forward(params, batch["tokens"], c)[..., : c.vocab_size].flatten(0, 1)
    token_loss = F.cross_entropy(scores, batch["labels"].flatten(), reduction="none")
    token_loss = token_loss + c.z_loss * scores.logsumexp(-1).square()
    weight = batch["mask"].flatten().to(token_loss.dtype) if "mask" in batch else torch.ones_like(token_loss)
    return (token_loss * weight).sum() / weight.sum()
