"""Chats with reasoning, tools and tool calls: the text and the mask of transformers, or an error."""

import json
import re

import pytest

from monograph.recipe import check_keys
from monograph.recipe.config.keys import Recipe
from monograph.recipe.data.chat_template import chat_template
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.prepare import prepare
from support.recipe_files import make_tokenizer, write_jsonl

# After Qwen3: reasoning is shown behind the last question only, also where it stands inside the content.
# `{% generation %}` marks for transformers what the assistant writes; Monograph gets the template without it.
MARKED = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set place = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set place.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set said = m.content if m.content is string else '' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if m.role == 'assistant' and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- set empty = loop.last and not thought and not m.tool_calls %}
{%- generation %}
{%- if empty %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- if loop.index0 > place.last and thought %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- said }}
{%- for call in m.tool_calls or [] %}
{%- if said or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}
{%- endgeneration %}{{ '\\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + said }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
PLAIN = re.sub(r"\{%- (end)?generation %\}\n?", "{#- -#}", MARKED)
# After Mistral: the prompt for an answer is the end of the question; a tool call stands in place of content.
NO_HEADER = """\
{{- bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}{% generation %}{{ '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ ']' + eos_token }}
{%- endgeneration %}
{%- elif m.role == 'assistant' %}{{ '\\n' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}"""
CONTENT_ONLY = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def user(text):
    return {"role": "user", "content": text}


def answer(text=None, **more):
    return {"role": "assistant", "content": text, **more}


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}},
    {"type": "function", "function": {"name": "number", "parameters": {"n": {"type": "integer"}}}},
]
RESULT = {"role": "tool", "content": "the quick fox", "tool_call_id": "a1", "name": "weather"}
CHATS = {
    "reasoning of the last turn": [user("name?"), answer("Ada", reasoning_content="the dog is lazy")],
    "reasoning of earlier turns is left out": [
        user("name?"),
        answer("Ada", reasoning_content="the dog"),
        user("name?"),
        answer("the fox", reasoning_content="quick\nbrown"),
    ],
    "reasoning inside the content": [
        user("name?"),
        answer("<think>\nthe dog\n</think>\n\nAda"),
        user("name?"),
        answer("<think>\nquick\n</think>\n\nthe fox"),
    ],
    "a tool call": [user("name?"), answer(tool_calls=[call("weather", city="Ada")]), RESULT, answer("fox")],
    "two calls, words and reasoning": [
        user("name?"),
        answer(
            "the dog", reasoning_content="lazy", tool_calls=[call("weather", city="x"), call("number", n=3)]
        ),
        RESULT,
        RESULT,
        answer("the fox", reasoning_content="quick"),
    ],
    "a call whose reasoning a later question hides": [
        user("name?"),
        answer("", reasoning_content="lazy", tool_calls=[call("number", n=3)]),
        RESULT,
        answer("fox <|im_start|>assistant\nname", reasoning_content="brown"),
        user("name?"),
        answer("Ada", reasoning_content="quick"),
    ],
}


@pytest.fixture
def run(tmp_path):
    """run(template, rows, dataset, **keys) -> (tokenizer, prepared)."""

    def prepared(template, rows, dataset=None, **keys):
        make_tokenizer(tmp_path / "model", chat_template=template)
        (tmp_path / "model" / "config.json").write_text("{}")
        path = write_jsonl(tmp_path / "train.jsonl", rows)
        recipe = {
            "base_model": str(tmp_path / "model"),
            "adapter": "qlora",
            "lora_target_linear": True,
            "datasets": [{"path": path, "type": "chat_template", **(dataset or {})}],
            "dataset_prepared_path": str(tmp_path / "prepared"),
            "eot_tokens": ["<|im_end|>"],
        }
        read = check_keys(recipe | keys).recipe
        tokenizer = load_tokenizer(read, str(tmp_path / "model"))
        return tokenizer, prepare(read, tokenizer)

    return prepared


def check_mask(tokenizer, prepared, messages, tools, template):
    """Text and targets are those of transformers, token for token."""
    want = tokenizer.apply_chat_template(
        messages, tools, chat_template=template, return_assistant_tokens_mask=True
    )
    document = prepared.train[0]
    assert document["input_ids"] == want["input_ids"]
    targets = [
        token if kept else -100
        for token, kept in zip(want["input_ids"], want["assistant_masks"], strict=True)
    ]
    assert document["labels"] == targets
    assert 0 < sum(want["assistant_masks"]) < len(targets)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("name", CHATS)
