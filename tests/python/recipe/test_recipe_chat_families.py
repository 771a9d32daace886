"""The chats of five families with tools and reasoning: tokens of transformers, targets written by hand.

Templates are the vendors' as TRL ships them, and our own in tests/files/chat_templates where those show no
tools or no reasoning.
"""

import copy
import itertools
import json
from pathlib import Path

import pytest
import trl

from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.data.chat import ChatReader
from monograph.recipe.data.encode import encode
from support.recipe_files import make_tokenizer

OURS = Path(__file__).parents[2] / "files" / "chat_templates"
TRLS = Path(trl.__file__).parent / "chat_templates"

# The special tokens of the families; <|im_start|> and <|im_end|> are there already.
_tokens = """
<|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>
<think> </think> <tool_call> </tool_call>
<start_of_turn> <end_of_turn>
[INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [ARGS]
[TOOL_RESULTS] [/TOOL_RESULTS] [THINK] [/THINK]
<|start|> <|end|> <|return|> <|call|> <|channel|> <|message|>
"""
TOKENS = _tokens.split()

# Name: template, tokens that end a turn, what the template calls reasoning.
FAMILIES = {
    "llama3.1": (TRLS / "llama3_1.jinja", ["<|eot_id|>"], None),
    "llama3 ours": (OURS / "llama3.jinja", ["<|eot_id|>", "<|eom_id|>"], "reasoning_content"),
    "qwen3": (TRLS / "qwen3.jinja", ["<|im_end|>"], "reasoning_content"),
    "gemma3": (TRLS / "gemma3.jinja", ["<end_of_turn>"], None),
    "gemma3 ours": (OURS / "gemma3.jinja", ["<end_of_turn>"], "reasoning_content"),
    "mistral v3": (OURS / "mistral_v3.jinja", [], None),
    "mistral v13": (OURS / "mistral_v13.jinja", [], "reasoning_content"),
    "gpt-oss": (TRLS / "gptoss.jinja", ["<|end|>", "<|return|>", "<|call|>"], "thinking"),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def call(identity="aaaaaaaa1", **arguments):
    return {
        "id": identity,
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


def user(text):
    return {"role": "user", "content": text}


def answer(text=None, **more):
    return {"role": "assistant", **({} if text is None else {"content": text}), **more}


def result(text):
    return {"role": "tool", "content": text, "tool_call_id": "aaaaaaaa1", "name": "weather"}


SYSTEM = {"role": "system", "content": "answers questions"}
PLAIN = [SYSTEM, user("the fox?"), answer("over the dog"), user("name?"), answer("Ada. ¡Sí!")]
THOUGHT = [
    user("the fox?"),
    answer("over the dog", reasoning="it jumps"),
    user("name?"),
    answer("Ada", reasoning="I am\nAda"),
]
# Two questions, each answered with a tool; reasoning in all four answers.
TOOL_TURNS = [
    SYSTEM,
    user("today?"),
    answer(reasoning="I look", tool_calls=[call(city="Rome")]),
    result('{"sky": "grey"}'),
    answer("grey", reasoning="so it says"),
    user("and then?"),
    answer(reasoning="again", tool_calls=[call(city="Rome", day=2)]),
    result("blue"),
    answer("blue", reasoning="clear"),
]
CHATS = {"plain": (PLAIN, None), "reasoning": (THOUGHT, None), "tools": (TOOL_TURNS, TOOLS)}

# What a model has to write, run by run, of each chat.
EXPECTED = {
    ("llama3.1", "plain"): ["over the dog<|eot_id|>", "Ada. ¡Sí!<|eot_id|>"],
    ("llama3.1", "tools"): [
        '{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>',
        "grey<|eot_id|>",
        '{"name": "weather", "parameters": {"city": "Rome", "day": 2}}<|eot_id|>',
        "blue<|eot_id|>",
    ],
    ("llama3 ours", "plain"): ["over the dog<|eot_id|>", "Ada. ¡Sí!<|eot_id|>"],
    ("llama3 ours", "reasoning"): ["over the dog<|eot_id|>", "<think>I am\nAda</think>\nAda<|eot_id|>"],
    ("llama3 ours", "tools"): [
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}<|eom_id|>',
        "grey<|eot_id|>",
        '<think>again</think>\n<|python_tag|>{"name": "weather", "parameters": {"city": "Rome", "day": 2}}'
        "<|eom_id|>",
        "<think>clear</think>\nblue<|eot_id|>",
    ],
    ("qwen3", "plain"): ["over the dog<|im_end|>", "<think>\n\n</think>\n\nAda. ¡Sí!<|im_end|>"],
    ("qwen3", "reasoning"): ["over the dog<|im_end|>", "<think>\nI am\nAda\n</think>\n\nAda<|im_end|>"],
    ("qwen3", "tools"): [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>',
        "grey<|im_end|>",
        '<think>\nagain\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "day": '
        "2}}\n</tool_call><|im_end|>",
        "<think>\nclear\n</think>\n\nblue<|im_end|>",
    ],
    ("gemma3", "plain"): ["over the dog<end_of_turn>", "Ada. ¡Sí!<end_of_turn>"],
    ("gemma3 ours", "plain"): ["over the dog<end_of_turn>", "Ada. ¡Sí!<end_of_turn>"],
    ("gemma3 ours", "reasoning"): [
        "<think>\nit jumps\n</think>\nover the dog<end_of_turn>",
        "<think>\nI am\nAda\n</think>\nAda<end_of_turn>",
    ],
    ("gemma3 ours", "tools"): [
        '<think>\nI look\n</think>\n```tool_code\nweather(city="Rome")\n```<end_of_turn>',
        "<think>\nso it says\n</think>\ngrey<end_of_turn>",
        '<think>\nagain\n</think>\n```tool_code\nweather(city="Rome", day=2)\n```<end_of_turn>',
        "<think>\nclear\n</think>\nblue<end_of_turn>",
    ],
    ("mistral v3", "plain"): [" over the dog</s>", " Ada. ¡Sí!</s>"],
    ("mistral v3", "tools"): [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "aaaaaaaa1"}]</s>',
        " grey</s>",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "day": 2}, "id": "aaaaaaaa1"}]</s>',
        " blue</s>",
    ],
    ("mistral v13", "plain"): ["over the dog</s>", "Ada. ¡Sí!</s>"],
    ("mistral v13", "reasoning"): ["over the dog</s>", "[THINK]I am\nAda[/THINK]Ada</s>"],
    ("mistral v13", "tools"): [
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}</s>',
        "grey</s>",
        '[THINK]again[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Rome", "day": 2}</s>',
        "[THINK]clear[/THINK]blue</s>",
    ],
    ("gpt-oss", "plain"): [
        "<|channel|>final<|message|>over the dog<|end|>",
        "<|channel|>final<|message|>Ada. ¡Sí!<|return|>",
    ],
    ("gpt-oss", "reasoning"): [
        "<|channel|>final<|message|>over the dog<|end|>",
        "<|channel|>analysis<|message|>I am\nAda<|end|><|start|>assistant<|channel|>final<|message|>Ada"
        "<|return|>",
    ],
    ("gpt-oss", "tools"): [
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
        "<|channel|>final<|message|>grey<|end|>",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome", "day": 2}<|call|>',
        "<|channel|>analysis<|message|>clear<|end|><|start|>assistant<|channel|>final<|message|>blue<|return|>",
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = make_tokenizer(tmp_path_factory.mktemp("model"))
    made.add_special_tokens({"additional_special_tokens": TOKENS})
    return made


def messages_of(chat, name):
    """A chat with its reasoning under another name, or without."""
    rest = [{key: value for key, value in message.items() if key != "reasoning"} for message in chat]
    if name is None:
        return rest
    return [
        message | ({name: given["reasoning"]} if "reasoning" in given else {})
        for message, given in zip(rest, chat, strict=True)
    ]


def read(tokenizer, template, row, ends=(), **dataset):
    """(tokens, runs of targets) of a row."""
    recipe = Recipe(chat_template="jinja", chat_template_jinja=str(template), eot_tokens=list(ends))
    encoded = encode(ChatReader(recipe, DatasetKeys(**dataset), tokenizer)(row, "row 7"), tokenizer)
    runs = [[]]
    for token, label in zip(encoded.input_ids, encoded.labels, strict=True):
        assert label in (token, -100)
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(token)
    return encoded.input_ids, [tokenizer.decode(run) for run in runs if run]


def transformers_tokens(tokenizer, template, messages, tools):
    return tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=Path(template).read_text(), return_dict=False
    )


