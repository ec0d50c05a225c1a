"""Chats: templates of Hugging Face give transformers' texts and masks, and only answers are learned."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
import transformers

from fmegatron.data import ByteTokenizer, CharTokenizer, Chats, SourceBatches, load_tokenizer
from fmegatron.data.chat import chat_row
from fmegatron.data.template import ChatTemplate, load_template

PLAIN = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {%- if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('role ' + m.role) }}{% endif %}\n"
    "<|{{ m.role }}|>\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TOOLS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% set ns.last = loop.index %}"
    "{% if loop.first and tools %}{{ tools | tojson }} {{ tools | tojson(indent=2) }}{% endif %}"
    "{% if m.content == 'and?' %}{% continue %}{% endif %}"
    "{{ loop.index0 }}:{{ m.content }}{{ eos_token }}{% endfor %}[{{ ns.last }}]"
)
LOOKS = "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"  # at other messages
CHAT = [
    {"role": "system", "content": " be brief "}, {"role": "user", "content": "héllo 😀 <b>"},
    {"role": "assistant", "content": "1 + 1 = 2"}, {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "naïve 漢字"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(["1 + 1 = 2 and hello be brief"] * 9, trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": PLAIN}))
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """(ours, transformers')."""
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("text", [PLAIN, MARKED, TOOLS], ids=["plain", "marked", "tools"])
def test_texts_and_ids_are_those_of_transformers(both, text, prompt):
    ours, theirs = both
    tools = [{"name": "f", "about": "<é>"}]
    template = ChatTemplate(text, ours.chat.special)
    options = {"chat_template": text, "add_generation_prompt": prompt, "tools": tools}
    assert template.render(CHAT, prompt, tools=tools) == theirs.apply_chat_template(CHAT, tokenize=False, **options)
    wanted = theirs.apply_chat_template(CHAT, **options)["input_ids"]
    assert ours.located(template.render(CHAT, prompt, tools=tools))[0].tolist() == wanted


def test_null_is_not_written_as_none(both):
    """OpenAI's chats have null for the content beside calls of tools; templates know a key that is not there."""
    ours, _ = both
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": None, "tool_calls": None}]
    text = "{% for m in messages %}{{ m.content }}{% if m.tool_calls is defined %}!{% endif %}</s>{% endfor %}"
    assert ChatTemplate(text, ours.chat.special).render(chat) == "1</s></s>"
    assert "None" not in ours.chat.render(chat) and chat[1]["content"] is None


def learned(tokenizer, row):
    return tokenizer.decode(row["labels"][row["mask"]])


def test_marks_say_what_is_learned(both):
    ours, theirs = both
    for tokenizer in both:
        row = chat_row(tokenizer, CHAT, template=ChatTemplate(MARKED, ours.chat.special))
        assert learned(ours, row) == "1 + 1 = 2</s>naïve 漢字</s>"
    ascii_ = CHAT[:3]  # of a character of several tokens transformers marks the first alone, where an answer ends so
    options = {"chat_template": MARKED, "return_assistant_tokens_mask": True, "return_dict": True}
    wanted = theirs.apply_chat_template(ascii_, **options)
    row = chat_row(ours, ascii_, template=ChatTemplate(MARKED, ours.chat.special))
    assert row["mask"].tolist() == [bool(x) for x in wanted["assistant_masks"][1:]]
    assert row["tokens"].tolist() == wanted["input_ids"][:-1] and row["labels"].tolist() == wanted["input_ids"][1:]


def test_without_marks_the_growth_of_the_text_says_it(both):
    ours, theirs = both
    for tokenizer in both:
        assert learned(ours, chat_row(tokenizer, CHAT)) == "1 + 1 = 2</s>\nnaïve 漢字</s>\n"
    asked = learned(ours, chat_row(ours, CHAT, roles=("user",)))
    assert asked == "<|user|>\nhéllo 😀 <b></s>\n<|user|>\nand?</s>\n"
    assert learned(ours, chat_row(ours, CHAT, ("user",), ChatTemplate(MARKED, ours.chat.special))) == asked
    for text, message in (
        (LOOKS, r"message 2: got a template without {% generation %} marks .* first 3 messages is no beginning"),
        (PLAIN.replace("<|assistant|>\n{% endif", "<|other|>{% endif"), "message 2: .* the first 2 messages is no"),
    ):
        with pytest.raises(ValueError, match=message):
            chat_row(ours, CHAT, template=ChatTemplate(text, ours.chat.special))


@pytest.mark.parametrize(
    "tokenizer", [ByteTokenizer(), CharTokenizer.from_text(json.dumps(CHAT, ensure_ascii=False) + "\n|")]
)
def test_bytes_and_characters(tokenizer):
    row = chat_row(tokenizer, CHAT, template=ChatTemplate(MARKED, {"eos_token": "|"}))
    assert learned(tokenizer, row) == "1 + 1 = 2|naïve 漢字|"
    ids, places = tokenizer.located(text := "aé漢😀")
    assert tokenizer.decode(ids) == text and {text[a:b] for a, b in places} == set(text)


def test_chats_are_a_source(both):
    ours, _ = both
    chats = Chats([{"messages": CHAT}, {"messages": CHAT[:3]}], ours, 12)
    assert len(chats[0]["tokens"]) == 12
    batch = SourceBatches(Chats([CHAT, CHAT[:3]], ours, 99), 2, 99, 0, shuffle=False).at(0)
    assert batch["tokens"].shape == (2, 99)
    assert learned(ours, {name: x[1].numpy() for name, x in batch.items()}) == "1 + 1 = 2</s>\n"


def test_the_template_is_kept_with_the_tokenizer(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat.special == {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.save(tmp_path / "saved.json")
    for again in (load_tokenizer(tmp_path / "saved.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert again.chat == tokenizer.chat and again.chat.render(CHAT) == tokenizer.chat.render(CHAT)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    bare = load_tokenizer(tmp_path)
    assert bare.chat is None and bare.digest == load_tokenizer(tmp_path / "tokenizer.json").digest
    with pytest.raises(ValueError, match="got a tokenizer without a chat template, wanted one; load the folder"):
        chat_row(bare, CHAT)
    several = {"chat_template": [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(several))
    assert load_tokenizer(tmp_path).chat.text == "d" and load_template(tmp_path, "rag").text == "r"
    with pytest.raises(ValueError, match="named default, rag, wanted 'x' among them"):
        load_template(tmp_path, "x")
    (tmp_path / "chat_template.jinja").write_text("j")
    assert load_tokenizer(tmp_path).chat.text == "j" == load_template(tmp_path / "chat_template.jinja").text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('alternate') }}", "got TemplateError: alternate, wanted a text of the 5 messages"),
        ("a\n{% if %}", "no Jinja at line 2"),
        ("{{ messages[9].content }}", "got UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", "got SecurityError"),
        ("{{ messages.append(1) }}", "got SecurityError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "got OverflowError"),
        ("{{ raise_exception.__globals__.os }}", "got SecurityError"),
        ("{{ cycler.__init__.__globals__.os }}", "got SecurityError"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_rendered(text, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(text).render(CHAT)


class Sneaky(str):
    def run(self):
        raise AssertionError("a template called a method of ours")


@pytest.mark.parametrize("text", ["{{ [1, 2, 3] | random }}", "{{ lipsum() }}"])
def test_a_template_writes_nothing_by_chance(text):
    with pytest.raises(ValueError, match="No filter named 'random'|'lipsum' is undefined"):
        ChatTemplate(text).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("text", ["{{ joiner() }}", "{{ raise_exception }}", "{{ messages | map('upper') }}"])
def test_a_template_writes_no_addresses(text):
    """They are others in every process, so ranks would differ."""
    with pytest.raises(ValueError, match="whose text is another in every process"):
        ChatTemplate(text).render([{"role": "user", "content": "a"}])
    assert ChatTemplate("{{ messages[0].content }}").render([{"content": "at 0x7f"}]) == "at 0x7f"


def test_only_json_values_reach_a_template():
    run = ChatTemplate("{{ messages[0].content.run() }}")
    with pytest.raises(ValueError, match="UndefinedError"):
        run.render([{"role": "user", "content": Sneaky("x")}])
    assert ChatTemplate("{{ messages[0].content }}").render([{"content": Sneaky("x")}]) == "x"
    with pytest.raises(ValueError, match="got ndarray .* wanted JSON values"):
        run.render([{"role": "user", "content": np.zeros(2)}])
    with pytest.raises(ValueError, match="got U.FDD0 or U.FDD1"):
        run.render([{"role": "user", "content": "\ufdd0"}])
    trims = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(ValueError, match="text changes with its {% generation %} marks"):
        ChatTemplate(trims).marks(CHAT)


# ---- the date of today, and past turns that are written in another way
DATED = "{{ strftime_now('%d %b %Y') }} " + PLAIN


def test_a_template_that_writes_the_date_asks_for_one(both, tmp_path):
    """One of today would give other rows tomorrow, and on ranks whose clocks differ."""
    ours, _ = both
    template = ChatTemplate(DATED, ours.chat.special)
    for use in (lambda: template.render(CHAT), lambda: Chats([CHAT], ours, 64, template=template)[0]):
        with pytest.raises(ValueError, match=r"writes the date of today, .* dataclasses.replace\(template, date="):
            use()
    fixed = replace(template, date="2026-02-03")
    assert fixed.render(CHAT).startswith("03 Feb 2026 <s>") and ours.chat.render(CHAT) in fixed.render(CHAT)
    of = [SourceBatches(Chats([CHAT] * 3, ours, 64, template=t), 2, 64, 0) for t in (fixed, replace(fixed))]
    other = SourceBatches(Chats([CHAT] * 3, ours, 64, template=replace(fixed, date="2026-02-04")), 2, 64, 0)
    assert of[0].describe() == of[1].describe() != other.describe()
    tokenizer = replace(ours, chat=fixed)
    tokenizer.save(tmp_path / "saved.json")
    assert load_tokenizer(tmp_path / "saved.json").chat == fixed == pickle.loads(pickle.dumps(fixed))
    hours = replace(template, text="{{ strftime_now('%H:%M') }}", date="2026-02-03 13:05")
    assert hours.render(CHAT) == "13:05"
    with pytest.raises(ValueError, match="date: got 'today', wanted one such as '2026-11-27'"):
        replace(template, date="today")


CUTS = (  # as Qwen3's: thoughts are in the last answer only
    "{% set last = messages | length - 1 %}{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and "
    "loop.index0 == last %}<think>{{ m.get('thought', '') }}</think>{% endif %}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "thought": "hm"},
    {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"},
]  # fmt: skip


def test_a_template_that_cuts_past_thoughts_has_a_row_a_turn():
    tokenizer, template = ByteTokenizer(), ChatTemplate(CUTS)
    with pytest.raises(ValueError, match="make a row of each turn .data.Chats.rows='turn'"):
        chat_row(tokenizer, TURNS, template=template)
    chats = Chats([TURNS[:2], {"messages": TURNS}, TURNS[:1]], tokenizer, 200, template=template)
    first = "<|user|>hi</s><|assistant|><think>hm</think>yes</s>"
    second = "<|user|>hi</s><|assistant|>yes</s><|user|>more</s><|assistant|><think></think>no</s>"
    rows = [chats[i] for i in range(len(chats))]
    assert [tokenizer.decode([*row["tokens"][:1], *row["labels"]]) for row in rows] == [
        first, first, second, "<|user|>hi</s>"
    ]  # fmt: skip
    assert [learned(tokenizer, row) for row in rows] == [
        "<think>hm</think>yes</s>", "<think>hm</think>yes</s>", "<think></think>no</s>", ""
    ]  # fmt: skip
    assert chats.unanswered == (2,) and len(replace(chats, without_answer="drop")) == 3
    with pytest.raises(ValueError, match="item 2: got a chat in whose first"):
        replace(chats, without_answer="refuse")[3]
    assert SourceBatches(chats, 2, 200, 0).windows == 4


def test_rows_as_they_are_asked_for():
    """A template that only adds has a row a chat, and turns where they are wanted; other roles have turns, too."""
    tokenizer, template = ByteTokenizer(), ChatTemplate(PLAIN, {"bos_token": "", "eos_token": "|"})
    chats = Chats([TURNS], tokenizer, 200, template=template)
    assert len(chats) == 1 and len(replace(chats, rows="turn")) == 2
    both = [learned(tokenizer, replace(chats, rows="turn")[i]) for i in range(2)]
    assert both == ["yes|\n", "no|\n"] and learned(tokenizer, chats[0]) == "yes|\nno|\n"
    asked = Chats([TURNS], tokenizer, 200, roles=("user",), template=template, rows="turn")
    assert [learned(tokenizer, asked[i]) for i in range(2)] == ["|user|>\nhi|\n", "<|user|>\nmore|\n"]
    with pytest.raises(ValueError, match="Chats.rows: got 'all'"):
        replace(chats, rows="all")