def test_the_mask_is_that_of_transformers(run, name, tools):
    row = {"messages": CHATS[name]} | ({"tools": tools} if tools else {})
    tokenizer, prepared = run(PLAIN, [row])
    check_mask(tokenizer, prepared, CHATS[name], tools, MARKED)


# Qwen3's own rule: every answer behind the last question has a block, also one with tool calls.
_ALWAYS = ("loop.last and not thought and not m.tool_calls", "loop.index0 > place.last and not thought")
WITH_CALLS = {
    "words and a call": answer("the dog", tool_calls=[call("number", n=3)]),
    "a call alone": answer(tool_calls=[call("number", n=3)]),
    "a call and no words": answer("", tool_calls=[call("number", n=3)]),
    "reasoning and a call": answer("", reasoning_content="lazy", tool_calls=[call("number", n=3)]),
}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_an_empty_block_in_front_of_a_call_is_a_target(run, name):
    chat = [user("name?"), WITH_CALLS[name], RESULT, answer("fox")]
    tokenizer, prepared = run(PLAIN.replace(*_ALWAYS), [{"messages": chat}])
    check_mask(tokenizer, prepared, chat, None, MARKED.replace(*_ALWAYS))


def test_of_an_empty_block_that_the_prompt_opens_the_rest_is_a_target(run):
    asks = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n"
    assert asks in PLAIN
    opened, rest = "{{ '<think>\\n' }}", "{{ '\\n</think>\\n\\n' }}"
    template = PLAIN.replace(*_ALWAYS).replace(asks, asks + "<think>\\n")
    marked = MARKED.replace(*_ALWAYS).replace(
        "{%- generation %}\n", f"{{%- if empty %}}{opened}{{% endif %}}\n{{%- generation %}}\n"
    )
    marked = marked.replace("{%- if empty %}{{ '<think>\\n\\n</think>\\n\\n' }}", "{%- if empty %}" + rest)
    chat = [user("name?"), WITH_CALLS["words and a call"]]
    tokenizer, prepared = run(template, [{"messages": chat}])
    check_mask(tokenizer, prepared, chat, None, marked)


def test_an_empty_block_that_the_prompt_holds_is_no_target(run):
    """enable_thinking: false: the prompt ends behind the block."""
    chat = [user("name?"), answer("Ada")]
    tokenizer, prepared = run(PLAIN, [{"messages": chat}], chat_template_kwargs={"enable_thinking": False})
    targets = [token for token in prepared.train[0]["labels"] if token != -100]
    assert tokenizer.decode(targets) == "Ada<|im_end|>"


def test_an_empty_block_that_somebody_wrote_is_a_target(run):
    chat = [user("name?"), answer("<think>\n\n</think>\n\nAda", mood="lazy")]
    shows = CONTENT_ONLY.replace("{{ m.content }}", "{{ m.content }}{{ m.mood }}")
    asks = "{% if add_generation_prompt %}[assistant]{% endif %}"
    tokenizer, prepared = run(shows + asks, [{"messages": chat}])
    document = prepared.train[0]
    targets = [token for token in document["labels"] if token != -100]
    assert tokenizer.decode(targets) == "<think>\n\n</think>\n\nAdalazy</s>"


def test_a_prompt_that_is_the_end_of_the_question(run):
    chat = CHATS["a tool call"]
    tokenizer, prepared = run(NO_HEADER, [{"messages": chat}])
    check_mask(tokenizer, prepared, chat, None, NO_HEADER)


def test_tools_and_calls_as_json_text_and_under_other_names(run):
    chat = [
        user("name?"),
        answer(calls=json.dumps([call("number", n=3)])),
        RESULT,
        answer("A", why="the dog"),
    ]
    row = {"messages": chat, "functions": json.dumps(TOOLS)}
    names = {"field_tools": "functions", "field_thinking": "why"}
    tokenizer, prepared = run(PLAIN, [row], names | {"message_property_mappings": {"tool_calls": "calls"}})
    same = [
        chat[0],
        answer(tool_calls=[call("number", n=3)]),
        RESULT,
        answer("A", reasoning_content="the dog"),
    ]
    check_mask(tokenizer, prepared, same, TOOLS, MARKED)


def test_split_thinking_makes_reasoning_of_content(run):
    chat = [user("name?"), answer("<think>\nthe dog\n</think>\n\nAda")]
    shows = CONTENT_ONLY.replace("{{ m.content", "{{ m.reasoning_content }}~{{ m.content")
    tokenizer, prepared = run(shows, [{"messages": chat}], {"split_thinking": True}, train_on_inputs=True)
    text = tokenizer.decode(prepared.train[0]["input_ids"])
    assert text == "[user]~name?</s>[assistant]the dog~Ada</s>"


