"""States without layouts: nested dicts, lists and tuples of tensors, numpy arrays and plain values, on one process."""
