"""Data of the recipe: tokens and labels of every type of dataset, prepared once."""

import io
import json

import pytest
from rich.console import Console

from monograph.recipe import check_keys
from monograph.recipe.data.chat_template import CHATML
from monograph.recipe.data.documents import PROMPTS
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.prepare import prepare
from monograph.recipe.data.show_labels import show_labels
from support.recipe_files import make_tokenizer, write_jsonl

# Two templates that differ in what trips people: where a turn ends, and what stands in front.
LLAMA_LIKE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHAT = [
    {"role": "system", "content": "answers questions"},
    {"role": "user", "content": "What is your name?"},
    {"role": "assistant", "content": "My name is Ada."},
    {"role": "user", "content": "What is your name?"},
    {"role": "assistant", "content": "Ada"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder, chat_template=LLAMA_LIKE)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run(model, tmp_path):
    """run(rows, **keys) -> (tokenizer, prepared); `type` and other keys of the dataset under `dataset`."""

    def prepared(rows, dataset=None, **keys):
        path = write_jsonl(tmp_path / "train.jsonl", rows)
        recipe = {
            "base_model": str(model),
            "adapter": "qlora",
            "lora_target_linear": True,
            "datasets": [{"path": path, "type": "completion", **(dataset or {})}],
            "dataset_prepared_path": str(tmp_path / "prepared"),
        }
        recipe = check_keys(recipe | keys).recipe
        tokenizer = load_tokenizer(recipe, str(model))
        return tokenizer, prepare(recipe, tokenizer)

    return prepared


def text_and_targets(tokenizer, document):
    """The text of a document, and the text of its targets, runs of them apart."""
    runs = [[]]
    for token, label in zip(document["input_ids"], document["labels"], strict=True):
        if label == -100:
            runs.append([])
        else:
            assert label == token
            runs[-1].append(token)
    return tokenizer.decode(document["input_ids"]), [tokenizer.decode(run) for run in runs if run]


def test_completion_is_all_target_and_ends(run):
    tokenizer, prepared = run([{"text": "the quick brown fox"}])
    text, targets = text_and_targets(tokenizer, prepared.train[0])
    assert text == "<s>the quick brown fox</s>"
    assert targets == ["the quick brown fox</s>"]
    _, other = run([{"body": "the dog"}], {"field": "body"})
    assert text_and_targets(tokenizer, other.train[0])[0] == "<s>the dog</s>"


@pytest.mark.parametrize("kind", ["alpaca", "instruction"])
@pytest.mark.parametrize("given", ["", "the fox"])
@pytest.mark.parametrize("on_inputs", [False, True])
def test_instructions_train_on_the_answer(run, kind, given, on_inputs):
    row = {"instruction": "What is your {name}?", "input": given, "output": "Ada"}
    tokenizer, prepared = run([row], {"type": kind}, train_on_inputs=on_inputs)
    text, targets = text_and_targets(tokenizer, prepared.train[0])
    prompt = PROMPTS[kind].prompt(row["instruction"], given)
    assert "What is your {name}?" in prompt
    assert given in prompt
    assert prompt.endswith("\n")
    assert text == f"<s>{prompt}Ada</s>"
    assert targets == ([f"{prompt}Ada</s>"] if on_inputs else ["Ada</s>"])
    # The prompt's tokens are those that `generate` will put in front of an answer.
    asked = tokenizer(prompt)["input_ids"]
    assert prepared.train[0]["input_ids"][: len(asked)] == asked


def test_the_wording_of_a_prompt_may_be_given(run):
    kind = {"format": "Q: {instruction} ({input}) A: ", "no_input_format": "Q: {instruction} A: "}
    kind |= {"field_instruction": "question", "field_output": "answer"}
    tokenizer, prepared = run([{"question": "name?", "answer": "Ada"}], {"type": kind})
    assert text_and_targets(tokenizer, prepared.train[0]) == ("<s>Q: name? A: Ada</s>", ["Ada</s>"])


def test_chats_train_on_the_assistant_and_the_end_of_its_turns(run):
    tokenizer, prepared = run([{"messages": CHAT}], {"type": "chat_template"})
    text, targets = text_and_targets(tokenizer, prepared.train[0])
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text.count("<s>") == 1
    assert targets == ["My name is Ada.</s>", "Ada</s>"]
    # What the model is asked at generation is what stood in front of the answer in training.
    asked = tokenizer.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    assert prepared.train[0]["input_ids"][: len(asked)] == asked


@pytest.mark.parametrize(
    ("train_on_eos", "expected"),
    [
        ("turn", ["My name is Ada.</s>", "Ada</s>"]),
        ("last", ["My name is Ada.", "Ada</s>"]),
        ("none", ["My name is Ada.", "Ada"]),
    ],
)
def test_train_on_eos(run, train_on_eos, expected):
    dataset = {"type": "chat_template", "train_on_eos": train_on_eos}
    tokenizer, prepared = run([{"messages": CHAT}], dataset)
    assert text_and_targets(tokenizer, prepared.train[0])[1] == expected


def test_chatml_with_its_own_end_of_turn(run):
    keys = {"chat_template": "chatml", "eot_tokens": ["<|im_end|>"]}
    tokenizer, prepared = run([{"messages": CHAT}], {"type": "chat_template"}, **keys)
    text, targets = text_and_targets(tokenizer, prepared.train[0])
    assert text == tokenizer.apply_chat_template(CHAT, chat_template=CHATML, tokenize=False)
    assert targets == ["My name is Ada.<|im_end|>", "Ada<|im_end|>"]
    _, all_ends = run([{"messages": CHAT}], {"type": "chat_template", "train_on_eos": "all"}, **keys)
    assert text_and_targets(tokenizer, all_ends.train[0])[1][0] == "<|im_end|>"


def test_a_turn_that_nothing_ends_is_refused(run):
    with pytest.raises(ValueError, match=r"a model trained so never stops. Write eot_tokens"):
        run([{"messages": CHAT}], {"type": "chat_template"}, chat_template="chatml")


def test_other_names_of_roles_and_columns(run):
    chat = [{"from": "human", "value": "What is your name?"}, {"from": "gpt", "value": "Ada"}]
    names = {"role": "from", "content": "value"}
    dataset = {"type": "chat_template", "field_messages": "conversations", "message_property_mappings": names}
    tokenizer, prepared = run([{"conversations": chat}], dataset)
    assert text_and_targets(tokenizer, prepared.train[0])[1] == ["Ada</s>"]


def test_messages_may_say_themselves_whether_they_are_targets(run):
    chat = [{**message, "train": number == 2} for number, message in enumerate(CHAT)]
    dataset = {"type": "chat_template", "message_field_training": "train"}
    tokenizer, prepared = run([{"messages": chat}], dataset)
    assert text_and_targets(tokenizer, prepared.train[0])[1] == ["My name is Ada.</s>"]


def test_system_messages_are_dropped_or_added(run):
    tokenizer, prepared = run([{"messages": CHAT}], {"type": "chat_template", "drop_system_message": True})
    assert "answers questions" not in text_and_targets(tokenizer, prepared.train[0])[0]
    _, prepared = run(
        [{"messages": CHAT[1:]}], {"type": "chat_template"}, default_system_message="the quick fox"
    )
    assert text_and_targets(tokenizer, prepared.train[0])[0].startswith("<s>[system] the quick fox[user]")


def test_input_output_is_taken_as_written(run):
    segments = [{"text": "<s>What is", "label": False}, {"text": " the fox", "label": True}]
    segments += [{"text": " and", "label": False}, {"text": " dog</s>", "label": True}]
    tokenizer, prepared = run([{"segments": segments}], {"type": "input_output"})
    text, targets = text_and_targets(tokenizer, prepared.train[0])
    assert text == "<s>What is the fox and dog</s>"
    assert targets == [" the fox", " dog</s>"]


def test_special_tokens_are_those_of_the_recipe(run):
    tokenizer, prepared = run([{"text": "the dog"}], special_tokens={"eos_token": "<|im_end|>"})
    assert text_and_targets(tokenizer, prepared.train[0])[0] == "<s>the dog<|im_end|>"
    with pytest.raises(ValueError, match=r"special_tokens.unk_token: '<none>' is not a token of the model"):
        run([{"text": "the dog"}], special_tokens={"unk_token": "<none>"})


@pytest.mark.parametrize("kind", ["completion", "instruction"])
@pytest.mark.parametrize("strategy", [None, "drop", "truncate", "split", "raise"])
def test_documents_that_are_too_long(run, strategy, kind):
    """Completions that are too long are split unless the recipe says otherwise, as in axolotl."""
    texts = ["the dog " * 20, "the dog"]
    rows = [{"text": text, "instruction": "name?", "output": text} for text in texts]
    if strategy == "raise":
        with pytest.raises(ValueError, match=r"row 0: it has \d+ tokens, sequence_len is 16"):
            run(rows, {"type": kind}, sequence_len=16, excess_length_strategy=strategy)
        return
    tokenizer, prepared = run(rows, {"type": kind}, sequence_len=16, excess_length_strategy=strategy)
    lengths = [len(ids) for ids in prepared.train["input_ids"]]
    assert max(lengths) <= 16
    done = strategy or ("split" if kind == "completion" else "drop")
    assert len(lengths) == {"drop": 1, "truncate": 2}.get(done, len(lengths))
    name = {"drop": "too long", "truncate": "truncated", "split": "split into pieces"}[done]
    counted = {"too long", "truncated", "split into pieces"} & prepared.counts.keys()
    assert counted == {name}
    assert prepared.counts[name] == 1
    assert prepared.what_is_missing() == f"of 2 rows: 1 {name}"
    if done == "split":
        _, whole = run(rows, {"type": kind}, sequence_len=512)
        joined = [token for ids in prepared.train["input_ids"][:-1] for token in ids]
        assert joined == whole.train[0]["input_ids"]
        assert whole.what_is_missing() == ""
    if done == "split" and kind == "completion":  # axolotl's rule, in its own words
        ids = [*tokenizer(texts[0])["input_ids"], tokenizer.eos_token_id]
        wanted = [ids[begin : begin + 16] for begin in range(0, len(ids), 16)]
        assert prepared.train["input_ids"][:-1] == wanted
        assert prepared.train["labels"][0][1:] == wanted[0][1:]


def test_all_labels_ignored_stops_and_says_so(run):
    rows = [{"segments": [{"text": "the dog", "label": False}]}] * 3
    with pytest.raises(
        ValueError, match=r"all labels are -100 in all 3 documents, so there is nothing to learn"
    ):
        run(rows, {"type": "input_output"})


def test_some_rows_without_targets_are_left_out_and_counted(run):
    rows = [{"segments": [{"text": "the dog", "label": n == 1}]} for n in range(3)]
    _, prepared = run(rows, {"type": "input_output"})
    assert (len(prepared.train), prepared.counts["without a target"]) == (1, 2)


def test_a_row_that_does_not_fit_its_type_is_named(run):
    with pytest.raises(
        ValueError, match=r"row 0: column 'instruction' is missing, wanted text; the row has text"
    ):
        run([{"text": "the dog"}], {"type": "alpaca"})
    with pytest.raises(ValueError, match="row 0: column 'messages' is missing or empty"):
        run([{"text": "the dog"}], {"type": "chat_template"})
    with pytest.raises(ValueError, match="there is no file"):
        run([{"text": "the dog"}], {"path": "none.jsonl"})


def test_parquet_gives_the_tokens_of_jsonl(run, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": f"the dog {number}"} for number in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    _, lines = run(rows)
    _, table = run(rows, {"path": str(tmp_path / "rows.parquet")})
    assert table.train[:] == lines.train[:]


def test_held_back_documents_are_a_function_of_the_seed(run):
    rows = [{"text": f"the dog {number}"} for number in range(20)]
    _, share = run(rows, val_set_size=0.25)
    assert (len(share.train), len(share.eval)) == (15, 5)
    _, number = run(rows, val_set_size=5)
    assert number.eval[:] == share.eval[:]
    _, other = run(rows, val_set_size=5, seed=1)
    assert other.eval[:] != share.eval[:]
    everything = {tuple(ids) for part in (share.train, share.eval) for ids in part["input_ids"]}
    assert len(everything) == 20
    with pytest.raises(ValueError, match="val_set_size is 20"):
        run(rows, val_set_size=20)


def test_prepared_data_are_read_again_until_anything_changes(run):
    _, first = run([{"text": "the dog"}])
    _, again = run([{"text": "the dog"}])
    assert again.folder == first.folder
    _, other_rows = run([{"text": "the fox"}])
    _, other_keys = run([{"text": "the fox"}], sequence_len=64)
    assert len({first.folder, other_rows.folder, other_keys.folder}) == 3
    _, same = run([{"text": "the fox"}], sequence_len=64, learning_rate=1.0)
    assert same.folder == other_keys.folder


def test_two_processes_tokenise_the_same(run):
    rows = [{"text": f"the dog {number}"} for number in range(6)]
    _, one = run(rows)
    _, two = run(rows, dataset_processes=2, seed=7)  # the seed only makes another folder
    assert two.folder != one.folder
    assert two.train[:] == one.train[:]


def test_debug_prints_targets_apart(run):
    tokenizer, prepared = run([{"instruction": "name?", "output": "Ada"}], {"type": "instruction"})
    plain, coloured = io.StringIO(), io.StringIO()
    show_labels(prepared.train, tokenizer, Console(file=plain, width=200))
    show_labels(prepared.train, tokenizer, Console(file=coloured, width=200, force_terminal=True))
    eos = tokenizer.eos_token_id
    assert f"[</s>]{eos}" in plain.getvalue()
    assert "[name" not in plain.getvalue()
    assert f"\x1b[32m</s>\x1b[0m\x1b[36m{eos}" in coloured.getvalue()
    assert "targets" in plain.getvalue().splitlines()[0]


def test_counts_are_written(run):
    _, prepared = run([{"text": "the dog"}, {"text": "the fox"}], val_set_size=1)
    with open(f"{prepared.folder}/counts.json") as file:
        counts = json.load(file)
    assert counts == prepared.counts
    assert counts["rows"] == 2
    assert counts["train documents"] == counts["eval documents"] == 1
    assert counts["train targets"] == counts["train tokens"] - 1
