"""What every test may count on: deterministic torch, one thread, and default dtypes as they were."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_torch_for_every_test():
    """Small tensors run fastest on one thread, and a test that changes torch's defaults must not change the next."""
    torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
