"""A run that learns nothing says so: parts whose count is 0, gradients that are exactly 0, chats without answers."""

import warnings

import numpy as np
import pytest
import torch

from fmegatron import data, optim, step, tree
from fmegatron.data import ByteTokenizer, Chats, SourceBatches, source
from fmegatron.data.template import ChatTemplate
from fmegatron.layout import Mesh
from fmegatron.loop import train
from fmegatron.loop.losses import BadLossError


def run(counts, log_every=5, norm=1.0, start=0):
    """(updates that were logged, warnings) of a run whose update n counts counts(n) in each part."""
    logged = []

    def update(state, batch):
        found = {f"{name}/count": torch.tensor(float(x)) for name, x in counts(batch + 1).items()}
        return state, {"loss": 0.0, **dict.fromkeys(counts(1), 0.5), **found, "grad_norm": norm}

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            for info in train(update, torch.tensor(0), source(int), steps=20, start=start, log_every=log_every):
                logged += [info.step] if info.metrics else []
        except BadLossError as error:
            logged.append(str(error))
    return logged, [str(w.message) for w in seen]


def test_nothing_counts_in_any_part():
    """A warning at the first log point, an error at the next; also where a run goes on."""
    for start in (0, 10):
        logged, said = run(lambda n: {"lm": 0, "z": 0}, start=start)
        first, last = start + 1, start + 5
        assert logged == [
            first,
            f"step {last}: nothing has counted in the loss (lm/count, z/count is 0) since the last log point; look at "
            "masks and labels (of chats: data.Chats.unanswered): training ends; look at data and rate, or go back to a "
            "checkpoint",
        ]
        assert len(said) == 1 and said[0].startswith(f"step {first}: nothing has counted in the loss (lm/count, z/co")


@pytest.mark.parametrize(
    "counts",
    [
        lambda n: {"lm": 0 if n in (1, 5, 20) else 3},  # nothing at log points themselves
        lambda n: {"lm": n % 5 == 2},
        lambda n: {"lm": 0.004},
    ],
)
def test_something_counts_between_two_log_points(counts):
    logged, said = run(counts)
    assert logged == [1, 5, 10, 15, 20] and all(text.startswith("step 1: nothing has") for text in said)


def test_one_part_of_several_is_told_once():
    logged, said = run(lambda n: {"lm": 0, "balance": 8})
    assert logged == [1, 5, 10, 15, 20]
    assert said == ["step 1: lm/count is 0 since the last log point: nothing of it is learned"]


def test_a_run_that_stops_counting_ends_within_one_log_interval():
    logged, said = run(lambda n: {"lm": n <= 7})
    assert logged[:-1] == [1, 5, 10] and logged[-1].startswith("step 15: nothing has counted") and not said


def test_metrics_of_other_steps_are_left_alone():
    """A step without parts, and one with a metric of such a name beside no mean."""
    for metrics in ({"loss": 1.0}, {"loss": 1.0, "rows/count": 0.0}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            infos = train(lambda s, b, m=metrics: (s, m), torch.tensor(0), source(int), steps=6, log_every=2)
            assert len(list(infos)) == 6


def test_a_gradient_of_exactly_zero():
    specs = tree.specs({"w": (8, 4)}, Mesh(), init=tree.Normal(0.3))

    def detached(params, batch):
        return step.mean((batch["x"] @ params["w"].detach()).square().sum() + 0 * params["w"].sum(), len(batch["x"]))

    optimizer = optim.adamw(1e-2)
    state = tree.init(step.state_specs(specs, optimizer), 0, 0)
    built = step.build_train_step(detached, optimizer, specs)
    with pytest.warns(RuntimeWarning, match=r"step 1: grad_norm is exactly 0: .*look for .detach\(\)") as said:
        list(train(built, state, source(lambda i: {"x": torch.ones(8, 8)}), steps=6, log_every=2))
    assert len(said) == 1
    assert not run(lambda n: {"lm": 1}, norm=1e-30)[1]


# ---- chats -----------------------------------------------------------------------------------------------------------
TEMPLATE = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")


def chat(question, answer="yes"):
    asked = [{"role": "user", "content": question}]
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


CHATS = [chat("q"), chat("q" * 100), chat("q", None), chat("why")]


def chats(**how):
    return Chats(CHATS, ByteTokenizer(), 32, template=TEMPLATE, **how)


def test_chats_without_an_answer():
    """Cut off, or none: counted, left out or refused."""
    kept = chats()
    assert kept.unanswered == (1, 2) and len(kept) == 4 and not kept[1]["mask"].any()
    dropped = chats(without_answer="drop")
    assert len(dropped) == 2 and dropped.unanswered == kept.unanswered
    assert all(np.array_equal(dropped[i]["tokens"], kept[j]["tokens"]) for i, j in ((0, 0), (1, 3)))
    assert SourceBatches(dropped, 2, 32, 0).at(0)["mask"].any(1).all()
    refused = chats(without_answer="refuse")
    assert refused[3]["mask"].any()
    with pytest.raises(
        ValueError, match=r"item 1: got a chat in whose first 32 tokens nothing .* message of assistant"
    ):
        refused[1]
    with pytest.raises(ValueError, match="got 'skip', wanted 'keep', 'drop' or 'refuse'"):
        chats(without_answer="skip")
    assert data.Chats([chat("a", None)], ByteTokenizer(), 32, roles=("user",), template=TEMPLATE).unanswered == ()