@pytest.mark.parametrize(("family", "chat"), EXPECTED)
def test_tokens_of_transformers_and_targets_by_hand(tokenizer, family, chat):
    template, ends, thinking = FAMILIES[family]
    given, tools = CHATS[chat]
    messages = messages_of(given, thinking)
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    ids, targets = read(tokenizer, template, row, ends)
    assert ids == transformers_tokens(tokenizer, template, messages, tools)
    assert targets == EXPECTED[family, chat]


@pytest.mark.parametrize("family", [name for name in FAMILIES if (name, "tools") in EXPECTED])
def test_tools_calls_and_arguments_as_json_text(tokenizer, family):
    """All of it may be JSON text; reasoning may have the other name in the data."""
    template, ends, thinking = FAMILIES[family]
    messages = copy.deepcopy(messages_of(TOOL_TURNS, thinking and "why"))
    for message in messages:
        for made in message.get("tool_calls", []):
            made["function"] = made["function"] | {"arguments": json.dumps(made["function"]["arguments"])}
        if "tool_calls" in message:
            message["tool_calls"] = json.dumps(message["tool_calls"])
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"]["parameters"] = json.dumps(TOOLS[0]["function"]["parameters"])
    names = {"field_thinking": "why", "template_thinking_key": thinking} if thinking else {}
    row = {"messages": json.dumps(messages), "functions": json.dumps(tools)}
    ids, targets = read(tokenizer, template, row, ends, field_tools="functions", **names)
    assert ids == transformers_tokens(tokenizer, template, messages_of(TOOL_TURNS, thinking), TOOLS)
    assert targets == EXPECTED[family, "tools"]


