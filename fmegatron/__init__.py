"""fmegatron: Megatron-LM, rewritten the JAX way in pure PyTorch: layouts, pure steps, visible collectives."""
