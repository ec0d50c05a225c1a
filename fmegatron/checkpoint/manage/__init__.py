"""The checkpoints of a run: named by step, kept by rules, deleted behind the run's back, found again."""
