"""fmegatron: Megatron-LM, rewritten the JAX way in pure PyTorch: layouts, pure steps, visible collectives."""

__version__ = "0.1.0"
