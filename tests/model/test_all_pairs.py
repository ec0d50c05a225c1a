"""Train steps with every pair of settings equal one rank: loss, gradients, parameters after three steps, fp64, 1e-10.

The settings are meshes, forms of cp, what holds experts, microbatches, what layers save, strategies, batches and
families (`settings.py`). The first moments after the first step are the gradients, and their norm is a metric. Of each
step the check proves every output.
"""

import functools

import pytest
import torch

from fmegatron import model, step, tree
from fmegatron.layout import Mesh
from tests import pairs, sampling
from tests.model import settings
from tests.pairs import few
from tests.step.proven import proven_and_equal

TRIPLES = 12  # of them in `make test-all`


def assert_equal_and_proven(case, steps=3):
    of = settings.made(case)
    specs, rows = settings.specs_of(of, of.mesh), settings.rows_of(of, settings.batch_of(case))
    found = proven_and_equal(
        functools.partial(settings.train_step, of=of), of.mesh, settings.state_of(of),
        functools.partial(settings.batch_of, case), layouts=(tree.layouts(specs), rows), steps=steps, floor=1e-12,
    )  # fmt: skip
    assert {"loss", "grad_norm"} <= set(found.sharded.metrics)


@pytest.mark.medium
@pytest.mark.parametrize("case", few(1, [(case,) for case in settings.PAIRS], map(settings.named, settings.PAIRS)))
def test_every_pair(case):
    assert_equal_and_proven(case)


@functools.cache
def triples():
    return pairs.array(settings.OPTIONS, settings.allowed, 3)


@pytest.mark.slow
@pytest.mark.parametrize("i", range(TRIPLES))
def test_triples(i):
    """Some of them, others with fresh seeds: which, the message of a failure says."""
    assert_equal_and_proven(triples()[(sampling.seed() * TRIPLES + i) % len(triples())])


SIMPLE = {name: values[0] for name, values in settings.OPTIONS.items()}
FOUND = (  # by triples: the check refused the first, and could not prove the others, though all were right
    {"family": "deepseek_v3", "dp": 2, "microbatches": 2, "state": "zero1", "batch": "mask"},
    {"family": "gpt_oss", "fsdp": 2, "tp": "tp", "cp": "ulysses"},
    {"family": "gemma2", "tp": "tp", "cp": "ulysses"},
    {"family": "gpt_oss", "tp": "tp", "cp": "two_level", "state": "hsdp"},
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("values", FOUND, ids=lambda values: " ".join(map(str, values.values())))
def test_what_triples_found_is_proven(values):
    case = {**SIMPLE, **values}
    of = settings.made(case)
    rows = settings.rows_of(of, settings.batch_of(case))
    report = step.check(settings.train_step(of.mesh, of), settings.specs_of(of, of.mesh), rows)
    assert report.ok and not report.unproven, str(report)


# ---- what is refused -------------------------------------------------------------------------------------------------


def complete(values):
    """A case with these values, that nothing else speaks against."""
    holds = settings.OVER[values.get("experts", "each rank all")]
    needs = {"family": "mixtral"} if holds else {}
    needs |= {"cp": "ring"} if "cp" in holds else {}
    return {**SIMPLE, **needs, **values}


@pytest.mark.parametrize(("values", "error"), settings.REFUSED, ids=[" ".join(v.values()) for v, _ in settings.REFUSED])
def test_what_is_refused_names_its_fix(values, error):
    case = complete(values)
    assert not settings.allowed(case)
    with pytest.raises(ValueError) as refused:
        of = settings.made(case)
        step.check(
            settings.train_step(of.mesh, of),
            settings.specs_of(of, of.mesh), settings.rows_of(of, settings.batch_of(case)),
        )  # fmt: skip
    assert error in str(refused.value)


SIZES = {  # (family, mesh, shape of the batch, fields of the mixers, error): sizes that do not divide
    "rows": ("llama", Mesh(dp=4), (6, 16), {}, "4 data-parallel ranks cannot share evenly, wanted 4 or 8"),
    "positions": (
        "llama",
        Mesh(cp=3),
        (4, 16),
        {},
        "3 ranks of cp cannot share evenly, wanted a multiple; pad it to 18",
    ),
    "halves": (
        "llama",
        Mesh(cp=2),
        (4, 6),
        {"context": "balanced"},
        "wanted an even number, .* pad it to a multiple of 4",
    ),
    "heads": ("gpt2", Mesh(cp=8), (4, 16), {"context": "ulysses"}, "wanted multiples of 8 .*; choose a smaller axis"),
    "kv heads": ("llama", Mesh(tp=4), (4, 16), {}, "kv_heads: got 2, wanted a multiple of tp=4 .* kv_copies=True"),
    "experts": ("mixtral", Mesh(ep=8), (8, 16), {}, "MoE.router.experts: got 4, wanted a multiple of 8"),
    "capacity": ("mixtral", Mesh(cp=2), (4, 16), {"capacity": 1.0}, "MoE.capacity: .* leave capacity out"),
    "long": ("llama", Mesh(cp=2), (4, 32), {}, "got sequences of 32, wanted at most Decoder.max_seq=16; raise max_seq"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_divide_name_their_fix(name):
    family, mesh, shape, fields, error = SIZES[name]
    of = settings.made({**SIMPLE, "family": family, "experts": "own axis" if "experts" in name else "each rank all"})
    with pytest.raises(ValueError, match=error):
        of = of._replace(mesh=mesh, decoder=settings.with_fields(of.decoder, **fields))
        rows = of.strategy.batch_layout(shape, torch.int64, mesh)
        train = settings.train_step(mesh, of)
        batch = {"tokens": rows, "labels": rows} | ({"positions": rows} if fields.get("context") == "balanced" else {})
        step.check(train, settings.specs_of(of, mesh), batch)


def test_every_case_is_one_that_can_be_run():
    """And that a model of its settings says what they say."""
    for case in settings.PAIRS:
        of = settings.made(case)
        assert settings.allowed(case) and of.mesh.size <= settings.MOST_RANKS
        assert of.decoder.sequence_parallel == (case["tp"] == "tp, sequence")
        held = {part.mixer.ep for block in of.decoder.blocks for part in block if isinstance(part.mixer, model.MoE)}
        assert held <= {settings.OVER[case["experts"]]}
