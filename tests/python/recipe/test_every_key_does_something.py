"""No key of a dataset or of an adapter passes in silence.

Each is changed in a tiny recipe of every type. Then tokens, labels or the adapted model differ, or the
reader of recipes refuses it or says something. A new key without a line here fails.
"""

import json
import warnings

import pytest
import torch

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.config.data_files import load_rows
from monograph.recipe.config.keys import DATASET_KEYS, KEYS
from monograph.recipe.data.documents import document_reader
from monograph.recipe.data.encode import encode, load_tokenizer
from monograph.recipe.run.load_model import load_model
from support.recipe_files import make_model, make_tokenizer, small_recipe, write_jsonl

TEMPLATE = (
    "{% for tool in tools or [] %}[tool]{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}:\n"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% if m.thought %}({{ m.thought }}){% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "dog", "parameters": {"n": {"type": "integer"}}}}


def row(word):
    """A row that every type can read, with columns and keys beside those it reads by default."""
    chat = [
        {"role": "system", "content": f"be {word}", "train": None},
        {"role": "user", "content": "name?", "train": None},
        {"role": "assistant", "content": f"<think>fox</think>Ada {word}", "train": None},
        {"role": "user", "content": "again?", "train": None},
        {"role": "assistant", "content": f"the dog {word}", "train": False},
    ]
    other = [
        {"from": "user", "value": "what?", "why": None},
        {"from": "assistant", "value": f"lazy {word}", "why": "quick"},
    ]
    return {
        "text": f"the quick {word}",
        "other": f"the lazy {word}",
        "instruction": f"jump {word}",
        "input": "over",
        "output": f"the dog {word}",
        "segments": [{"text": f"the {word}", "label": False}, {"text": " dog", "label": True}],
        "messages": chat,
        "conv": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": word}],
        "named": other,
        "functions": [TOOL],
    }


TYPES = {
    "completion": "completion",
    "alpaca": "alpaca",
    "instruction": "instruction",
    "mapping": {"format": "{instruction} with {input}: "},
    "chat_template": "chat_template",
    "input_output": "input_output",
}
NAMED = {"field_messages": "named", "message_field_role": "from", "message_field_content": "value"}
# Values of each key, and keys that are there before and after the change.
DATASET_CHANGES = {
    "path": [("OTHER", {})],
    "type": [("KIND", {})],
    "data_files": [("test.jsonl", {}), ("none.jsonl", {})],
    "ds_type": [("csv", {}), ("xml", {})],
    "name": [("main", {})],
    "split": [("test", {}), ("train[:1]", {}), ("none", {})],
    "revision": [("v1", {})],
    "field": [("other", {})],
    "field_messages": [("conv", {})],
    "message_field_role": [
        ("from", {}),
        ("from", {"field_messages": "named", "message_field_content": "value"}),
    ],
    "message_field_content": [
        ("value", {}),
        ("value", {"field_messages": "named", "message_field_role": "from"}),
    ],
    "message_property_mappings": [({"content": "value"}, {}), ({"thought": "why"}, NAMED)],
    "field_tools": [("functions", {})],
    "field_thinking": [("why", NAMED)],
    "template_thinking_key": [("thought", NAMED | {"field_thinking": "why"})],
    "split_thinking": [(True, {})],
    "message_field_training": [("train", {})],
    "roles": [({"user": ["assistant"], "assistant": ["user"], "system": ["system"]}, {})],
    "roles_to_train": [(["user"], {}), ([], {})],
    "train_on_eos": [("none", {}), ("all", {})],
    "drop_system_message": [(True, {})],
    "chat_template": [("chatml", {}), ("jinja", {}), ("llama3", {})],
    "shards": [(2, {}), (0, {})],
    "shards_idx": [(1, {}), (1, {"shards": 2}), (2, {"shards": 2})],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    make_tokenizer(root / "model", chat_template=TEMPLATE)
    make_model(root / "model")
    folder = root / "data"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [row(word) for word in ("one", "two", "three")])
    write_jsonl(folder / "test.jsonl", [row("four")])
    write_jsonl(root / "other.jsonl", [row("five")])
    return root


def outcome(world, entry):
    """All that a recipe with this dataset gives: tokens, labels and notices, or what is said against it."""
    keys = small_recipe(world, "", datasets=[entry], eot_tokens=["<|im_end|>"], sequence_len=512)
    try:
        read = check_keys(keys)
        dataset = read.recipe.datasets[0]
        tokenizer = load_tokenizer(read.recipe, read.recipe.base_model)
        read_row = document_reader(read.recipe, dataset, tokenizer)
        rows = load_rows(dataset, "datasets.0")
        found = [encode(read_row(one, f"row {number}"), tokenizer) for number, one in enumerate(rows)]
    except ConfigError as error:
        return error.errors
    except ValueError as error:
        return [str(error)]
    return [read.notices, found]


