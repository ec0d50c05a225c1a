"""The decoder of both experiments of this folder, by names that commit e37e37b has too."""

from fmegatron import model, nn


def decoder(state: str) -> model.Decoder:
    """Two layers; with experts where the state is of them."""
    moe = model.MoE(nn.Router(4, 2), 16, balance=0.01) if state == "experts" else None
    sizes = {"dim": 32, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "max_seq": 16}
    return model.llama(96, **sizes, tied=True, mlp=moe)
