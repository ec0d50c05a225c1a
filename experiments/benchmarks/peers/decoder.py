"""The peer of the step benchmarks: the same decoder as a straight nn.Module, written the way most people write it.

Sizes and start values are those of ours, so that both forms compute the same losses.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from fmegatron import model
from fmegatron.layout import Mesh
from fmegatron.model.array_specs import init

SIZES = {
    "least": (
        {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 64, "max_seq": 16},
        4,
    ),
    "tiny": (
        {"dim": 192, "layers": 4, "heads": 6, "kv_heads": 3, "ffn_dim": 512, "vocab_size": 65, "max_seq": 128},
        16,
    ),
    "small": (
        {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 1408, "vocab_size": 8192, "max_seq": 256},
        4,
    ),
    "deep": (
        {"dim": 256, "layers": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 704, "vocab_size": 1024, "max_seq": 128},
        4,
    ),
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What all forms run: a size by its name, with other layers or dtype where they are given."""

    size: str
    layers: int | None = None
    dtype: torch.dtype = torch.float32

    def setup(self):
        """(config, whole parameters, whole batch)."""
        fields, batch_size = SIZES[self.size]
        fields = {**fields, "layers": self.layers or fields["layers"]}
        config = model.llama(**fields, vocab_multiple=1, tied=False, param_dtype=self.dtype, compute_dtype=self.dtype)
        params = init(config, Mesh(dp=1), key=0)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, config.vocab_size, (batch_size, config.max_seq + 1), generator=generator)
        return config, params, {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


class Norm(nn.RMSNorm):
    """RMSNorm whose weight follows the dtype of what it scales, as FSDP2's policy has it: autocast leaves it fp32."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """Pre-norm attention with RoPE and grouped heads, then SwiGLU."""

    def __init__(self, dim, heads, kv_heads, ffn_dim):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.attention_norm = Norm(dim, eps=1e-5)
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = Norm(dim, eps=1e-5)
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
        self.compute_dtype = config.compute_dtype
        attention, mlp = (part.mixer for part in config.blocks[0])
        self.embed = nn.Embedding(config.padded_vocab, config.dim)
        self.blocks = nn.ModuleList(
            Block(config.dim, attention.heads, attention.kv_heads, mlp.ffn_dim) for _ in range(config.layers)
        )
        self.norm = Norm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.padded_vocab, bias=False)
        wide = torch.promote_types(config.param_dtype, torch.float32)
        width = attention.head_dim
        inverse = attention.rope.theta ** -(torch.arange(0, width, 2, dtype=wide) / width)
        angle = torch.arange(config.max_seq)[:, None] * inverse
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens).to(self.compute_dtype)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten())

    def load(self, params) -> nn.Module:
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


def fused_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """torch's fused AdamW with the settings of ours; norms do not decay."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def training_step(run, model: nn.Module, lr: float):
    """step(batch) -> loss: forward by `run`, backward, clip at 1, fused AdamW."""
    optimizer = fused_adamw(model, lr)

    def step(batch):
        loss = run(batch["tokens"], batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def peer_step(config, params, lr: float):
    """(step(batch) -> loss, model) of one process: torch.compile(model), fused AdamW."""
    model = Peer(config).load(params)
    return training_step(torch.compile(model), model, lr), model