def test_there_is_a_change_for_every_key_of_a_dataset():
    assert set(DATASET_CHANGES) == set(DATASET_KEYS)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", DATASET_CHANGES)
def test_a_key_of_a_dataset_does_something(world, name, kind):
    other = next(each for each in TYPES.values() if each != TYPES[kind])
    for value, beside in DATASET_CHANGES[name]:
        words = {"OTHER": str(world / "other.jsonl"), "KIND": other}
        put = words.get(value, value) if isinstance(value, str) else value
        entry = {"path": str(world / "data"), "type": TYPES[kind]} | beside
        before, after = outcome(world, entry), outcome(world, entry | {name: put})
        refused = isinstance(before[0], str) and name not in ("type",)
        if refused and beside and kind != "chat_template":
            continue  # what stands beside it is refused already
        assert before != after, (name, value, beside)


def test_the_rows_are_read_by_every_type(world):
    for kind in TYPES.values():
        notices, found = outcome(world, {"path": str(world / "data"), "type": kind})
        assert len(found) == 3, notices
    named = {"path": str(world / "data"), "type": "chat_template", "field_thinking": "why", **NAMED}
    assert len(outcome(world, named)[1]) == 3


# The same of an adapter: values, and keys beside them.
MODULES = {"lora_target_linear": False, "lora_target_modules": ["q_proj", "v_proj"]}
ADAPTER_CHANGES = {
    "adapter": [("lora", {}), (None, {})],
    "lora_model_dir": [("none", {})],
    "lora_r": [(2, {}), (0, {})],
    "lora_alpha": [(7, {})],
    "lora_dropout": [(0.5, {}), (1.0, {})],
    "lora_target_linear": [(True, MODULES)],
    "lora_target_modules": [
        (["k_proj"], MODULES),
        (["lm_head"], {}),
        ("(q|k)_proj", {}),
        (["none"], MODULES),
    ],
    "lora_target_parameters": [(["mlp.experts.down_proj"], {})],
    "lora_modules_to_save": [(["lm_head"], {}), (["q_proj"], {}), (["none"], {})],
    "peft_trainable_token_indices": [([3, 5], {}), ({"lm_head": [3]}, {})],
    "peft_ensure_weight_tying": [(True, {}), (True, {"lora_modules_to_save": ["lm_head"]})],
    "lora_rank_pattern": [({"q_proj": 2}, {}), ({"none": 2}, {})],
    "lora_alpha_pattern": [({"q_proj": 2}, {}), ({"none": 2}, {})],
    "peft_use_rslora": [(True, {})],
    "peft_use_dora": [(True, {})],
    "peft_layers_to_transform": [([1], MODULES), ([1], {}), ([9], MODULES)],
    "peft_layers_pattern": [("layers", MODULES), ("none", MODULES | {"peft_layers_to_transform": [1]})],
    "peft_init_lora_weights": [("gaussian", {}), (False, {}), ("none", {})],
    "peft": [({"loftq_config": {"loftq_bits": 4}}, {}), ({"none": 1}, {})],
}


def adapted(world, change):
    """The trained tensors of a recipe with their values and scales, and notices; or what is said against."""
    keys = {
        name: value for name, value in (small_recipe(world, "alpaca") | change).items() if value is not None
    }
    try:
        read = check_keys(keys)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = load_model(read.recipe, read.recipe.base_model)
    except ConfigError as error:
        return error.errors
    except (ValueError, OSError) as error:
        return [str(error)]
    trained = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: (tuple(p.shape), float(p.abs().sum())) for name, p in trained.items()}
    layers = {
        name: [
            str(layer.scaling),
            str(getattr(layer, "lora_dropout", "")),
            type(layer.get_base_layer()).__name__,
        ]
        for name, layer in model.named_modules()
        if hasattr(layer, "scaling") and hasattr(layer, "get_base_layer")
    }
    told = [str(each.message) for each in said if "weight_tying" in str(each.message)]
    return [read.notices + told, json.dumps([sums, layers], sort_keys=True)]


def test_there_is_a_change_for_every_key_of_an_adapter():
    # `adapters` is no key of one adapter: recipe/test_many_adapters.py.
    named = {name for name in KEYS if name.startswith(("adapter", "lora_", "peft"))}
    assert set(ADAPTER_CHANGES) == named - {"adapters"}


@pytest.mark.parametrize("name", ADAPTER_CHANGES)
def test_a_key_of_an_adapter_does_something(world, name):
    torch.manual_seed(0)
    for value, beside in ADAPTER_CHANGES[name]:
        before, after = adapted(world, beside), adapted(world, beside | {name: value})
        assert isinstance(before[0], list), before
        assert before != after, (name, value, beside)
