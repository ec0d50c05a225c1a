"""Where every array of two models lies on four meshes, as text in tests/golden/: a changed layout is a readable diff.

After a change that is meant, `python tests/model/test_golden.py` writes the files again; read the diff, then commit.
"""

from pathlib import Path

import pytest
import torch

from fmegatron import model, tree
from fmegatron.layout import Mesh

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = {
    "tiny_tied": model.llama(
        vocab_size=65, dim=128, layers=4, heads=8, kv_heads=4, ffn_dim=352, max_seq=256, tied=True, z_loss=1e-4
    ),
    "llama3_8b": model.llama(
        vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, max_seq=8192,
        rope_theta=500000.0, param_dtype=torch.bfloat16, compute_dtype=torch.bfloat16,
    ),
}  # fmt: skip
MESHES = {
    "tp4": Mesh(tp=4),
    "fsdp2_tp2": Mesh(fsdp=2, tp=2),
    "dp2_fsdp2_tp2": Mesh(dp=2, fsdp=2, tp=2),
    "dp4_fsdp32_tp4": Mesh(dp=4, fsdp=32, tp=4),
}


def dump(config, mesh):
    return tree.dump(model.specs(config, mesh)) + "\n"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_layouts_are_the_golden_ones(name, mesh):
    assert dump(MODELS[name], MESHES[mesh]) == (GOLDEN / f"{name}.{mesh}.txt").read_text(encoding="utf-8")


def test_every_golden_file_is_tested():
    assert {p.name for p in GOLDEN.glob("*.txt")} == {f"{name}.{mesh}.txt" for name in MODELS for mesh in MESHES}


if __name__ == "__main__":
    for name, config in MODELS.items():
        for at, mesh in MESHES.items():
            (GOLDEN / f"{name}.{at}.txt").write_text(dump(config, mesh), encoding="utf-8")
