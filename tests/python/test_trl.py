"""TRL's SFT, DPO and GRPO trainers on packed weights: they learn what they learn from dense ones."""

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers

import monograph as mg
from monograph.nn.lora_linear import LoraLinear

WORDS = [f"w{i}" for i in range(60)]
TEXTS = [" ".join(WORDS[(7 * i + j) % 60] for j in range(12)) for i in range(8)]
ROWS = {
    "sft": {"text": TEXTS},
    "dpo": {
        "prompt": [text + " " for text in TEXTS],
        "chosen": [" ".join(WORDS[i : i + 9]) for i in range(8)],
        "rejected": [" ".join(WORDS[i + 20 : i + 27]) for i in range(8)],
    },
    "grpo": {"prompt": TEXTS},
}


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with NF4 weights in bitsandbytes' own files."""
    root = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.3,  # logits far enough from uniform to matter
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(root / "dense")
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        root / "dense", quantization_config=mg.MonographConfig("nf4", double_quant=True), dtype=torch.float32
    )
    packed.save_pretrained(root / "nf4")
    tokenizer().save_pretrained(root / "nf4")
    return root / "nf4"


def variety(completions, **_):
    """A reward that two different completions hardly share."""
    return [
        sum(0.01 * i * WORDS.index(w) for i, w in enumerate(c.split(), 1) if w in WORDS) for c in completions
    ]


def trainer_for(kind, model, output):
    config, trainer, options = {
        "sft": (trl.SFTConfig, trl.SFTTrainer, {"max_length": 16}),
        "dpo": (trl.DPOConfig, trl.DPOTrainer, {"max_length": 24}),
        "grpo": (trl.GRPOConfig, trl.GRPOTrainer, {"num_generations": 2, "max_completion_length": 6}),
    }[kind]
    arguments = config(
        output_dir=str(output),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    rewards = {"reward_funcs": variety} if kind == "grpo" else {}
    torch.manual_seed(0)
    return trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(ROWS[kind]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        **rewards,
    )


def trained(kind, model, output):
    trainer = trainer_for(kind, model, output)
    if any(isinstance(layer, mg.nn.QuantLinear) for layer in model.modules()):
        mg.optimize(trainer.model)  # with the loading, the lines that change in a script
        assert any(isinstance(layer, LoraLinear) for layer in trainer.model.modules())
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer, before, steps


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_three_steps_and_an_adapter_that_reloads(kind, folder, tmp_path):
    trainer, before, steps = trained(kind, mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    assert len(steps) == 3
    assert all(entry["grad_norm"] > 0 for entry in steps)
    moved = [n for n, p in trainer.model.named_parameters() if n in before and not torch.equal(before[n], p)]
    assert len(moved) == len(before) == 28  # A and B of seven layers in two blocks

    trainer.save_model(tmp_path / "adapter")
    ids = torch.arange(3, 40)[None]
    trainer.model.eval()
    with torch.no_grad():
        want = trainer.model(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(
            mg.from_pretrained(folder, dtype=torch.float32), tmp_path / "adapter"
        )
        plain = loaded(input_ids=ids).logits
        got = mg.optimize(loaded)(input_ids=ids).logits
        base = mg.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
    assert torch.equal(got, want)
    torch.testing.assert_close(plain, want, rtol=1e-4, atol=1e-4)
    assert (base - want).abs().max() > 1e-3  # the adapter does something


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_losses_are_those_of_the_dequantised_model(kind, folder, tmp_path):
    """The same values, data and seeds under PEFT's own layers, torch's attention and fp32.

    (bitsandbytes is no reference for digits: it computes in bf16, and TRL casts its adapters to bf16.)
    AdamW turns a gradient near 0 that rounds to the other side into a step of 1e-3 to the other side.
    """
    _, _, ours = trained(kind, mg.from_pretrained(folder, dtype=torch.float32), tmp_path)
    dense = mg.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").dequantize()
    _, _, want = trained(kind, dense, tmp_path)
    for step, (a, b) in enumerate(zip(ours, want, strict=True)):
        tolerance = 1e-5 if step == 0 else 1e-3
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance), step
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=10 * tolerance), step
