"""Faults of ranks: how they are noticed, reported and ended, what goes on after them, and how to bring them about."""
