"""What a run cannot do is one line with key, value and limit: tokens, lengths, room on the disk."""

import errno
import re

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError

import monograph as mg
from monograph.__main__ import main
from monograph.recipe import check_keys
from monograph.recipe.data import full_disk
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.prepare import prepare
from monograph.recipe.run.checkpoint import write_folder
from monograph.recipe.run.load_model import load_model
from support.recipe_files import make_instruction_world, make_model, make_tokenizer, small_recipe, write_jsonl


@pytest.fixture
def world(tmp_path):
    return make_instruction_world(tmp_path)


def run(capsys, root, command, *arguments, **change):
    keys = small_recipe(root, "instruction", output_dir=str(root / "out"), step_mode="eager", max_steps=2)
    (root / "recipe.yml").write_text(yaml.safe_dump(keys | change))
    code = main([command, str(root / "recipe.yml"), *arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if "rror" in line or "recipe.yml:" in line]
    return code, lines


@pytest.mark.parametrize("trainer", ["monograph", "trl"])
def test_a_tokenizer_larger_than_the_embedding_is_named(world, capsys, trainer):
    make_model(world / "model", vocab_size=300)
    change = {"trainer": "trl", "step_mode": None} if trainer == "trl" else {}
    code, (line,) = run(capsys, world, "train", **change)
    assert code == 3
    assert f"base_model: the tokenizer of {world / 'model'} gives token " in line
    assert "and the embedding has 300 rows" in line


def test_a_prompt_of_such_tokens_is_named(world, capsys):
    make_model(world / "model", vocab_size=300)
    code, (line,) = run(capsys, world, "generate", "--base", "--prompt", "Below is an instruction")
    assert code == 3
    assert "and the embedding has 300 rows" in line


def test_a_tokenizer_with_tokens_that_no_document_has(world, capsys):
    """Rows are needed for what is trained on alone."""
    tokenizer = make_tokenizer(world / "model")
    tokenizer.add_tokens(["<never>"])
    tokenizer.save_pretrained(world / "model")
    code, lines = run(capsys, world, "train")
    assert (code, lines) == (0, [])


def test_a_new_token_for_padding_takes_a_spare_row(world, capsys):
    change = {"special_tokens": {"pad_token": "<new>"}, "sample_packing": False}
    code, (line,) = run(capsys, world, "train", **change)
    assert code == 3
    assert "special_tokens.pad_token: '<new>' is not a token of the model, which has no row to spare" in line
    make_model(world / "model", vocab_size=408)
    assert run(capsys, world, "train", **change) == (0, [])


def test_a_length_beyond_any_row_is_a_wrong_recipe(world, capsys):
    code, (line,) = run(capsys, world, "train", "--sequence-len", "100000000")
    assert code == 2
    assert line.endswith("sequence_len is 100000000, wanted 1 to 16777216")


def test_documents_that_are_all_too_long_say_how_long(world, tmp_path):
    rows = [{"instruction": "the dog " * count, "output": "fox"} for count in (80, 60, 70)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    recipe = check_keys(small_recipe(world, "instruction")).recipe
    tokenizer = load_tokenizer(recipe, recipe.base_model)
    whole = len(tokenizer("the dog " * 60 + "\n" + "fox")["input_ids"]) + 1
    with pytest.raises(ValueError, match="no document is left: 3 too long; the shortest has") as caught:
        prepare(recipe, tokenizer)
    assert f"{whole} tokens, sequence_len is 64: raise it" in str(caught.value)


FULL = {
    "Python": OSError(errno.ENOSPC, "No space left on device"),
    "Rust": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    "C++": RuntimeError(
        "[enforce fail at inline_container.cc] . PytorchStreamWriter: No space left on device"
    ),
}


@pytest.mark.parametrize("said", FULL)
def test_a_full_disk_leaves_nothing_and_is_one_line(world, capsys, monkeypatch, said):
    def save_file(*arguments, **options):
        raise FULL[said]

    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    code, (line,) = run(capsys, world, "train", save_steps=1)
    assert code == full_disk.EXIT_CODE == 5
    folder = world / "out" / "checkpoint-1"
    assert line == (
        f"error: {folder} was not written: No space left on device; make room, or choose another output_dir"
    )
    assert not [path.name for path in (world / "out").iterdir() if "checkpoint" in path.name]


def test_a_disk_that_does_not_take_the_prepared_rows_is_named(world, capsys, monkeypatch):
    def save_to_disk(dataset, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("datasets.Dataset.save_to_disk", save_to_disk)
    code, lines = run(capsys, world, "preprocess", dataset_prepared_path=str(world / "full"))
    assert code == full_disk.EXIT_CODE == 5
    (line,) = [line for line in lines if line.startswith("error: ")]
    wanted = r"/full/\w+ was not written: No space left on device; make room, or choose another "
    assert re.search(wanted + "dataset_prepared_path$", line), line
    assert not list((world / "full").iterdir())


def test_a_broken_file_that_is_read_is_not_said_to_be_written(tmp_path):
    broken = OSError(errno.EIO, "Input/output error", "/data/train.jsonl")
    with (
        pytest.raises(OSError, match="Input/output error") as told,
        full_disk.naming_file(str(tmp_path / "out")),
    ):
        raise broken
    assert told.value is broken


def test_whatever_fails_in_a_folder_leaves_nothing(tmp_path):
    def write(folder):
        (tmp_path / "seen").write_text(folder)
        raise KeyError("another thing")

    with pytest.raises(KeyError, match="another thing"):
        write_folder(str(tmp_path / "made"), write)
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


def test_packed_modules_to_save_are_named(world):
    model = mg.from_pretrained(world / "model", mg.MonographConfig("nf4"))
    for name, path in (("mlp", "model.layers.0.mlp"), ("q_proj", "model.layers.0.self_attn.q_proj")):
        with pytest.raises(ValueError, match=f"modules_to_save names {path}, whose weights are packed"):
            get_peft_model(model, LoraConfig(target_modules=["k_proj"], modules_to_save=[name]))
    recipe = check_keys(small_recipe(world, "instruction", lora_modules_to_save=["mlp"])).recipe
    with pytest.raises(
        ValueError, match=r"lora_modules_to_save names model.layers.0.mlp, whose weights are packed"
    ):
        load_model(recipe, recipe.base_model)
