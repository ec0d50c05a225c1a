"""What every test may count on: deterministic torch, one thread, and default dtypes as they were."""

import pytest
import torch

from fmegatron.testing import RankPool
from tests import sampling


def pytest_configure():
    """Fix the day of the sampled campaigns before worker processes and tests start, so that all draw the same cases."""
    sampling.today()


@pytest.fixture(autouse=True)
def _same_torch_for_every_test():
    """Small tensors run fastest on one thread, and a test that changes torch's defaults must not change the next."""
    torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session")
def ranks():
    """A pool of 4 gloo ranks, started once: `ranks.run(function, *args, ranks=2)` (see fmegatron.testing.RankPool)."""
    with RankPool(4) as pool:
        yield pool
