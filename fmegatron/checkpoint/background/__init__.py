"""Saves that go on while training does: staging memory, the writer process, and what the ranks agree on."""