def test_two_calls_words_and_reasoning_at_once(tokenizer):
    both = answer("wait", reasoning_content="two", tool_calls=[call(city="Rome"), call(city="Bonn")])
    messages = [user("today?"), both, result("grey"), result("blue"), answer("grey and blue")]
    one = '{"name": "weather", "arguments": {"city": "Rome"}}'
    two = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    row = {"messages": messages, "tools": TOOLS}
    ids, targets = read(tokenizer, TRLS / "qwen3.jinja", row, ["<|im_end|>"])
    assert ids == transformers_tokens(tokenizer, TRLS / "qwen3.jinja", messages, TOOLS)
    assert targets == [
        f"<think>\ntwo\n</think>\n\nwait\n<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>"
        "<|im_end|>",
        "<think>\n\n</think>\n\ngrey and blue<|im_end|>",
    ]


def test_a_null_in_json_text_means_something(tokenizer):
    calls = [{"function": {"name": "weather", "arguments": {"city": None}}}]
    for given, shown in ((json.dumps(calls), '{"city": null}'), (calls, "{}")):
        row = {"messages": [user("today?"), answer(tool_calls=given)]}
        _, targets = read(tokenizer, TRLS / "qwen3.jinja", row, ["<|im_end|>"])
        assert f'"arguments": {shown}}}' in targets[0]


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        ("qwen3_training", "tools", None),
        ("gemma3_training", "plain", ["over the dog<end_of_turn>\n", "Ada. ¡Sí!<end_of_turn>\n"]),
        ("llama3_training", "plain", ["over the dog<|eot_id|>", "Ada. ¡Sí!<|eot_id|>"]),
        ("gptoss_training", "tools", None),
    ],
)
def test_a_template_that_marks_generation_is_taken_at_its_word(tokenizer, template, chat, expected):
    given, tools = CHATS[chat]
    messages = messages_of(given, "thinking" if "gptoss" in template else "reasoning_content")
    path = TRLS / f"{template}.jinja"
    want = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=path.read_text(), return_assistant_tokens_mask=True
    )
    runs, last = [], False
    for token, kept in zip(want["input_ids"], want["assistant_masks"], strict=True):
        if kept:
            runs = [*runs, [token]] if not last else [*runs[:-1], [*runs[-1], token]]
        last = bool(kept)
    row = {"messages": messages} | ({"tools": tools} if tools else {})
    ids, targets = read(tokenizer, path, row)
    assert ids == want["input_ids"]
    assert targets == [tokenizer.decode(run) for run in runs]
    assert expected in (None, targets)


