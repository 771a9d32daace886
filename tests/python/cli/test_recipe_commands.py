"""`python -m monograph`: commands, messages and exit codes."""

import json

import pyarrow.parquet
import pytest
import torch

from monograph.__main__ import main
from monograph.distributed import World
from monograph.recipe import read_config
from monograph.recipe.run import example
from monograph.recipe.run.ranks import check_ranks
from monograph.training import TrainStep
from support.recipe_files import make_model, make_tokenizer, write_jsonl
from support.tiny_models import tiny_llama


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
    assert (
        "unknown command 'trian'; did you mean 'train'? expected one of example, preprocess, train"
        in capsys.readouterr().err
    )


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
        (
            ["preprocess", "--dataset-prepared-path", "TMP/file"],
            "dataset_prepared_path: TMP/file is a file, wanted a folder",
        ),
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


DATA = {
    "empty.jsonl": (b"", "has no rows: it is empty"),
    "blank.jsonl": (b"\n \n\n", "has no rows: all lines are blank; wanted one JSON object per line"),
    "cut.jsonl": (
        b'{"text": "a"}\n\n{"text": "b',
        " line 3: Unterminated string starting at (column 10); wanted",
    ),
    "numbers.jsonl": (b"1\n2\n", " line 1 is 1; wanted one JSON object per line"),
    "bytes.jsonl": (b'{"text": "\xff"}', " is not UTF-8 text (invalid start byte at byte 10)"),
    "list.json": (b"[]", "has no rows: the list is empty; wanted a list of JSON objects"),
    "cut.json": (b'[\n{"text": "a"},\n', " line 3: Expecting value; wanted a list of JSON objects"),
    "empty.parquet": (None, "has no rows"),
    "cut.parquet": (b"PAR1 and no more", " is no Parquet file: "),
}


@pytest.mark.parametrize("name", DATA)
def test_bad_data_are_one_line_with_the_file(recipe, tmp_path, capsys, name):
    content, part = DATA[name]
    path = tmp_path / name
    if content is None:
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    else:
        path.write_bytes(content)
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "a"}])
    data = json.dumps([{"path": good, "type": "completion"}, {"path": str(path), "type": "completion"}])
    assert main(["preprocess", recipe, "--datasets", data]) == 3
    line = one_line(capsys)
    assert line.startswith(f"error: datasets.1: {path}")
    assert part in line


def test_an_example_is_not_written_over_something_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "pretrain", lambda folder, tokenizer, say: None)
    assert main(["example", str(tmp_path)]) == 0
    assert main(["example", str(tmp_path)]) == 0  # its own files, as they were
    for name in ("recipe.yml", "questions.jsonl"):
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(whole + "\n")
        capsys.readouterr()
        assert main(["example", str(tmp_path)]) == 3
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / name} is there and was changed; ")
        assert (tmp_path / name).read_text() == whole + "\n"
        (tmp_path / name).write_text(whole)
    for name in ("recipe.yml", "questions.jsonl", "held_back.jsonl"):
        (tmp_path / name).unlink()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(["example", str(tmp_path)]) == 3
    assert "has a model that is not the example's" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("--temperature", "-1", "wanted 0 or more"),
        ("--temperature", "nan", "wanted 0 or more"),
        ("--top-p", "2", "wanted more than 0, at most 1"),
        ("--top-p", "0", "wanted more than 0, at most 1"),
        ("--top-k", "-5", "wanted 0 or more"),
        ("--repetition-penalty", "0", "wanted more than 0"),
        ("--max-new-tokens", "0", "wanted 1 or more"),
        ("--top-p", "much", "wanted more than 0, at most 1"),
    ],
)
def test_sampling_out_of_range_is_a_wrong_command_line(recipe, capsys, option, value, wanted):
    with pytest.raises(SystemExit) as caught:
        main(["generate", recipe, "--base", option, value])
    assert caught.value.code == 2
    assert f"argument {option}: is {value}, {wanted}" in capsys.readouterr().err


def test_a_step_without_batches_is_named():
    with pytest.raises(ValueError, match="a step of 0 micro-batches, wanted 1 to 4096"):
        TrainStep(tiny_llama(), mode="eager")([], 1e-3)


def test_a_step_of_what_is_no_language_model_is_refused():
    with pytest.raises(ValueError, match="TrainStep: Linear has no head over a body, wanted a causal LM"):
        TrainStep(torch.nn.Linear(2, 2), mode="eager")


def test_an_example_in_the_place_of_a_file_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["example", str(tmp_path / "file")]) == 3
    assert capsys.readouterr().err == f"error: {tmp_path / 'file'}: Not a directory\n"


def test_a_wrong_recipe_is_2_and_wrong_data_3(recipe, capsys):
    assert main(["preprocess", recipe, "--lora-rank", "4"]) == 2
    assert "lora_rank: unknown key; here it is called lora_r" in capsys.readouterr().err
    assert main(["preprocess", recipe, "--datasets.0.type", "completion"]) == 3
    assert "row 0: column 'text' is missing" in capsys.readouterr().err


def test_commands_of_one_process_say_so_under_a_launcher(recipe, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, told in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main(["generate", recipe]) == 2
        said = (
            "python -m monograph generate runs in one process, and WORLD_SIZE is 2; start it without torchrun"
        )
        assert capsys.readouterr().err.count(said) == told
    assert main(["merge", recipe]) == 2
    assert "python -m monograph merge runs in one process, and WORLD_SIZE is 2" in capsys.readouterr().err
    assert main(["preprocess", recipe]) == 0  # rank 0 does it, this is rank 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-restarts", "2"], "--max-restarts is torchrun's and wants --nproc-per-node N"),
        (["--nproc-per-node", "0"], "--nproc-per-node is 0, wanted a number of processes"),
        (["--nproc_per_node", "2", "--max-restarts=-1"], "--max-restarts is -1, wanted 0 or more"),
    ],
)
def test_what_is_wrong_with_the_launch_is_said(recipe, options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", recipe, *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_wrong_recipe_starts_no_process(recipe, capsys):
    assert main(["train", recipe, "--nproc-per-node", "2", "--lora-r", "0"]) == 2
    assert "lora_r is 0, wanted 1 or more" in capsys.readouterr().err


def test_a_whole_step_has_one_forward_pass_of_each_rank(recipe):
    keys = ["--step-mode", "whole_step", "--gradient-accumulation-steps", "3"]
    read = read_config(recipe, keys).recipe
    check_ranks(read, World(0, 3))
    wanted = "step_mode is whole_step, which holds one forward pass of each rank, and .* is 3, on 2 ranks"
    with pytest.raises(ValueError, match=wanted):
        check_ranks(read, World(0, 2))
