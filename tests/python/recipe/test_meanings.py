"""Keys of axolotl that keys of ours have the meaning of, and values honoured as transformers has them."""

import json

import pytest

from monograph.recipe import ConfigError, check_keys
from monograph.recipe.data.documents import prompt_of
from monograph.recipe.data.new_tokens import add_tokens
from monograph.recipe.run.schedule import Epochs, checkpoint_steps, evaluation_steps, warmup_steps
from support.recipe_files import make_tokenizer, small_recipe


@pytest.fixture
def good(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return small_recipe(tmp_path, "alpaca")


def errors_of(keys):
    with pytest.raises(ConfigError) as caught:
        check_keys(keys)
    return caught.value.errors


CHECKPOINTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (CHECKPOINTED | {"activation_offloading": True}, {"gradient_checkpointing": "offload"}),
        (CHECKPOINTED | {"activation_offloading": "disk"}, {"gradient_checkpointing": "offload_disk"}),
        ({"model_config": {"output_router_logits": True}}, {"output_router_logits": True}),
        ({"fsdp_config": {"activation_checkpointing": True}}, {"gradient_checkpointing": True}),
        ({"fsdp_config": {"offload_params": True}}, {}),
        ({"fsdp": ["full_shard", "offload"]}, {}),
        ({"deepspeed": "deepspeed_configs/zero2.json"}, {"fsdp": None}),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"fsdp": "full_shard"}),
        ({"adapter": "lora", "peft": {"loftq_config": {"loftq_bits": 4}}}, {"adapter": "qlora"}),
        ({"trust_remote_code": True}, {}),
        ({"tokenizer_use_mistral_common": True}, {}),
        ({"model_quantization_config": "Mxfp4Config"}, {}),
        ({"unfrozen_parameters": ["^model.language_model.*", "^lm_head.*"]}, {}),
        ({"dsv4_fp4_grouped_mode": "nvfp4"}, {}),
        ({"attn_implementation": "kernels-community/vllm-flash-attn3"}, {}),
        ({"plugins": ["axolotl.integrations.swanlab.SwanLabPlugin"]}, {}),
    ],
)
def test_a_key_that_ours_mean_is_read_with_a_notice(good, written, meant):
    plain, read = check_keys(good), check_keys(good | written)
    assert {name: getattr(read.recipe, name) for name in meant} == meant
    said = [notice for notice in read.notices if notice not in plain.notices]
    names = [name for name in written if name not in CHECKPOINTED and name != "adapter"]
    assert all(any(notice.startswith(name) for notice in said) for name in names), said


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            {"activation_offloading": True},
            "activation_offloading: gradient_checkpointing is missing, wanted true",
        ),
        ({"activation_offloading": "cpu"}, "activation_offloading is 'cpu', wanted true, legacy"),
        ({"model_config": {"rope_theta": 1}}, "model_config.rope_theta: not supported; edit config.json"),
        ({"model_quantization_config": "GPTQConfig"}, "model_quantization_config: not supported"),
        (
            {"unfrozen_parameters": ["^lm_head"]},
            "unfrozen_parameters: not supported; write lora_modules_to_save",
        ),
        ({"deepspeed": "my.json"}, "deepspeed: the stage of ZeRO is not known of 'my.json'"),
        ({"layer_offloading": True}, "layer_offloading: not supported; write base_memory: 3GiB"),
        ({"load_in_8bit": True}, "adapter is qlora and load_in_8bit true; write adapter: lora"),
    ],
)
def test_what_is_not_here_is_refused_with_an_alternative(good, written, said):
    (found,) = errors_of(good | written)
    assert found.startswith(said)


def test_remote_code_of_an_unknown_model_is_refused(good, tmp_path):
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "its_own"}))
    (found,) = errors_of(good | {"trust_remote_code": True})
    assert "has model_type 'its_own', which transformers does not know" in found


def test_keys_that_ask_for_nothing_say_nothing(good):
    asked = dict.fromkeys(("activation_offloading", "trust_remote_code", "deepspeed", "model_config"), None)
    assert check_keys(good | asked | {"trust_remote_code": False}).notices == check_keys(good).notices