def test_marks_do_not_say_which_turns_are_trained(tokenizer):
    messages = [user("a"), answer("b", train=False), user("c"), answer("d", train=True)]
    path, ends = TRLS / "llama3_training.jinja", ["<|eot_id|>"]
    _, targets = read(tokenizer, path, {"messages": messages}, ends, message_field_training="train")
    assert targets == ["d<|eot_id|>"]
    _, targets = read(tokenizer, path, {"messages": messages}, ends, train_on_eos="none")
    assert targets == ["b", "d"]


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_reasoning_under_any_of_its_names(tokenizer, family):
    template, ends, _ = FAMILIES[family]
    for name in ("reasoning_content", "reasoning", "thinking"):
        row = {"messages": messages_of(THOUGHT, name)}
        assert read(tokenizer, template, row, ends)[1] == EXPECTED[family, "reasoning"]


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_the_same_reasoning_under_two_names_is_written_once(tokenizer, family):
    template, ends, _ = FAMILIES[family]
    for names in itertools.permutations(("reasoning_content", "reasoning", "thinking"), 2):
        one, two = (messages_of(THOUGHT, name) for name in names)
        row = {"messages": [{**first, **second} for first, second in zip(one, two, strict=True)]}
        assert read(tokenizer, template, row, ends)[1] == EXPECTED[family, "reasoning"]


def test_weights_of_openai_say_which_answers_are_targets(tokenizer):
    messages = [{**user("a"), "weight": 0}, answer("b", weight=0), user("c"), answer("d", weight=1)]
    messages += [
        user("e"),
        answer("f"),
        user("g"),
        answer("h", weight=1.0),
        user("i"),
        answer("j", weight=None),
    ]
    for name in ("llama3", "llama3_training"):
        template = TRLS / f"{name}.jinja"
        ids, targets = read(tokenizer, template, {"messages": messages}, ["<|eot_id|>"])
        assert targets == [f"{words}<|eot_id|>" for words in "dfhj"]
        assert ids == transformers_tokens(tokenizer, template, messages, None)


def test_flags_of_messages_are_booleans_or_null(tokenizer):
    messages = [user("a") | {"train": True}, answer("b", train=None), user("c"), answer("d", train=False)]
    dataset = {"message_field_training": "train"}
    _, targets = read(tokenizer, TRLS / "llama3.jinja", {"messages": messages}, ["<|eot_id|>"], **dataset)
    assert targets == ["a<|eot_id|>", "b<|eot_id|>"]
    for value, shown in (("false", "'false'"), (1, "1"), (0, "0"), ("", "''")):
        row = {"messages": [user("a"), answer("b", train=value), user("c"), answer("d")]}
        refused(tokenizer, "qwen3", row, f"message 1 has train={shown}, wanted true or false", **dataset)


