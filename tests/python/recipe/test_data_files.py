"""Which rows a dataset gives: path, data_files, ds_type and split, as the `datasets` library has them."""

import datasets
import pytest
import yaml

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.config.data_files import files_taken, load_rows
from monograph.recipe.config.keys import DatasetKeys
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.prepare import prepare
from monograph.recipe.run.saved_recipe import write_recipe
from support.recipe_files import make_tokenizer, small_recipe, write_jsonl


def rows(count, word="a"):
    return [{"instruction": f"q {word} {n}", "output": f"{word} {n}"} for n in range(count)]


@pytest.fixture
def folder(tmp_path):
    """A folder of two splits beside a file of other rows."""
    inside = tmp_path / "folder"
    inside.mkdir()
    write_jsonl(inside / "train.jsonl", rows(40))
    write_jsonl(inside / "test.jsonl", rows(5, "b"))
    write_jsonl(tmp_path / "other.jsonl", rows(7, "c"))
    return inside


def outputs(**keys):
    return [row["output"] for row in load_rows(DatasetKeys(type="alpaca", **keys), "datasets.0")]


def refusals(tmp_path, entry):
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    keys = small_recipe(tmp_path, "alpaca", datasets=[{"type": "alpaca", **entry}])
    with pytest.raises(ConfigError) as caught:
        check_keys(keys)
    return caught.value.errors


@pytest.mark.parametrize("files", ["FOLDER/test.jsonl", ["FOLDER/test.jsonl"], "FOLDER/te*.jsonl"])
def test_a_format_as_path_reads_data_files(folder, files, monkeypatch):
    monkeypatch.chdir(folder.parent)  # where other rows lie
    put = [name.replace("FOLDER", str(folder)) for name in ([files] if isinstance(files, str) else files)]
    named = put[0] if isinstance(files, str) else put
    assert outputs(path="json", data_files=named) == [f"b {n}" for n in range(5)]
    assert files_taken(DatasetKeys(path="json", data_files="folder/test.jsonl")) == ["folder/test.jsonl"]


def test_other_formats_are_read_too(tmp_path):
    (tmp_path / "rows.csv").write_text("instruction,output\nq,from csv\n")
    (tmp_path / "rows.txt").write_text("one\ntwo\n")
    assert outputs(path="csv", data_files=str(tmp_path / "rows.csv")) == ["from csv"]
    assert outputs(path=str(tmp_path / "rows.csv")) == ["from csv"]
    lines = load_rows(DatasetKeys(path="text", data_files=str(tmp_path / "rows.txt")), "datasets.0")
    assert lines["text"][:] == ["one", "two"]
    (tmp_path / "rows.data").write_text("instruction,output\nq,by ds_type\n")
    assert outputs(path=str(tmp_path / "rows.data"), ds_type="csv") == ["by ds_type"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"path": "json"}, "path is json, which names a format, and data_files is missing"),
        (
            {"path": "json", "data_files": "a", "ds_type": "csv"},
            "path is json and ds_type csv; leave one out",
        ),
        ({"path": "FOLDER", "ds_type": "xml"}, "ds_type is 'xml', wanted one of json, parquet, csv"),
        ({"path": "FOLDER/train.jsonl", "data_files": "test.jsonl"}, "path is the file FOLDER/train.jsonl"),
        ({"path": "FOLDER", "name": "main"}, "name is for datasets on the Hub"),
        ({"path": "FOLDER", "revision": "main"}, "revision is for datasets on the Hub"),
        ({"path": "FOLDER", "split": "train[:10%"}, "split is 'train[:10%', wanted a name, train[:10%]"),
        ({"path": "org/name", "ds_type": "json"}, "a dataset on the Hub says itself what its files are"),
    ],
)
def test_keys_that_contradict_are_refused(folder, entry, said):
    put = {name: value.replace("FOLDER", str(folder)) for name, value in entry.items()}
    errors = refusals(folder.parent, put)
    assert [error for error in errors if said.replace("FOLDER", str(folder)) in error], errors


def test_a_dataset_of_the_hub_is_asked_for_these_files(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **keys: asked.append((args, keys)))
    load_rows(DatasetKeys(path="org/name", data_files="a.jsonl", split="test", revision="v1"), "datasets.0")
    load_rows(DatasetKeys(path="org/name", data_files=["a.x"], ds_type="json", revision="v1"), "datasets.0")
    hub = {"path": "org/name", "name": None, "data_files": ["a.jsonl"], "revision": "v1"}
    assert asked[0] == ((), hub | {"split": "test", "streaming": False})
    assert asked[1][1]["path"] == "json"
    assert asked[1][1]["data_files"] == {"train": ["hf://datasets/org/name@v1/a.x"]}


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        (None, [f"a {n}" for n in range(40)]),
        ("train[:10%]", [f"a {n}" for n in range(4)]),
        ("train[35:]", [f"a {n}" for n in range(35, 40)]),
        ("test", [f"b {n}" for n in range(5)]),
        ("test[:1]+train[:1]", ["b 0", "a 0"]),
    ],
)
def test_splits_and_slices_of_a_folder(folder, split, wanted):
    assert outputs(path=str(folder), split=split) == wanted


def test_a_single_file_is_train(folder):
    path = str(folder / "test.jsonl")
    assert outputs(path=path, split="train[:2]") == ["b 0", "b 1"]
    with pytest.raises(
        ValueError, match=r"datasets.0.split is validation, .* has no validation; there is train"
    ):
        outputs(path=path, split="validation")


def test_a_split_that_is_not_there_is_named_with_those_that_are(folder):
    with pytest.raises(ValueError, match="has no validation; there is train and test"):
        outputs(path=str(folder), split="validation")
    (folder / "train.jsonl").unlink()
    with pytest.raises(ValueError, match=r"split is train, .* has no train; there is test"):
        outputs(path=str(folder))


def test_files_of_two_formats_in_a_folder_are_refused(folder):
    datasets.Dataset.from_list(rows(2)).to_parquet(folder / "train.parquet")
    with pytest.raises(ValueError, match="holds json and parquet files; write data_files"):
        outputs(path=str(folder))


def test_training_and_evaluation_rows_of_one_folder(folder):
    """A folder of train.jsonl and test.jsonl gave the same 45 documents to both."""
    root = folder.parent
    make_tokenizer(root / "model")
    (root / "model" / "config.json").write_text("{}")
    train = {"path": str(folder), "type": "alpaca"}
    keys = small_recipe(root, "alpaca", datasets=[train], test_datasets=[train | {"split": "test"}])
    recipe = check_keys(keys | {"sequence_len": 256}).recipe
    prepared = prepare(recipe, load_tokenizer(recipe, str(root / "model")))
    assert (len(prepared.train), len(prepared.eval)) == (40, 5)


def test_a_remembered_recipe_finds_its_data_files(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "config.json").write_text("{}")
    entry = {"path": "json", "data_files": "test.jsonl", "type": "alpaca"}
    keys = small_recipe(folder.parent, "alpaca", base_model=".", datasets=[entry])
    write_recipe(check_keys(keys).recipe, str(folder))
    kept = yaml.safe_load((folder / "recipe.yml").read_text())["datasets"]
    assert kept == [{"path": "json", "type": "alpaca", "data_files": [str(folder / "test.jsonl")]}]
