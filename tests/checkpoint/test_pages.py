"""Tensors for a restore: the shapes and dtypes of torch.empty, whatever pages they lie on."""

from pathlib import Path

import pytest
import torch

from fmegatron.checkpoint.reading.pages import fresh


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3000, 1001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_it_is_a_plain_tensor(shape, dtype):
    x = fresh(shape, dtype)
    assert (x.shape, x.dtype, x.is_contiguous(), x.requires_grad) == (torch.Size(shape), dtype, True, False)
    y = x.fill_(3).clone()
    assert torch.equal(x, y) and x.device.type == "cpu"


def test_other_devices_get_no_advice():
    assert fresh((3 << 20,), torch.float32, "meta").device.type == "meta"


def test_the_system_knows_of_the_advice():
    """The mapping of a large tensor carries the flag `hg` where the kernel offers large pages."""
    try:
        offered = "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        smaps = Path("/proc/self/smaps").read_text
    except OSError:
        return
    x = fresh((64 << 20,), torch.uint8)
    middle, inside, flags = x.data_ptr() + (32 << 20), False, ""
    for line in smaps().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= middle < high
        elif inside and head == "VmFlags:":
            flags = line
    assert not offered or " hg" in flags