@pytest.mark.parametrize(
    ("messages", "part", "dataset"),
    [
        ([user("a"), answer("b", weight=0.5)], "message 1 has weight=0.5, wanted 0 (no target) or 1", {}),
        ([user("a"), answer("b", weight="0")], "message 1 has weight='0', wanted 0", {}),
        ([user("a"), answer("b", weight=False)], "message 1 has weight=False, wanted 0", {}),
        ([user("a") | {"weight": 1}, answer("b")], "message 0 (user) has weight 1 and is no target", {}),
        (
            [user("a"), answer("b", weight=1, train=False)],
            "message 1 (assistant) has weight 1 and is no target",
            {"message_field_training": "train"},
        ),
        (
            [user("a"), answer("b", reasoning_content="hm", reasoning="other")],
            "message 1 has reasoning twice: reasoning_content='hm' and reasoning='other'",
            {},
        ),
        (
            [user("a"), answer("b", why="hm", reasoning_content="other")],
            "message 1 has reasoning twice: why='hm' and reasoning_content='other'",
            {"field_thinking": "why"},
        ),
        (
            [user("a"), answer("<think>hm</think>b", thinking="other")],
            "message 1 has reasoning twice: thinking='other' and <think> in its content='hm'",
            {"split_thinking": True},
        ),
    ],
)
def test_what_messages_say_of_themselves_must_be_clear(tokenizer, messages, part, dataset):
    refused(tokenizer, "qwen3", {"messages": messages}, part, **dataset)


def refused(tokenizer, family, row, part, **dataset):
    template, ends, _ = FAMILIES[family]
    with pytest.raises(ValueError, match="row 7: ") as error:
        read(tokenizer, template, row, ends, **dataset)
    assert part in str(error.value)


IMAGE = {"role": "user", "content": [{"type": "image", "url": "x.png"}, {"type": "text", "text": "what?"}]}
AUDIO = {"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "audio", "audio": "x.wav"}]}


@pytest.mark.parametrize(
    ("family", "row", "part"),
    [
        ("gemma3", {"messages": [IMAGE, answer("a fox")]}, "message 0 has a part of type 'image' (part 0)"),
        ("gemma3", {"messages": [AUDIO, answer("a fox")]}, "message 0 has a part of type 'audio' (part 1)"),
        (
            "qwen3",
            {"messages": [user("what?"), answer("a fox")], "images": ["x.png"]},
            "column 'images' is not empty; only text is trained on",
        ),
        (
            "llama3.1",
            {"messages": [user("a"), answer("I look", tool_calls=[call(city="Rome")])]},
            "message 1 has content beside tool_calls, which the chat template does not show",
        ),
        ("gemma3", {"messages": [user("a"), answer("b")], "tools": TOOLS}, "the row has 1 tools"),
        (
            "qwen3",
            {"messages": [{"role": "developer", "content": "be short"}, user("a"), answer("b")]},
            "the chat template does not show message 0 (developer)",
        ),
        (
            "qwen3",
            {
                "messages": [
                    user("a"),
                    answer(tool_calls=[{"function": {"name": "weather", "arguments": "{"}}]),
                ]
            },
            "message 1: tool_calls.0: arguments is '{', wanted a mapping, or JSON of one",
        ),
        (
            "qwen3",
            {"messages": [user("a"), answer(tool_calls=[{"function": {"name": "w", "arguments": "[1]"}}])]},
            "tool_calls.0: arguments is '[1]', wanted a mapping",
        ),
        (
            "qwen3",
            {"messages": [user("a"), user("b")]},
            "no token of this chat is a target; its messages are",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(tokenizer, family, row, part):
    refused(tokenizer, family, row, part)


def test_a_template_that_marks_nothing_is_an_error(tokenizer, tmp_path):
    path = tmp_path / "marks.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% generation %}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="row 7: no token of this chat is a target"):
        read(tokenizer, path, {"messages": [user("a"), answer("b")]})


def test_texts_in_parts_are_one_text(tokenizer):
    parts = [{"type": "text", "text": "over "}, {"type": "text", "text": "the dog"}]
    template, ends, _ = FAMILIES["llama3.1"]
    ids, targets = read(tokenizer, template, {"messages": [user("a"), answer(parts)]}, ends)
    assert ids == transformers_tokens(tokenizer, template, [user("a"), answer("over the dog")], None)
    assert targets == ["over the dog<|eot_id|>"]
