"""The recipe's keys: honoured, ignored with a reason, or refused with what to write instead."""

import json
import os
import re
import subprocess
import sys

import pytest

from monograph.recipe import ConfigError, check_keys, read_config
from monograph.recipe.config.dataset_keys import DATASET_REFUSED
from monograph.recipe.config.key_support import IGNORED, REFUSED
from monograph.recipe.config.keys import DATASET_KEYS, KEYS, TRL_KEYS
from monograph.recipe.config.other_keys import MEANINGS, OTHER_NAMES, SYNONYMS
from support.axolotl_keys import DATASET_KEYS_OF_EXAMPLES, KEYS_OF_EXAMPLES
from support.recipe_files import errors_of

NO_ADAPTER = (
    "adapter: missing; only adapters are trained, the base stays frozen: write adapter: qlora; or trainer: "
    "trl, which trains the weights of a 16-bit base"
)
# The keys that occur in axolotl 0.19's files named *qlora*, as plain facts. One of them is misspelt there.
_axolotl_qlora_keys = """
activation_offloading adam_beta2 adam_epsilon adapter attn_implementation auto_resume_from_checkpoints
base_model batch_size bf16 bnb_config_kwargs chat_template chat_template_kwargs context_parallel_size
cut_cross_entropy dataset_prepared_path datasets ddp_find_unused_parameters deepspeed
early_stopping_patience eot_tokens eval_batch_size eval_sample_packing eval_steps evals_per_epoch
experts_implementation flash_attention flex_attn_compile_kwargs fp16 fsdp fsdp_config fsdp_version
fused_attn_kernel gemma4_hybrid_attn_impl gptq gptq_groupsize gptq_model_v1 gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs kto_desirable_weight learning_rate
liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm liger_rms_norm_gated
liger_rope llama4_linearized_experts load_in_4bit load_in_8bit logging_steps lora_alpha lora_dropout
lora_mlp_kernel lora_model_dir lora_modules_to_save lora_o_kernel lora_qkv_kernel lora_r lora_target_linear
lora_target_modules lora_target_parameters loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage
lr_scheduler max_grad_norm max_packed_sequence_len max_steps micro_batch_size model_config model_type
num_epochs optim_args optimizer orpo_alpha otel_metrics_host otel_metrics_port output_dir
pad_to_sequence_len peft_use_rslora ple_cpu_offload plugins processor_type push_dataset_to_hub
quantize_moe_experts remove_unused_columns resize_token_embeddings_to_32x resume_from_checkpoint
revision_of_model rl rl_beta sample_packing save_safetensors save_steps save_total_limit saves_per_epoch
seed sequence_len skip_prepare_dataset special_tokens strict tf32 tokenizer_type
tokenizer_use_mistral_common torch_compile torchdistx_path train_on_inputs trl trust_remote_code
unfrozen_parameters use_kernels use_otel_metrics use_scattermoe use_tensorboard use_wandb val_set_size
wandb_entity wandb_log_model wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio warmup_steps
weight_decay
"""
AXOLOTL_QLORA_KEYS = _axolotl_qlora_keys.split()

_must_be_honoured = """
optimizer bf16 warmup_ratio saves_per_epoch evals_per_epoch attn_implementation special_tokens
lora_modules_to_save train_on_inputs chat_template val_set_size sample_packing eval_sample_packing
gradient_checkpointing resume_from_checkpoint save_total_limit torch_compile torch_compile_options
"""
MUST_BE_HONOURED = _must_be_honoured.split()


def test_every_key_of_the_qlora_examples_has_a_place():
    assert len(AXOLOTL_QLORA_KEYS) == 126
    tables = [set(KEYS), set(IGNORED), set(REFUSED), set(MEANINGS) - set(REFUSED)]
    for name in AXOLOTL_QLORA_KEYS:
        assert sum(name in table for table in tables) == 1, name
    assert set(MUST_BE_HONOURED) <= set(KEYS)
    assert set(OTHER_NAMES.values()) | set(SYNONYMS.values()) <= set(KEYS)
    assert not (set(OTHER_NAMES) | set(SYNONYMS)) & set().union(*tables)


@pytest.mark.parametrize("name", KEYS_OF_EXAMPLES)
def test_every_key_of_all_examples_is_honoured_ignored_or_refused(name, good):
    """Never unknown without a hint; with nothing behind it, as if it were not there."""
    empty = check_keys(good | {name: None} if name not in good else good)
    assert empty.recipe == check_keys(good).recipe
    if name in OTHER_NAMES:
        assert errors_of(good | {name: 1}) == [f"{name}: unknown key; here it is called {OTHER_NAMES[name]}"]
        return
    tables = [name in table for table in (KEYS, IGNORED, REFUSED, SYNONYMS, set(MEANINGS) - set(REFUSED))]
    assert sum(tables) == 1


