"""One table of keys: a name stands in one row, and what is made from the rows is what it was."""

import ast
import hashlib
import inspect
import json
import pathlib
import textwrap

import pytest

import monograph.recipe
from monograph.recipe import check_keys
from monograph.recipe.config import (
    activation_checks,
    base_bits,
    model_checks,
    read_config,
    run_checks,
    trl_checks,
)
from monograph.recipe.config.dataset_keys import DATASET_KEYS, DATASET_REFUSED
from monograph.recipe.config.key_row import CHECKS_OF, COMPARED, rows_of
from monograph.recipe.config.key_support import IGNORED, REFUSED, state_of
from monograph.recipe.config.keys import KEYS, TRL_KEYS, TrlRecipe
from monograph.recipe.config.other_keys import MEANINGS, OTHER_NAMES, OTHERS_IGNORED, OTHERS_REFUSED, SYNONYMS
from monograph.recipe.run.run_identity import run_identity
from monograph.recipe.run.saved_recipe import saved_keys
from monograph.recipe.trl.resumed_run import trl_identity

ROOT = pathlib.Path(monograph.recipe.__file__).parent
TABLE = {"native_keys", "many_keys", "keys", "dataset_keys", "other_keys"}
FUNCTIONS = {"activation_checks", "meanings", "base_bits", "model_checks", "run_checks", "trl_checks"}
NAMES = {*KEYS, *TRL_KEYS, *IGNORED, *REFUSED, *MEANINGS}


def test_a_name_stands_in_one_row():
    parts = [KEYS, TRL_KEYS, OTHERS_IGNORED, OTHERS_REFUSED, MEANINGS, OTHER_NAMES, SYNONYMS]
    names = [name for part in parts for name in part]
    assert len(names) > 500
    assert sorted(names) == sorted(set(names))
    assert not set(DATASET_KEYS) & set(DATASET_REFUSED)
    for name in NAMES:
        assert state_of(name) is not None, name


def test_a_row_says_what_it_does():
    for name, row in rows_of(TrlRecipe).items():
        assert row.about.strip(), name
        assert (row.own is None) == (name in KEYS), name
        assert row.resume is COMPARED or row.resume.why, name


@pytest.mark.parametrize("module", [base_bits, activation_checks, model_checks, run_checks, trl_checks])
def test_a_check_is_registered_for_the_keys_that_it_looks_at(module):
    """By the code of each function that has the mark: no `recipe.KEY` that the mark does not name."""
    keys = rows_of(TrlRecipe)
    marked = {name for names in CHECKS_OF.values() for name in names if name.startswith(module.__name__)}
    assert len(marked) >= (1 if module in (base_bits, activation_checks) else 6)
    for name in marked:
        function = getattr(module, name.rpartition(".")[2])
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        read = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "recipe"
        }
        concerned = {key for key, checks in CHECKS_OF.items() if name in checks}
        assert concerned <= set(keys), name
        assert read & set(keys) <= concerned, name
    assert all(f"{check.__module__}.{check.__name__}" in str(CHECKS_OF) for check in read_config.CHECKS)


def names_in(node):
    """Names of keys in a literal: a list of them, or a text of words."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    words = {word for text in texts if isinstance(text, str) for word in text.split()}
    return {name for name in words & NAMES if "_" in name}


def test_lists_of_keys_stand_in_the_table_alone():
    """Other files of the recipe ask the rows; ten files hold rows, and what functions make of keys."""
    found = {}
    for folder in ("config", "run", "trl"):
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                literal = isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
                text = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if (literal or text) and len(names_in(node)) >= 5:
                    found.setdefault(path.stem, []).append(node.lineno)
    assert set(found) <= TABLE | FUNCTIONS, found
    assert all((ROOT / "config" / f"{name}.py").is_file() for name in TABLE | FUNCTIONS)


CHANGES = {
    "native": {"lora_target_modules": ["up_proj", "down_proj"], "seed": 7, "gradient_checkpointing": True},
    "fp16": {
        "fp16": True,
        "bf16": False,
        "torch_compile": False,
        "sample_packing": True,
        "virtual_shards": 4,
    },
    "trl": {"trainer": "trl", "neftune_noise_alpha": 3.0, "dataloader_num_workers": 2, "optimizer": "sgd"},
}
# Of the records as checkpoints of before the table have them: their bytes are the same, without later keys.
LATER = ("providers",)
IDENTITIES = {
    "native": "2d0edea6fe55b8ab2e9e406c9e265ed13ca0175c98da734b04137c2b5e2d6ecf",
    "fp16": "0b026b78fe7a19af834ae6f2eedcbc75c941cdb976f7043d604504092041357c",
    "trl": "5899929d1b743a9713c4addfad729e46eaa9d079d7fc99f447e4d244d7652dbb",
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_identity_of_a_run_is_that_of_earlier_checkpoints(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    keys = {
        "base_model": str(tmp_path),
        "adapter": "qlora",
        "lora_target_linear": True,
        "datasets": [{"path": str(tmp_path / "train.jsonl"), "type": "alpaca"}],
    }
    recipe = check_keys(keys | CHANGES[name]).recipe
    identity = trl_identity(recipe) if name == "trl" else run_identity(recipe, "0" * 64)
    assert {identity.pop(later) for later in LATER} == {None}
    assert hashlib.sha256(json.dumps(identity).encode()).hexdigest() == IDENTITIES[name]


def test_a_saved_recipe_keeps_no_key_of_one_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    keys = {
        "base_model": ".",
        "adapter": "qlora",
        "lora_target_linear": True,
        "datasets": [{"path": "train.jsonl", "type": "alpaca"}],
        "resume_from_checkpoint": "auto",
        "auto_resume_from_checkpoints": True,
        "another_base": True,
        "output_dir": "out",
        "tokenizer_config": "some/name",
    }
    kept = saved_keys(check_keys(keys).recipe)
    assert sorted(kept) == [
        "adapter",
        "base_model",
        "datasets",
        "lora_target_linear",
        "output_dir",
        "tokenizer_config",
    ]
    assert kept["base_model"] == str(tmp_path)
    assert kept["output_dir"] == str(tmp_path / "out")
    assert kept["tokenizer_config"] == "some/name"
