"""The benchmarks in their smallest forms: they run, every form computes the same, and what is exact holds."""

import importlib
import json
from pathlib import Path

import pytest

from experiments import benchmarks
from tests.pairs import few

HERE = Path(next(iter(benchmarks.__path__)))


@pytest.fixture
def benchmark(monkeypatch):
    """A benchmark by its name, imported as the script that it is: the peers lie beside it."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module


def lines_of(capsys) -> dict[str, dict]:
    """The JSON lines on stdout by their metric; nothing else may stand there."""
    return {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}


def of_parallel(benchmark, capsys, ranks, forms=("zero3_mincut",)):
    parallel = benchmark("parallel")
    parallel.main(["--quick", "--backend=aot_eager", f"--only={','.join(forms)}"], pool=ranks)
    lines = lines_of(capsys)
    for form in forms:
        assert lines[f"{form}_state_bytes"]["value"] == 1.0
        assert lines[f"{form}_time"]["value"] > 0 and lines[f"{form}_peak"]["value"] > 0
        if form == "zero3_muon":  # other steps than AdamW's, and matrices travel to be whole
            continue
        assert lines[f"{form}_losses"]["value"] <= 1e-10
        if form == "tensor":
            assert 1.0 <= lines["tensor_bytes_sent"]["value"] < 1.3
            continue
        assert lines[f"{form}_bytes_sent"]["value"] == 1.0
        if form.startswith("zero3"):
            assert all(lines[f"{form}_{op}_calls"]["holds"] for op in ("all_gather", "reduce_scatter", "psum"))
        if form == "overlap_mincut":
            assert lines["overlap_mincut_gathers_ahead"]["holds"]


@pytest.mark.slow
def test_other_forms_of_parallel(benchmark, capsys, ranks):
    of_parallel(
        benchmark, capsys, ranks, ("zero3_inputs", "replicated", "zero1", "tensor", "zero3_muon", "overlap_mincut")
    )


@pytest.mark.slow
def test_stages_against_those_of_torch(benchmark, capsys, ranks):
    benchmark("pipeline").main(["--quick", "--backend=aot_eager"], pool=ranks)
    lines = lines_of(capsys)
    assert all(line["holds"] for name, line in lines.items() if not name.endswith(("_time", "host_of_an_action")))
    assert lines["1f1b_torch_1f1b_losses"]["value"] <= 1e-10 and lines["zb_h1_layers"]["value"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_step_of_16384_ranks_is_proven(benchmark, name):
    """In bf16, with one layer: the benchmark has 64, of which equal calls are looked at once."""
    found = benchmark("plan").checked(name, 1)
    assert found.ok and not found.unproven, str(found)


def of_context(benchmark, capsys, ranks):
    """Bytes as the formula: n - 1 blocks of k and v forward, again backward, and n of their gradients."""
    benchmark("context").main(["--quick", "--backend=aot_eager"], pool=ranks)
    lines = lines_of(capsys)
    for form in ("ring", "balanced", "gathered"):
        assert lines[f"cp_{form}_bytes"]["value"] == 1.0 and lines[f"cp_{form}_difference"]["holds"]


def of_moe(benchmark, capsys, ranks):
    """Rows that travel: those that were routed, each token once to a rank."""
    benchmark("moe").main(["--quick", "--backend=aot_eager"], pool=ranks)
    lines = lines_of(capsys)
    assert lines["moe_worst_case_rows"]["value"] == lines["moe_balanced_rows"]["value"] == 1.0
    assert all(line["holds"] for metric, line in lines.items() if metric.endswith("_difference"))
    assert lines["moe_transformers_eager_time"]["value"] > 0 < lines["moe_worst_case_peak"]["value"]


def of_gpu_without_a_gpu(benchmark, capsys, ranks):
    gpu = benchmark("gpu")
    assert gpu.main(["--here", "--backend=aot_eager"]) == 0
    lines = lines_of(capsys)
    assert {"gpu_matmul", "gpu_least_mfu", "gpu_least_first_call_warm", "gpu_least_peak_memory"} <= set(lines)
    assert lines["gpu_least_speed_over_compile"]["value"] > 0 < lines["gpu_least_speed_over_fsdp2"]["value"]


def of_faults(benchmark, capsys, ranks):
    """One job with three faults; only at a high load are the bars not held."""
    benchmark("faults").main(["--quick"])
    lines = lines_of(capsys)
    assert set(lines) == {"stacks_after_sleep", "end_after_sleep", "restart_in_process", "restart_by_torchrun"}
    assert lines["restart_in_process"]["holds"] and lines["restart_by_torchrun"]["value"] > 0


FORMS = {
    "parallel": of_parallel,
    "gpu": of_gpu_without_a_gpu,
    "context": of_context,
    "moe": of_moe,
    "faults": of_faults,
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("form", few(1, [(form,) for form in FORMS.values()], FORMS))
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # FSDP2's hooks under torch.compile
def test_smallest_forms(form, benchmark, capsys, ranks):
    form(benchmark, capsys, ranks)


def test_gpu_leaves_out_what_the_time_does_not_allow(benchmark, capsys):
    gpu = benchmark("gpu")
    assert gpu.main(["--here", "--minutes=0.6"]) == 1  # 6 s after what is kept for ending a row
    out, err = capsys.readouterr()
    assert not out and "probe: skipped, 6 s left of the time budget" in err


@pytest.mark.medium
def test_the_largest_model_fits(benchmark):
    gpu = benchmark("gpu")
    for gib in (80, 141):
        layers = gpu.layers_that_fit(gib << 30)
        state = 16 * gpu.parameters(gpu.config_of("largest", layers))["total"]
        assert 0.6 * (gib << 30) < state < 0.9 * (gib << 30)


@pytest.mark.slow
@pytest.mark.long
def test_experts_equal_a_loop(benchmark, capsys, ranks):
    benchmark("moe").main(["--quick", "--backend=eager"], pool=ranks)
    lines = lines_of(capsys)
    for name in ("worst_case", "balanced"):
        assert lines[f"moe_{name}_difference"]["holds"] and lines[f"moe_{name}_time"]["value"] > 0


@pytest.mark.slow
def test_a_split_sequence_equals_the_ring_of_torch(benchmark, capsys, ranks):
    benchmark("context").main(["--quick", "--backend=eager"], pool=ranks)
    lines = lines_of(capsys)
    for form in ("ring", "balanced", "gathered"):
        assert lines[f"cp_{form}_difference"]["holds"] and lines[f"cp_{form}_bytes"]["holds"]
        assert lines[f"cp_{form}_time"]["value"] > 0
