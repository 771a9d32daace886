"""Where an adapter of a recipe starts: mistakes are named when the file is read, and what is taken trains."""

import json

import pytest
import torch
from peft import LoftQConfig, LoraConfig

import monograph as mg
from monograph.__main__ import main
from monograph.recipe import ConfigError, check_keys
from monograph.recipe.run.checkpoint import checkpoints
from monograph.recipe.run.load_model import load_model
from monograph.recipe.train import train
from support.recipe_files import make_instruction_world, small_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_instruction_world(tmp_path_factory.mktemp("world"))


def loftq(**values):
    return {"peft": {"loftq_config": {"loftq_bits": 4} | values}}


KEY = "peft_init_lora_weights"
WRONG = {
    "eva": (
        {KEY: "eva"},
        "peft_init_lora_weights: eva is not supported; EVA needs batches of data; in Python: ",
    ),
    "corda": ({KEY: "corda"}, "peft_init_lora_weights: corda is not supported; "),
    "lora_ga": ({KEY: "lora_ga", "adapter": "lora"}, "peft_init_lora_weights: lora_ga is not supported; "),
    "olora": ({KEY: "OLoRA"}, "peft_init_lora_weights: olora subtracts its part from the base"),
    "unknown": ({KEY: "piza"}, "peft_init_lora_weights is 'piza', wanted true, false, gaussian, "),
    "no number": ({KEY: "pissa_niter_x"}, "peft_init_lora_weights is 'pissa_niter_x', wanted "),
    "odd": (
        {KEY: "orthogonal", "lora_rank_pattern": {"q_proj": 3}},
        "which wants even ranks; found lora_rank_pattern.q_proj 3",
    ),
    "merged": (
        {KEY: "pissa", "merge_lora": True},
        "is pissa, and merge_lora is true: `monograph merge` refuses",
    ),
    "mica merged": ({KEY: "mica", "merge_lora": True}, "is mica, and merge_lora is true"),
    "loftq merged": (
        loftq(loftq_iter=2) | {"merge_lora": True},
        "is loftq with loftq_iter 2, and merge_lora",
    ),
    "loftq on 16 bits": (
        {KEY: "loftq", "adapter": "lora"},
        "wants adapter: qlora and a base in 16 bits; adapter is",
    ),
    "8 bits": (loftq(loftq_bits=8), "peft.loftq_config.loftq_bits is 8, wanted 4"),
    "0 times": (loftq(loftq_iter=0), "peft.loftq_config.loftq_iter is 0, wanted 1 or more"),
    "misspelt": (
        loftq(loftq_iters=1),
        "peft.loftq_config.loftq_iters: unknown; wanted loftq_bits or loftq_iter",
    ),
    "other": ({"peft": {"eva_config": {"rho": 1}}}, "peft.eva_config: not supported; wanted loftq_config"),
    "both": (loftq() | {KEY: "pissa"}, "is 'pissa' and peft.loftq_config is written; leave one out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_start_is_named_when_the_file_is_read(name, root):
    change, part = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        check_keys(small_recipe(root, "instruction", **change))
    (message,) = caught.value.errors
    assert part in message


def test_a_wrong_start_is_exit_code_2_for_every_command(root, capsys):
    path = root / "eva.yml"
    path.write_text(json.dumps(small_recipe(root, "instruction", **{KEY: "eva"})))
    for command in ("train", "preprocess", "doctor"):
        assert main([command, str(path)]) == 2
        assert "initialize_lora_eva_weights" in capsys.readouterr().err


def test_packed_folders_and_given_adapters_are_looked_at(root, tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    (tmp_path / "adapter_config.json").write_text('{"init_lora_weights": "monograph_residual"}')
    packed = {"base_model": str(tmp_path)}
    for change, part in (
        (packed | {KEY: "olora", "adapter": "lora"}, "olora subtracts its part"),
        (packed | loftq(), "base_model is quantised already"),
        (
            {"lora_model_dir": str(tmp_path), "merge_lora": True},
            "its init_lora_weights is monograph_residual",
        ),
    ):
        with pytest.raises(ConfigError, match=part):
            check_keys(small_recipe(root, "instruction", **change))


@pytest.mark.parametrize("start", [False, "Gaussian", "orthogonal", "mica", "pissa_niter_4", "loftq"])
def test_what_is_taken_loads(root, start):
    recipe = check_keys(small_recipe(root, "instruction", **{KEY: start})).recipe
    model = load_model(recipe, str(root / "model"))
    assert sum(parameter.requires_grad for parameter in model.parameters()) >= 14


def test_loftq_is_that_of_python_and_resumes_with_the_same_bits(root, tmp_path):
    change = loftq(loftq_iter=2) | {"torch_compile": False, "max_steps": 4, "save_steps": 2}
    recipe = check_keys(small_recipe(root, "instruction", **change, output_dir=str(tmp_path / "out"))).recipe
    started = load_model(recipe, str(root / "model"))
    base = mg.from_pretrained(root / "model", mg.MonographConfig("nf4", double_quant=True))
    config = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules="all-linear",
        init_lora_weights="loftq",
        loftq_config=LoftQConfig(loftq_bits=4, loftq_iter=2),
        task_type="CAUSAL_LM",
    )
    wanted = dict(mg.add_lora(base, config).named_parameters())
    for name, parameter in started.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter.float(), wanted[name].float()), name
    train(recipe)
    whole = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    recipe.resume_from_checkpoint = checkpoints(recipe.output_dir)[2]
    train(recipe)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == whole