@pytest.mark.parametrize("name", DATASET_KEYS_OF_EXAMPLES)
def test_every_dataset_key_of_all_examples_has_a_place(name):
    assert (name in DATASET_KEYS) + (name in DATASET_REFUSED) == 1


def test_empty_values_inside_mappings_are_as_if_left_out(good):
    keys = {"special_tokens": {"pad_token": None, "eos_token": "</s>"}, "bnb_config_kwargs": None}
    read = check_keys(good | keys | {"local_rank": None, "eval_table_size": None})
    assert read.recipe.special_tokens == {"eos_token": "</s>"}
    assert read.notices == []


def test_ways_through_trl_exist():
    """What refusals say of TRL and PEFT: the settings and classes are there."""
    import peft
    import trl

    through = {name: text for name, text in REFUSED.items() if "use TRL: " in text}
    assert "embedding_lr" in through
    for text in (*through.values(), *DATASET_REFUSED.values()):
        for owner, setting in re.findall(r"(SFTConfig|LoraConfig)\((\w+)=", text):
            assert (
                setting
                in vars({"SFTConfig": trl.SFTConfig, "LoraConfig": peft.LoraConfig}[owner])[
                    "__dataclass_fields__"
                ]
            )
        for trainer in re.findall(r"\b[A-Z]\w+Trainer\b", text):
            assert hasattr(trl, trainer)
        if "use TRL: " in text:
            assert text.endswith("with mg.optimize(trainer.model) as in the README")
    other = {name for name, text in REFUSED.items() if text.endswith("or write trainer: trl beside it")}
    assert {"neftune_noise_alpha", "hub_model_id", "loraplus_lr_ratio"} <= other <= set(TRL_KEYS)


def test_the_keys_of_the_llama_3_example_are_read(good):
    """Those of axolotl's examples/llama-3/qlora.yml, pointed at local files."""
    keys = good | {
        "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer",
        "load_in_8bit": False,
        "load_in_4bit": True,
        "dataset_prepared_path": None,
        "val_set_size": 0,
        "output_dir": "./outputs/qlora-out",
        "lora_model_dir": None,
        "sequence_len": 4096,
        "sample_packing": True,
        "lora_r": 32,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "wandb_project": None,
        "wandb_entity": None,
        "wandb_watch": None,
        "wandb_name": None,
        "wandb_log_model": None,
        "gradient_accumulation_steps": 4,
        "micro_batch_size": 2,
        "num_epochs": 4,
        "optimizer": "paged_adamw_32bit",
        "lr_scheduler": "cosine",
        "learning_rate": 0.0002,
        "bf16": "auto",
        "tf32": False,
        "gradient_checkpointing": True,
        "resume_from_checkpoint": None,
        "logging_steps": 1,
        "attn_implementation": "flash_attention_2",
        "warmup_ratio": 0.1,
        "evals_per_epoch": 4,
        "saves_per_epoch": 1,
        "weight_decay": 0.0,
        "special_tokens": {"pad_token": "<|end_of_text|>"},
    }
    read = check_keys(keys)
    assert read.recipe.lora_r == 32
    assert read.recipe.lora_alpha == 16
    assert read.recipe.attention == "monograph"
    assert read.recipe.special_tokens == {"pad_token": "<|end_of_text|>"}
    told = {notice.split(":")[0] for notice in read.notices}
    assert told == {"model_type", "tokenizer_type", "attn_implementation", "evals_per_epoch"}


