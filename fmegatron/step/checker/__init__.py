"""The collective checker: every sum over ranks is made exactly once, over the right axes, forward and backward."""
