"""Facts about traced and lowered graphs: nodes, memory, and order."""