# Ten bad recipes and what is said about them; docs/reference/recipe.md shows the same.
BAD = {
    "misspelt": ({"learning_rat": 1e-4}, "learning_rat: unknown key; did you mean learning_rate?"),
    "name of another trainer": (
        {"per_device_train_batch_size": 2},
        "per_device_train_batch_size: unknown key; here it is called micro_batch_size",
    ),
    "wrong type": (
        {"micro_batch_size": "two"},
        "micro_batch_size is 'two' (str), wanted a whole number",
    ),
    "8 bits": (
        {"load_in_8bit": True},
        "adapter is qlora and load_in_8bit true; write adapter: lora for an int8 base",
    ),
    "no adapter": ({"adapter": None}, NO_ADAPTER),
    "optimiser": (
        {"optimizer": "lion_8bit"},
        "optimizer is lion_8bit, only AdamW is in the graph; write adamw_torch; or write trainer: trl",
    ),
    "sharding": (
        {"fsdp": ["hybrid_shard"]},
        "fsdp is hybrid_shard: not supported; write shard_size (ranks that share one copy) and "
        "replicate_size (copies) instead of fsdp",
    ),
    "data format": (
        {"datasets": [{"path": "chats.jsonl", "type": "sharegpt"}]},
        "datasets.0.type is 'sharegpt', wanted one of completion, alpaca, instruction, chat_template, "
        "input_output; did you mean chat_template?",
    ),
    "options without compile": (
        {"torch_compile_options": {"fx_graph_cache": False}},
        "torch_compile_options: torch_compile is missing, so they would do nothing; write torch_compile: "
        "true (or auto) beside them",
    ),
    "unknown option": (
        {"torch_compile": "auto", "torch_compile_options": {"epilog_fusion": True}},
        "torch_compile_options: 'epilog_fusion' is not allowed; did you mean epilogue_fusion? allowed are "
        "assume_aligned_inputs, comprehensive_padding, coordinate_descent_check_all_directions, "
        "coordinate_descent_tuning, decompose_mem_bound_mm, epilogue_fusion, fx_graph_cache, "
        "max_autotune_gemm, shape_padding, triton.cudagraphs",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_ten_bad_recipes_say_what_to_write(name, good):
    change, message = BAD[name]
    assert errors_of(good | change) == [message]


def test_all_mistakes_are_named_at_once(good):
    found = errors_of(good | {"lora_rank": 8, "sequence_lenn": 5, "relora": True, "bf16": "maybe"})
    assert len(found) == 4
    assert found[0] == "lora_rank: unknown key; here it is called lora_r"
    assert found[3] == "bf16 is 'maybe' (str), wanted true or false or auto, full"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_key_names_an_alternative_and_an_empty_one_is_passed_over(name, good):
    (message,) = errors_of(good | {name: True})
    assert message == f"{name}: not supported; {REFUSED[name]}"
    for empty in (None, False, 0, [], {}):
        assert check_keys(good | {name: empty}).notices == []


@pytest.mark.parametrize("name", sorted(set(IGNORED) - {"plugins"}))
def test_an_ignored_key_says_why(name, good):
    assert check_keys(good | {name: True}).notices == [f"{name}: ignored; {IGNORED[name]}"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"adapter": "lora", "load_in_4bit": True}, "write adapter: qlora"),
        ({"adapter": "qlora", "load_in_4bit": False}, "write adapter: lora"),
        ({"lora_target_linear": False}, "write lora_target_linear: true"),
        ({"base_model": "./nowhere"}, "./nowhere has no config.json"),
        ({"datasets": []}, "datasets: missing"),
        ({"datasets": "train.jsonl"}, "wanted a list"),
        ({"datasets": [{"path": "a", "type": "alpaca", "fild": "b"}]}, "datasets.0.fild: unknown key"),
        ({"datasets": [{"path": "a", "type": "alpaca", "field_chosen": "b"}]}, "write rl: dpo"),
        ({"bnb_config_kwargs": {"bnb_4bit_quant_type": "int4"}}, "wanted nf4 or fp4"),
        ({"attn_implementation": "flash"}, "wanted monograph, sdpa or eager"),
        ({"special_tokens": {"pad": "x"}}, "special_tokens.pad: unknown"),
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "leave one out"),
        ({"load_best_model_at_end": True}, "nothing is evaluated"),
        ({"lora_dropout": 1.5}, "lora_dropout is 1.5, wanted 0 or more and less than 1"),
        ({"base_memory": "3GiB", "device": "cuda"}, "base_memory and the device cuda"),
        ({"base_memory": "3 apples"}, "base_memory is '3 apples', wanted bytes, or a number with"),
        ({"base_memory": "3GiB", "peft_init_lora_weights": "pissa"}, "base_memory and the start pissa"),
        ({"learning_rate": 0}, "learning_rate is 0.0, wanted more than 0"),
        ({"chat_template": "jinja"}, "chat_template_jinja is missing"),
        ({"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "SpectrumPlugin is not supported"),
        ({"lr_scheduler": "zigzag"}, "wanted cosine, linear, constant, constant_with_warmup"),
        ({"lr_scheduler": "linear", "cosine_min_lr_ratio": 0.1}, "is linear, wanted cosine or rex"),
        ({"model_config": {"num_experts_per_tok": 1}}, "edit config.json of the model's folder"),
        ({"torch_compile": True, "torch_compile_options": {"fx_graph_cache": 1}}, "wanted true or false"),
    ],
)
def test_rules_about_keys_together(change, part, good):
    (message,) = errors_of(good | change)
    assert part in message


