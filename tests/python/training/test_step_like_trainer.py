"""TrainStep against transformers' Trainer on the same model and batches: loss, gradients, weight decay."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import monograph.hf.transformers.attention  # noqa: F401
from monograph.packing import PackedCollator, PaddedCollator
from monograph.training import TrainStep
from monograph.training.flat_parameters import decayed_names
from support.tiny_models import tiny_llama


def build(attention="sdpa", **options):
    model = tiny_llama(vocab_size=300, attn_implementation=attention)
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**lora))


def rows(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, 300, (n,), generator=generator).tolist() for n in lengths]


def as_typed(*lengths):
    """What people write: labels=input_ids, nothing set to -100."""
    ids = torch.tensor(rows(*lengths))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def collated(collate, *lengths):
    return collate([{"input_ids": row} for row in rows(*lengths)])


def packed(*lengths):
    return collated(PackedCollator(pad_to_multiple_of=32, max_documents=4), *lengths)


def padded(*lengths):
    return collated(PaddedCollator(), *lengths)


BATCHES = {
    "labels=input_ids": [as_typed(8)],
    "rows": [as_typed(9, 9, 9)],
    "padded": [padded(7, 19, 2)],
    "packed": [packed(9, 14, 5)],
    "packed, accumulated": [packed(9, 14, 5), packed(4), packed(17, 3)],
    "labels=input_ids, accumulated": [as_typed(8), as_typed(21, 21)],
}


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def of_the_trainer(model, batches, folder):
    """Loss and gradients of the one step that the Trainer makes of the batches."""
    gradients, losses = Gradients(), []

    class Recorded(Trainer):
        def training_step(self, *arguments, **options):
            losses.append(super().training_step(*arguments, **options))
            return losses[-1]

    arguments = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(batches),
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    features = [{**batch, "number": number} for number, batch in enumerate(batches)]
    trainer = Recorded(
        model,
        arguments,
        train_dataset=features,
        data_collator=lambda found: {k: v for k, v in found[0].items() if k not in ("number", "cu_seqlens")},
        callbacks=[gradients],
    )
    evaluated = trainer.prediction_step(trainer.model, dict(batches[0]), prediction_loss_only=True)[0]
    trainer.train()
    return sum(losses), gradients.found, evaluated


@pytest.mark.parametrize("name", BATCHES)
def test_loss_gradients_and_evaluation_are_the_trainers(name, tmp_path):
    """fp32; the bounds are those of test_training_loss: sums of 64 products and 300 exponentials in another
    order."""
    batches = BATCHES[name]
    loss, gradients, evaluated = of_the_trainer(build(), batches, tmp_path)
    step = TrainStep(build("monograph" if "packed" in name else "sdpa"), mode="eager", max_grad_norm=0.0)
    total, count = step.evaluate(batches[0])
    assert abs(total / count - evaluated) <= 6 * 2**-20
    update, found = step.state.update, []
    step.state.update = lambda gradient, *rest: found.append(gradient.clone()) or update(gradient, *rest)
    result = step(batches, 1e-3)
    assert abs(result.loss - loss) <= 6 * 2**-20
    got = step.state.views(found[0])
    assert got.keys() == gradients.keys()
    for parameter, want in gradients.items():
        assert (got[parameter] - want).norm() <= 2**-16 * want.norm(), parameter


def test_what_decays_is_what_the_trainer_decays():
    """DoRA's magnitudes do, though they are vectors; biases and norms do not, whatever their names are."""
    model = build(use_dora=True, modules_to_save=["input_layernorm", "embed_tokens"], bias="all")
    model.base_model.model.unusual = torch.nn.LayerNorm(4)
    model.base_model.model.q_norm = torch.nn.Linear(4, 4, bias=False)
    want = Trainer.get_decay_parameter_names(None, model)
    got = decayed_names(model)
    assert got == set(want) & {name for name, _ in model.named_parameters()}
    assert any("lora_magnitude_vector" in name for name in got)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained - got
    step = TrainStep(model, mode="eager", weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    step.state.update(torch.zeros_like(step.state.flat), torch.tensor(0.5), *step._hyper)
    for name, parameter in model.named_parameters():
        if name in trained:
            assert torch.equal(parameter, before[name] * (0.75 if name in got else 1.0)), name
