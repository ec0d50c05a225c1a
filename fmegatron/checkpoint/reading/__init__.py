"""Restore: what is asked for against what is stored, and the bands of it that a rank reads and verifies."""
