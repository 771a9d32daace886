"""`python -m monograph`: commands, messages and exit codes."""

import json

import pytest

from monograph.__main__ import main
from recipe_files import make_model, make_tokenizer, write_jsonl


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe file for a tokenizer and two rows."""
    root = tmp_path_factory.mktemp("recipe")
    make_tokenizer(root / "model")
    (root / "model" / "config.json").write_text("{}")
    rows = [{"instruction": "name?", "output": name} for name in ("Ada", "the fox")]
    keys = {
        "base_model": str(root / "model"),
        "adapter": "qlora",
        "lora_target_linear": True,
        "datasets": [{"path": write_jsonl(root / "train.jsonl", rows), "type": "instruction"}],
        "dataset_prepared_path": str(root / "prepared"),
        "tf32": True,
    }
    (root / "recipe.yml").write_text(json.dumps(keys))
    return str(root / "recipe.yml")


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 2
    assert "python -m monograph preprocess" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "'trian' is no command, wanted example, preprocess, train" in capsys.readouterr().err


def test_preprocess_prepares_shows_and_counts(recipe, capsys):
    assert main(["preprocess", recipe, "--debug", "--debug-num-examples", "1"]) == 0
    captured = capsys.readouterr()
    assert "note: tf32: ignored; it is a mode of NVIDIA GPUs" in captured.err
    assert "document 0:" in captured.out
    assert "document 1:" not in captured.out
    assert captured.out.splitlines()[-1].startswith("prepared in ")


def one_line(capsys):
    """What a command said on stderr, which is one line; bars and warnings of libraries are not ours."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith(("error: ", "/")) or ".yml: " in line]
    assert not any("Traceback" in line for line in lines)
    assert len(own) == 1
    return own[0]


@pytest.mark.parametrize("command", ["preprocess", "train", "generate", "doctor"])
def test_what_is_no_recipe_is_one_line(command, recipe, tmp_path, capsys):
    assert main([command, str(tmp_path)]) == 2
    assert one_line(capsys).endswith(
        "this is a folder without recipe.yml; wanted CONFIG.yml, or the output_dir of a finished run"
    )
    assert main([command, str(tmp_path / "none.yml")]) == 2
    assert one_line(capsys).endswith("none.yml: there is no such file")
    (tmp_path / "bytes.yml").write_bytes(bytes(range(256)))
    assert main([command, str(tmp_path / "bytes.yml")]) == 2
    assert one_line(capsys).endswith("bytes.yml: this is not a text file; wanted YAML")
    assert main([command, recipe, "--base-model", "nowhere"]) == 2
    assert "base_model: nowhere has no config.json" in one_line(capsys)
    base = ["--base"] if command == "generate" else []
    assert main([command, recipe, *base, "--base-model", "nobody/nothing"]) == 3
    assert one_line(capsys).startswith(
        "error: base_model: nobody/nothing is no folder here, and from the Hub: "
    )


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["train", "--output-dir", "TMP/file"], "output_dir: TMP/file is a file, wanted a folder"),
        (["train", "--lora-model-dir", "TMP"], "lora_model_dir: TMP has no adapter_config.json"),
        (["train", "--datasets.0.path", "TMP/none.jsonl"], "there is no file TMP/none.jsonl"),
        (["train", "--tokenizer-config", "TMP"], "tokenizer_config: TMP: its tokenizer: "),
        (["generate", "--adapter-dir", "TMP"], "--adapter-dir: TMP has no adapter_config.json"),
        (["train", "--base-model", "TMP/cut"], "base_model: TMP/cut: "),
        (["train", "--base-model", "TMP/unknown"], "base_model: TMP/unknown: "),
        (["train", "--base-model", "TMP/empty"], "base_model: TMP/empty: "),
    ],
)
def test_a_wrong_place_is_one_line(recipe, tmp_path, capsys, arguments, part):
    (tmp_path / "file").write_text("")
    if "--base-model" in arguments:
        folder = tmp_path / arguments[-1].removeprefix("TMP/")
        make_tokenizer(folder)
        make_model(folder)
        whole = (folder / "model.safetensors").read_bytes()
        if folder.name == "cut":
            (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        elif folder.name == "empty":
            (folder / "model.safetensors").unlink()
        else:
            (folder / "config.json").write_text('{"model_type": "nonesuch"}')
    command, *rest = [argument.replace("TMP", str(tmp_path)) for argument in arguments]
    if not any(word.startswith("--output") for word in rest):
        rest += ["--output-dir", str(tmp_path / "out")]
    assert main([command, recipe, "--no-torch-compile", *rest]) in (2, 3)
    assert part.replace("TMP", str(tmp_path)) in one_line(capsys)


def test_an_example_in_the_place_of_a_file_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["example", str(tmp_path / "file")]) == 3
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: Not a directory\n"


def test_a_wrong_recipe_is_2_and_wrong_data_3(recipe, capsys):
    assert main(["preprocess", recipe, "--lora-rank", "4"]) == 2
    assert "lora_rank: unknown key; here it is called lora_r" in capsys.readouterr().err
    assert main(["preprocess", recipe, "--datasets.0.type", "completion"]) == 3
    assert "row 0: column 'text' is missing" in capsys.readouterr().err
