"""`plan --device h100` of whole steps, in a process that believes in an H100: counts as they were, work by formula."""

import io
import json
import shutil

import pytest

from fmegatron.model.counts import flops_per_token
from fmegatron.plan.cuda import apart
from fmegatron.plan.cuda.devices import DEVICES
from tests.cuda import check, cover
from tests.house import ROOT

GOLDEN = ROOT / "tests" / "golden" / "cuda" / "plan.json"
TOKENS = 2 * cover.SEQ  # of the dense case


def planned(*names):
    """What `tests.cuda.planned` says of these cases; nothing where there is no g++."""
    pytest.importorskip("triton", reason="make check-cuda installs it (700 MB)")
    if shutil.which("g++") is None:
        print("left out: no g++, with which the guard is built")
        return []
    out, err = io.StringIO(), io.StringIO()
    status = apart.run(["-m", "tests.cuda.planned", *names], DEVICES["h100"], out, err)
    assert status == 0, err.getvalue()[-3000:]
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.slow
def test_a_dense_step():
    """Launches are those of check-cuda's golden counts; FLOP of products are the formula's to the last, those of
    attention 7/6 of it, as flash computes scores once more; its memory and bytes are as they were."""
    for found in planned("dense"):
        require_dense(found)


def require_dense(found):
    code, kinds = check.golden()[found["what"]], found["kinds"]
    calls = {"block_fwd": 2, "block_bwd": 2, "step": 1}
    assert kinds["kernel"]["calls"] == sum(n * code[label]["launches"] for label, n in calls.items())
    assert kinds["product"]["calls"] == sum(n * code[label]["calls"]["extern_kernels.mm"] for label, n in calls.items())
    formula = flops_per_token(cover.decoder_of(cover.DENSE))
    assert kinds["product"]["flops"] == TOKENS * (formula["matmul"] + formula["head"])
    assert kinds["attention"]["flops"] == pytest.approx(TOKENS * formula["attention"] * 7 / 6, rel=1e-9)
    assert set(kinds) == {"kernel", "product", "attention"} and found["groups"] == {}
    assert found["text"].startswith("planned for NVIDIA H100 80GB HBM3 (sm_90)")
    assert {key: found[key] for key in ("bytes", "kinds", "of the state")} == json.loads(GOLDEN.read_text())["dense"]