def test_keys_of_several_processes(good):
    assert check_keys(good | {"gradient_accumulation_steps": 6}).recipe.leaves == 6
    assert check_keys(good | {"gradient_accumulation_steps": 6, "virtual_shards": 8}).recipe.leaves == 8
    for name in ("virtual_shards", "ddp_timeout"):
        (message,) = errors_of(good | {name: 0})
        assert message == f"{name} is 0, wanted 1 or more"


def test_servers_are_warned_about(good):
    features = {"peft_use_dora": True, "lora_modules_to_save": ["lm_head"]}
    converted = {
        "lora_rank_pattern": {"q_proj": 4},
        "lora_alpha_pattern": {"q_proj": 4},
        "peft_use_rslora": True,
    }
    for server in ("vllm", "sglang", "llama.cpp"):
        notices = check_keys(good | features | {"serve_with": server}).notices
        assert len(notices) == 2
        assert all(notice.startswith(f"serve_with: {server} cannot load ") for notice in notices)
        assert check_keys(good | converted | {"serve_with": server}).notices == []


def test_overrides_on_the_command_line(good, tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps(good))
    arguments = ["--lora-r", "4", "--learning_rate=1e-5", "--sample-packing"]
    arguments += ["--datasets.0.type", "completion"]
    arguments += ["--special-tokens.pad-token", "<pad>", "--no-train-on-inputs", "--max-steps", "7"]
    recipe = read_config(str(path), arguments).recipe
    assert (recipe.lora_r, recipe.learning_rate, recipe.sample_packing) == (4, 1e-5, True)
    assert recipe.datasets[0].type == "completion"
    assert recipe.special_tokens == {"pad_token": "<pad>"}
    assert (recipe.train_on_inputs, recipe.max_steps) == (False, 7)
    for wrong, part in (
        (["--lora-rr", "4"], "lora_rr: unknown key; did you mean lora_r?"),
        (["lora_r", "4"], "'lora_r' is not an option"),
        (["--datasets.3.path", "x"], "datasets has 1 entries"),
        (["--adapter.x", "4"], "adapter is 'qlora', not a mapping or list"),
    ):
        with pytest.raises(ConfigError, match=re.escape(part)):
            read_config(str(path), wrong)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("lora_r: 8\nlora_r: 16\n", "line 2: lora_r is written twice"),
        ("a: [1\n", "this is not YAML"),
        ("- a\n", "found list, wanted `key: value` lines"),
    ],
)
def test_broken_files(text, part, tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_config(str(path))
    with pytest.raises(ConfigError, match="there is no such file"):
        read_config(str(tmp_path / "none.yml"))


def test_numbers_that_yaml_reads_as_text(good, tmp_path):
    path = tmp_path / "recipe.yml"
    path.write_text(json.dumps(good)[:-1] + ', "learning_rate": 1e-4}')
    assert read_config(str(path)).recipe.learning_rate == 1e-4


def test_the_example_of_the_tree_is_right(good):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/qlora.yml")
    arguments = ["--base-model", good["base_model"]]
    assert read_config(example, arguments).notices == []


def test_the_example_of_compile_options_is_right(good):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/compile_options.yml")
    read = read_config(example, ["--base-model", good["base_model"]])
    assert read.recipe.attn_implementation == "monograph"
    assert read.recipe.torch_compile is True
    assert read.recipe.torch_compile_options == {"epilogue_fusion": True, "shape_padding": True}
    assert [notice for notice in read.notices if "shape_padding" not in notice] == []


def test_the_commented_keys_of_the_example_are_right(good, tmp_path):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/qlora.yml")
    with open(example, encoding="utf-8") as file:
        text = re.sub(r"^# (?=torch_compile|  \w+: )", "", file.read(), flags=re.MULTILINE)
    (tmp_path / "recipe.yml").write_text(text)
    read = read_config(str(tmp_path / "recipe.yml"), ["--base-model", good["base_model"]])
    assert read.recipe.torch_compile_mode == "max-autotune-no-cudagraphs"
    assert read.recipe.torch_compile_options == {"epilogue_fusion": True, "max_autotune_gemm": True}
    assert read.notices == []


def test_reading_a_recipe_does_not_load_transformers():
    """A mistake is reported before the seconds that transformers takes to load."""
    code = "import monograph.recipe, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_lists_every_key_and_the_ten_messages():
    root = os.path.join(os.path.dirname(__file__), "../../..")
    check = [sys.executable, os.path.join(root, "tools/recipe_docs.py"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0
    with open(os.path.join(root, "docs/reference/recipe.md"), encoding="utf-8") as file:
        page = file.read()
    for _, message in BAD.values():
        assert message.split(" allowed are ")[0] in page
