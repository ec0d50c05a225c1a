"""The checkpoints of a run: named by step, kept by retention rules, deleted in the background, restored."""