def test_named_templates_are_chosen_as_transformers_does(run):
    named = {"default": CONTENT_ONLY, "tool_use": PLAIN, "short": CONTENT_ONLY.replace("[", "(")}
    chat = [user("name?"), answer("Ada")]
    for row, keys in (
        ({"messages": chat}, {}),
        ({"messages": chat, "tools": TOOLS}, {}),
        ({"messages": chat}, {"chat_template": "short"}),
    ):
        tokenizer, prepared = run(named, [row], **keys)
        want = tokenizer.apply_chat_template(
            chat, row.get("tools"), chat_template=keys.get("chat_template"), return_dict=False
        )
        assert prepared.train[0]["input_ids"] == want
    tokenizer.chat_template = {"tool_use": PLAIN, "short": CONTENT_ONLY}
    with pytest.raises(ValueError, match="no default specified"):
        chat_template(Recipe(), tokenizer)


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (
            {"messages": CHATS["reasoning of the last turn"]},
            "message 1 has reasoning_content, which the chat",
        ),
        (
            {"messages": [user("a"), answer("b", tool_calls=[call("number", n=1)])]},
            "message 1 has tool_calls",
        ),
        (
            {"messages": [user("a"), answer("b", confidence="high")]},
            "message 1 has confidence, which the chat",
        ),
        (
            {"messages": [user("a"), answer("b")], "tools": TOOLS},
            "the row has 2 tools, and the chat template",
        ),
        ({"messages": [user("a"), answer("b")], "tools": "weather"}, "wanted a list, or JSON of one"),
        ({"messages": [user("a"), answer(None)]}, "message 1 has content=None, wanted text"),
    ],
)
def test_what_a_template_cannot_show_is_an_error(run, row, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        run(CONTENT_ONLY, [row])


def test_a_template_that_refuses_or_asks_otherwise_is_an_error(run):
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    with pytest.raises(ValueError, match="row 0: the chat template refuses this chat: one message only"):
        run(refusing, [{"messages": [user("a"), answer("b")]}])
    chat = CHATS["reasoning of the last turn"]
    with pytest.raises(ValueError, match="which does not stand in front of message 1"):
        run(PLAIN, [{"messages": chat}], chat_template_kwargs={"enable_thinking": False})


def test_keys_that_number_messages_are_no_error(run):
    chat = [
        {**message, "id": str(number), "weight": int(message["role"] == "assistant")}
        for number, message in enumerate(CHATS["a tool call"])
    ]
    tokenizer, prepared = run(PLAIN, [{"messages": chat}])
    check_mask(tokenizer, prepared, CHATS["a tool call"], None, MARKED)


def test_no_role_to_train_wants_flags_of_messages(run):
    rows = [{"messages": [user("a"), answer("b"), user("c"), answer("d", train=True)]}]
    rows.append({"messages": [user("a"), answer("b"), user("c"), answer("d", train=False)]})
    flags = {"message_field_training": "train", "roles_to_train": []}
    tokenizer, prepared = run(PLAIN, rows, flags)
    assert len(prepared.train) == 1  # the other has no target
    labels = prepared.train[0]["labels"]
    assert (
        tokenizer.decode([label for label in labels if label != -100]) == "<think>\n\n</think>\n\nd<|im_end|>"
    )
    with pytest.raises(ValueError, match=r"datasets.0.roles_to_train is \[\] without message_field_training"):
        run(PLAIN, rows, {"roles_to_train": []})


def test_a_chat_whose_answers_all_weigh_nothing_is_left_out(run):
    chats = [[user("a"), answer("b", weight=weight)] for weight in (0, 1)]
    _, prepared = run(PLAIN, [{"messages": chat} for chat in chats])
    assert len(prepared.train) == 1


def test_prepared_data_follow_the_contents_of_a_template_file(run, tmp_path):
    rows, path = [{"messages": [user("a"), answer("b")]}], tmp_path / "chat.jinja"
    folders = []
    for text in (CONTENT_ONLY, CONTENT_ONLY.replace("[", "("), CONTENT_ONLY):
        path.write_text(text)
        _, prepared = run(None, rows, chat_template="jinja", chat_template_jinja=str(path))
        folders.append(prepared.folder)
    assert folders[0] == folders[2] != folders[1]
    moved = path.rename(tmp_path / "other.jinja")
    _, prepared = run(None, rows, chat_template="jinja", chat_template_jinja=str(moved))
    assert prepared.folder == folders[0]
    with pytest.raises(ValueError, match=r"there is no file nowhere\.jinja"):
        run(None, rows, chat_template="jinja", chat_template_jinja="nowhere.jinja")
