"""Restore: requested leaves matched to stored ones, and the bands that a rank reads and verifies."""