def test_the_home_folder_is_found(good, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = check_keys(good | {"base_model": "~/model", "output_dir": "~/out"}).recipe
    assert (recipe.base_model, recipe.output_dir) == (str(tmp_path / "model"), str(tmp_path / "out"))


def test_a_share_of_the_steps_as_warm_up(good):
    recipe = check_keys(good | {"warmup_steps": 0.1}).recipe
    assert warmup_steps(recipe, 95) == 10
    assert warmup_steps(check_keys(good | {"warmup_steps": 7}).recipe, 95) == 7
    assert warmup_steps(check_keys(good | {"warmup_steps": 0}).recipe, 95) == 0
    assert errors_of(good | {"warmup_steps": 2.5}) == [
        "warmup_steps is 2.5, wanted a number of steps, or a share below 1"
    ]


@pytest.mark.parametrize("written", [{"betas": [0.8, 0.95], "eps": 1e-10}, "betas=(0.8,0.95), eps=1e-10"])
def test_arguments_of_the_optimizer_are_its_numbers(good, written):
    recipe = check_keys(good | {"optim_args": written}).recipe
    assert (recipe.adam_beta1, recipe.adam_beta2, recipe.adam_epsilon) == (0.8, 0.95, 1e-10)
    for wrong, said in (
        (
            {"optim_args": "amsgrad=True"},
            "optim_args.amsgrad: the AdamW of the graph has betas and eps alone",
        ),
        ({"optim_args": {"betas": [0.9]}}, "optim_args.betas is [0.9], wanted 2 numbers"),
        ({"optim_args": {"eps": 1.0}, "adam_epsilon": 1.0}, "adam_epsilon and optim_args.eps say the same"),
        ({"optim_args": "fast"}, "optim_args is 'fast', wanted a mapping"),
    ):
        (found,) = errors_of(good | wrong)
        assert found.startswith(said)


def test_when_a_run_saves_and_evaluates(good):
    epochs, held = Epochs([10, 10]), {"val_set_size": 0.1}
    steps = {
        "no": set(),
        False: set(),  # as YAML reads `no`
        "epoch": {10, 20},
        "best": set(),
        None: {10, 20},
    }
    for strategy, wanted in steps.items():
        recipe = check_keys(good | held | {"save_strategy": strategy}).recipe
        assert checkpoint_steps(recipe, epochs) == wanted
    assert checkpoint_steps(
        check_keys(good | {"save_strategy": "steps", "save_steps": 8}).recipe, epochs
    ) == {8, 16}
    for strategy, wanted in {"no": set(), "epoch": {10, 20}, None: set()}.items():
        recipe = check_keys(good | held | {"evaluation_strategy": strategy}).recipe
        assert evaluation_steps(recipe, epochs) == wanted
    for wrong, said in (
        ({"save_strategy": "no", "save_steps": 5}, "save_strategy is no and save_steps 5; leave one"),
        ({"save_strategy": "steps"}, "save_strategy is steps, and save_steps is missing"),
        ({"save_strategy": "best"}, "save_strategy is best: nothing is evaluated"),
        ({"eval_strategy": "epoch"}, "eval_strategy is epoch: nothing is evaluated"),
        (held | {"save_strategy": "no", "load_best_model_at_end": True}, "save_strategy is no and load_best"),
    ):
        (found,) = errors_of(good | wrong)
        assert found.startswith(said)


def test_a_mode_of_cuda_graphs_is_noticed_as_the_option_is(good):
    keys = good | {"torch_compile": True, "torch_compile_mode": "max-autotune"}
    said = "torch_compile_mode: max-autotune: triton.cudagraphs with sample_packing"
    assert [notice for notice in check_keys(keys).notices if notice.startswith(said)]
    plain = check_keys(keys | {"sample_packing": False}).notices
    assert not [notice for notice in plain if notice.startswith(said)]


def test_a_row_of_too_many_tokens_is_named(good):
    assert errors_of(good | {"sequence_len": 100_000_000}) == [
        "sequence_len is 100000000, wanted 1 to 16777216"
    ]


def test_a_new_token_for_padding_needs_no_training(good, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "model")
    recipe = check_keys(good | {"special_tokens": {"pad_token": "<new>"}}).recipe
    assert add_tokens(recipe, tokenizer) == [tokenizer.pad_token_id]
    both = check_keys(good | {"special_tokens": {"pad_token": "<new>", "unk_token": "<other>"}}).recipe
    with pytest.raises(ValueError, match=r"special_tokens.unk_token: '<other>' is not a token of the model"):
        add_tokens(both, make_tokenizer(tmp_path / "model"))


def test_alpaca_in_the_turns_of_a_chat(good):
    asked = prompt_of("alpaca:chat").prompt("why?")
    assert asked.startswith("SYSTEM: Below is an instruction")
    assert asked.endswith("request.\nUSER: why?\nASSISTANT:")
    assert "paired with an input" in prompt_of("alpaca:chatml").prompt("why?", "x")
    assert prompt_of("alpaca:phi").prompt("why?").endswith("<|user|>\nwhy?<|end|>\n<|assistant|>\n")
    check_keys(good | {"datasets": [{"path": "a.jsonl", "type": "alpaca:phi"}]})
