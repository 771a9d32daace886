"""The key `providers`: who computes an operator, in a run of either engine, and what is refused."""

import pytest

from monograph.ops import providers
from monograph.recipe import check_keys
from monograph.recipe.train import train
from support.recipe_files import errors_of, make_instruction_world, small_recipe


@pytest.mark.parametrize(
    ("asked", "device", "said"),
    [
        ({"rms": "portable"}, "cpu", "'rms' is no operator that others can compute"),
        ({"rms_norm": "torch"}, "cpu", "rms_norm by 'torch' is unknown, wanted one of monograph, portable"),
        (
            {"varlen_attention": "torch"},
            "cpu",
            "varlen_attention by torch on cpu, wanted one of monograph, portable",
        ),
    ],
)
def test_what_cannot_be_is_named(good, asked, device, said):
    (message,) = errors_of(good | {"providers": asked, "device": device})
    assert message.startswith(f"providers: {said}")


def test_a_library_that_is_not_there_is_named(good, monkeypatch):
    monkeypatch.setattr(providers, "why_missing", lambda name, asked=False: f"{name} is away")
    asked = {"varlen_attention": "flash-attn"}
    messages = errors_of(good | {"providers": asked, "device": "cuda"})
    assert "providers: varlen_attention by flash-attn: flash-attn is away" in messages


def test_rows_of_the_table_may_be_asked_for(good):
    asked = {"varlen_attention": "portable", "linear": "monograph"}
    assert check_keys(good | {"providers": asked}).recipe.providers == asked


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{}, {"trainer": "trl", "step_mode": None, "sample_packing": False}])
def test_a_run_computes_by_them_and_a_resumed_one_compares(tmp_path, monkeypatch, engine):
    root = make_instruction_world(tmp_path)
    called, real = set(), providers.call_portable

    def portable(operator, *arguments):
        called.add(operator._schema.name.removeprefix("monograph::"))
        return real(operator, *arguments)

    monkeypatch.setattr(providers, "call_portable", portable)
    keys = small_recipe(root, "instruction", output_dir=str(tmp_path / "out"), step_mode="eager")
    keys |= {"max_steps": 1, "save_steps": 1, "providers": {"linear_cross_entropy": "portable"}} | engine
    if engine:
        keys["providers"] = {"linear": "portable"}
    train(check_keys(keys).recipe, quiet=True)
    assert called == set(keys["providers"])
    assert providers._asked == {}
    other = keys | {"providers": None, "max_steps": 2, "resume_from_checkpoint": "auto"}
    with pytest.raises(ValueError, match="resume_from_checkpoint: providers is None, the run of"):
        train(check_keys(other).recipe, quiet=True)
