"""The peer of the step benchmark: the same decoder as a straight nn.Module, written the way most people write it."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm attention with RoPE and grouped heads, then SwiGLU."""

    def __init__(self, dim, heads, kv_heads, ffn_dim):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim, eps=1e-5)
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        B, S, _ = x.shape
        h, g, k = self.heads, self.kv_heads, self.head_dim
        qkv = self.wqkv(self.attention_norm(x)).view(B, S, h + 2 * g, k)
        q, key, value = qkv.split((h, g, g), 2)
        q, key = rotate(q, cos, sin), rotate(key, cos, sin)
        q, key, value = (t.transpose(1, 2) for t in (q, key, value))
        o = F.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=h != g)
        x = x + self.wo(o.transpose(1, 2).reshape(B, S, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Peer(nn.Module):
    """Returns the mean token loss, so that torch.compile sees head and cross-entropy too."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.padded_vocab, config.dim)
        self.blocks = nn.ModuleList(
            Block(config.dim, config.heads, config.kv_heads, config.ffn_dim) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.padded_vocab, bias=False)
        inverse = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.arange(config.max_seq)[:, None] * inverse
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def load(self, params) -> "Peer":
        """Take the values of our parameter tree, so that both forms start alike."""
        with torch.no_grad():
            self.embed.weight.copy_(params["embed"]["table"])
            self.head.weight.copy_(params["head"]["w"].t())
            for i, block in enumerate(self.blocks):
                stacked = params["blocks"]
                block.wqkv.weight.copy_(stacked["attention"]["wqkv"][i].t())
                block.wo.weight.copy_(stacked["attention"]["wo"][i].t())
                block.gate_up.weight.copy_(stacked["mlp"]["w_gate_up"][i].t())
                block.down.weight.copy_(stacked["mlp"]["w_down"][i].t())
        return self


def peer_step(config, params, lr: float, compile: bool = True):
    """(step(batch) -> loss, model): forward, backward, clip at 1, fused AdamW; norms do not decay."""
    model = Peer(config).load(params)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    run = torch.compile(model) if compile else model

    def step(batch):
        loss = run(batch["tokens"], batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model
