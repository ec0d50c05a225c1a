"""From a checkpoint alone: chat and score on the terminal, text piece by piece, models as JSON."""

import io
import json
import math

import pytest
import torch

from fmegatron import checkpoint, data, model, nn, optim, step, tree
from fmegatron.collectives import Axes, Precision
from fmegatron.layout import Mesh
from fmegatron.model.__main__ import main
from fmegatron.model.array_specs import init
from fmegatron.model.families.llamas import llama
from fmegatron.model.json_form import described, description
from fmegatron.model.norm import LayerNorm
from fmegatron.model.rope import Rope
from fmegatron.model.text import pieces
from fmegatron.nn.rope import Yarn
from tests.model.test_reference import leaves_that_differ, tiny

TOKENIZER = data.CharTokenizer("\n '" + "".join(map(chr, range(44, 91))))  # of 50 ids, as many as the model has


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(a run's folder with a state that has optimizer state too, decoder, params)."""
    decoder, mesh, folder = tiny(max_seq=40), Mesh(), tmp_path_factory.mktemp("run")
    specs = step.state_specs(model.specs(decoder, mesh), optim.sgd(0.1, momentum=0.9))
    state = tree.init(specs, key=0, rank=0)
    params = leaves_that_differ(init(decoder, mesh, key=5))
    manager = checkpoint.Manager(folder / "checkpoints")
    kept = model.kept(decoder, TOKENIZER)
    manager.save(3, state._replace(params=params), specs, metadata=kept)
    return folder, decoder, params


def ask(*arguments, lines=""):
    """(exit status, output) of the program."""
    out = io.StringIO()
    return main([*map(str, arguments)], io.StringIO(lines), out), out.getvalue()


def test_opened_is_what_was_saved(run):
    folder, decoder, params = run
    for path in (folder, folder / "checkpoints", folder / "checkpoints" / "step_00000003"):
        got = model.opened(path)
        assert got.decoder == decoder and got.tokenizer == TOKENIZER
        assert torch.equal(got.params["embed"]["table"], params["embed"]["table"])
    assert model.opened(folder, max_seq=99).decoder.max_seq == 99


def test_a_prompt_is_continued_as_generate_does(run):
    folder, decoder, params = run
    writer = model.inference(params, decoder, Axes(Mesh()))
    wanted = TOKENIZER.decode(model.generate(writer, [TOKENIZER.encode("TO BE")], 20, temperature=0)[0])
    got = ask("chat", folder, "--prompt", "TO BE", "--tokens", 20, "--temperature", 0)
    assert got == (0, wanted + "\n")


def test_a_conversation_goes_on_beyond_the_longest_sequence(run):
    arguments = ("--tokens", 15, "--turn", "Q: {}A:", "--stop", "7")
    status, text = ask("chat", run[0], *arguments, lines="WHO\nWHY\nHOW\nAND\n")
    assert status == 0 and text.count("\n") >= 4 and "7" not in text and len(text) > 8
    assert ask("chat", run[0], *arguments, lines="WHO\nWHY\nHOW\nAND\n") == (status, text)


def test_perplexity_of_a_file(run, tmp_path):
    folder, decoder, params = run
    text = "ALL THE WORLD'S A STAGE, AND ALL THE MEN AND WOMEN" * 2
    (tmp_path / "a.txt").write_text(text)
    status, out = ask("score", folder, tmp_path / "a.txt", "--stride", 10)
    found = json.loads(out)
    reader = model.inference(params, decoder, Axes(Mesh()))
    wanted = model.perplexity(reader, TOKENIZER.encode(text).astype("int64"), stride=10)
    assert status == 0 and found["tokens"] == len(text) - 1 and math.isclose(found["loss"], wanted.loss)


def test_what_cannot_be_opened_is_said(run, tmp_path, capsys):
    decoder, params = run[1:]
    checkpoint.save(tmp_path / "bare", params, model.layouts(decoder, Mesh()))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    checkpoint.save(tmp_path / "mute", params, model.layouts(decoder, Mesh()), metadata=model.kept(decoder))
    for name, message in (
        ("bare", "without the description of its model"),
        ("theirs", "got a folder of Hugging Face"),
        ("mute", "pass --tokenizer"),
        ("nothing", "nothing"),
    ):
        assert ask("chat", tmp_path / name, "--prompt", "A")[0] == 1
        assert message in capsys.readouterr().err
    TOKENIZER.save(tmp_path / "tokenizer.json")  # beside the checkpoint it is found
    assert ask("chat", tmp_path / "mute", "--prompt", "A", "--tokens", 3)[0] == 0


@pytest.mark.parametrize("stops", [(), ("e",), ("llo", "zz"), ("é!",), ("€",)])
def test_pieces_are_the_text_up_to_the_first_stop(stops):
    """Bytes: characters of one to four tokens come complete."""
    text = "hello, naïve wörld é! € 😀 hello"
    ids = data.ByteTokenizer().encode(text).tolist()
    got = list(pieces(ids, data.ByteTokenizer(), stops))
    ends = [text.index(stop) for stop in stops if stop in text]
    assert "".join(got) == text[: min(ends, default=None)] and not any("\ufffd" in piece for piece in got)


def test_bytes_that_are_no_text_are_shown_in_the_end():
    for ids in ([0xC3], [0xF0, 0x9F], [0xFF] * 9 + [65], [65, 0xC3, 0xC3, 0xA9, 0xF0]):
        assert "".join(pieces(ids, data.ByteTokenizer())) == data.ByteTokenizer().decode(ids)


DECODERS = {
    "moe": lambda: llama(50, 32, 2, 4, 2, 48, 12),
    "precision": lambda: tiny(precision=Precision.bf16()),
    "yarn": lambda: model.Decoder(
        50, 32, ((model.Part("a", model.Attention(4, 2, 8, Rope(8, scaling=Yarn(4.0, 16)), window=5)),),) * 3,
        max_seq=64, norm=LayerNorm(), logit_softcap=30.0,
    ),
    "mamba": lambda: model.Decoder(50, 32, ((model.Part("m", model.Mamba(4, 8, 8)),), *tiny().blocks), max_seq=64),
    "experts": lambda: model.Decoder(
        50, 32, ((model.Part("e", model.MoE(nn.Router(4, 2), 16, shared=model.MLP(8))),),), max_seq=9
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_comes_back_from_json(name):
    decoder = DECODERS[name]()
    assert described(json.loads(json.dumps(description(decoder), allow_nan=False))) == decoder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is": "Popen"}, "wanted what model.json_form.description"),
        ({"norm": {"is": "Popen"}}, r"model.norm: got 'Popen', wanted one of"),
        ({"norm": {"is": "RMSNorm", "x": 1}}, r"model.norm: got RMSNorm of x"),
        ({"param_dtype": {"dtype": "load"}}, "got the dtype 'load'"),
        ({"order": [7]}, "got an order that names none"),
        ({"dim": -1}, "Decoder.dim: got -1"),
    ],
)
def test_a_description_makes_nothing_else(change, message):
    with pytest.raises(ValueError, match=message):
        described(description(tiny()) | change)


JINJA = (
    "{% for m in messages %}{{ m.role | upper }} {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT {% endif %}"
)


def test_a_template_makes_the_prompts(run, tmp_path, capsys):
    """Greedy answers to what the template makes of the messages; an answer ends with what it puts behind one."""
    folder, decoder, params = run
    (tmp_path / "chat.jinja").write_text(JINJA.replace("\n{% endfor", "7{% endfor"))
    how = ("--tokens", 6, "--temperature", 0, "--template", tmp_path / "chat.jinja", "--system", "BE")
    writer = model.inference(params, decoder, Axes(Mesh()))
    wanted, messages = [], "SYSTEM BE7"
    for line in ("WHO", "AND"):
        messages += f"USER {line}7ASSISTANT "
        shown = messages if not wanted else "SYSTEM BE7USER AND7ASSISTANT "  # 40 tokens: the first exchange is left out
        new = model.generate(writer, [TOKENIZER.encode(shown)], 6, temperature=0)[0]
        wanted.append(TOKENIZER.decode(new).partition("7")[0])
    assert ask("chat", folder, *how, lines="WHO\nAND\n") == (0, "".join(x + "\n" for x in wanted))
    assert "40 tokens are full: the oldest exchange is left out" in capsys.readouterr().err
    assert ask("chat", folder, "--system", "BE", lines="WHO\n")[0] == 1
    assert "--system: got a tokenizer without a chat template" in capsys.readouterr().err
    assert ask("chat", folder, *how, "--turn", "Q{}", lines="WHO\n")[0] == 0
