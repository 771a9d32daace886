"""`streaming: true` under TRL: the losses of prepared rows in their order, and of a run that was resumed."""

import os

import pytest

from monograph.recipe import ConfigError, check_keys
from support.trl_recipes import ANSWERS, PROMPTS, columns, run_recipe, trl_keys, write_rows
from support.trl_runs import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"), layers=1)


def stream_keys(folder, root, **change):
    """The last answer has no target left, being too long."""
    answers = [*ANSWERS[:-1], "w1 " * 20]
    path = write_rows(root / "sft.jsonl", instruction=PROMPTS, output=answers)
    kind = {"no_input_format": "{instruction} "}
    return trl_keys(folder, root, path, kind, trainer="trl", max_steps=5) | change


def test_a_stream_has_the_losses_of_prepared_rows_and_is_resumed_with_the_same_bits(folder, tmp_path):
    """Five steps of four rows pass the end of fifteen rows."""
    prepared = run_recipe(stream_keys(folder, tmp_path, shuffle_merged_datasets=False, max_steps=3))
    (tmp_path / "stream").mkdir()
    saved = {"save_strategy": None, "save_steps": 2, "dataset_prepared_path": str(tmp_path / "none")}
    keys = stream_keys(folder, tmp_path / "stream", streaming=True, **saved)
    whole = run_recipe(keys)
    assert columns(whole[:3], "loss", "grad_norm") == columns(prepared, "loss", "grad_norm")
    assert not os.path.exists(tmp_path / "none")
    checkpoint = str(tmp_path / "stream" / "out" / "checkpoint-2")
    again = run_recipe(keys | {"resume_from_checkpoint": checkpoint})
    assert len(again) == 5
    assert columns(again, "loss", "grad_norm") == columns(whole, "loss", "grad_norm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": None}, "streaming: the length of a stream is not known; write max_steps"),
        (
            {"val_set_size": 0.1},
            "streaming and val_set_size: nothing can be held back of a stream; write test",
        ),
        ({"sample_packing": True}, "streaming and sample_packing, which looks at all rows; leave one out"),
        (
            {"pretraining_dataset": ["a"]},
            "pretraining_dataset: not supported; write datasets with type: comp",
        ),
        ({"trainer": "monograph"}, "streaming: not supported; leave it out: prepared data is memory-mapped"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, message, folder, tmp_path):
    keys = stream_keys(folder, tmp_path, streaming=True, save_strategy=None) | change
    with pytest.raises(ConfigError) as caught:
        check_keys(keys)
    assert caught.value.errors[0].startswith(message)
