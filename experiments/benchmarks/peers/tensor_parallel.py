"""The peer of tensor and sequence parallelism: `parallelize_module` on the decoder, then torch.compile.

The plan is that of torch's tutorial and of torchtitan: embedding and head split over the vocabulary, projections by
columns and rows, the sequence split between them, the loss on split logits (`loss_parallel`).
"""

import torch
import torch.nn.functional as F
from peers.decoder import rotate, training_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

NORM_EPS = 1e-5


class Attention(nn.Module):
    """Causal attention with RoPE over this rank's heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.width = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, u, cos, sin):
        q, k, v = (f(u).unflatten(-1, (-1, self.width)) for f in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(o.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, ffn_dim, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, u):
        return self.down(F.silu(self.gate(u)) * self.up(u))


class Block(nn.Module):
    """Pre-norm attention, then the MLP."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn_dim: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(dim, eps=NORM_EPS) for _ in range(2))
        self.attention, self.mlp = Attention(dim, heads, kv_heads), MLP(dim, ffn_dim)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """tokens -> logits."""

    def __init__(self, config):
        super().__init__()
        attention, mlp = (part.mixer for part in config.blocks[0])
        sizes = (config.dim, attention.heads, attention.kv_heads, mlp.ffn_dim)
        self.embed = nn.Embedding(config.padded_vocab, config.dim)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.head = nn.Linear(config.dim, config.padded_vocab, bias=False)
        width = attention.head_dim
        wide = torch.promote_types(config.param_dtype, torch.float32)
        inverse = attention.rope.theta ** -(torch.arange(0, width, 2, dtype=wide) / width)
        angle = torch.arange(config.max_seq)[:, None] * inverse
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.head(self.norm(x))

    def load(self, params):
        """Take the values of our parameter tree, so that both forms start alike."""
        with torch.no_grad():
            self.embed.weight.copy_(params["embed"]["table"])
            self.head.weight.copy_(params["head"]["w"].t())
            for i, block in enumerate(self.blocks):
                attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
                a, m = block.attention, block.mlp
                fused = attention["wqkv"][i].t().split([w.weight.shape[0] for w in (a.wq, a.wk, a.wv)])
                for linear, values in zip((a.wq, a.wk, a.wv), fused, strict=True):
                    linear.weight.copy_(values)
                a.wo.weight.copy_(attention["wo"][i].t())
                for linear, values in zip((m.gate, m.up), mlp["w_gate_up"][i].t().chunk(2), strict=True):
                    linear.weight.copy_(values)
                m.down.weight.copy_(mlp["w_down"][i].t())
        return self


def tp_step(config, params, lr: float, backend: str):
    """(step(batch) -> loss, model): split over all ranks, sequence included, then compiled as a whole."""
    model = Decoder(config).to(config.param_dtype).load(params)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    whole = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    of_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, whole)
    for block in model.blocks:
        parallelize_module(block, mesh, of_block)
    compiled = torch.compile(model, backend=backend)  # blocks by themselves: an error in their backward, torch 2.13

    def run(tokens, labels):
        return F.cross_entropy(compiled(tokens).flatten(0, 1), labels.flatten())

    step = training_step(run, model, lr)

    def of_split_logits(batch):
        with loss_parallel():
            return step(batch)

    return of_split_logits, model
