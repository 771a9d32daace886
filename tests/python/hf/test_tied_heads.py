"""Adapters on a head that is the embedding: the step has the loss and the gradient of PEFT's own model."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import monograph as mg
from monograph.training import TrainStep
from support.tiny_models import tiny_llama

pytestmark = pytest.mark.slow
BOTH = ["q_proj", "embed_tokens", "lm_head"]
CONFIGS = {
    "LoRA on the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA on both, apart": {"target_modules": BOTH},
    "LoRA on both, tied": {"target_modules": BOTH, "ensure_weight_tying": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "tokens of the embedding": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [3, 5]},
    },
    "head whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "embedding whole, tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}


def made(config):
    model = mg.nn.replace_linears(tiny_llama(tie_word_embeddings=True, initializer_range=0.2), "nf4")
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=4, **config))
    generator = torch.Generator().manual_seed(5)
    for _, parameter in sorted(wrapped.named_parameters()):
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return wrapped


def batch():
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(2))
    ids[0, 4], ids[1, 5] = 3, 5  # tokens that are trained
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_step_is_that_of_peft(kind):
    plain = made(CONFIGS[kind])
    loss = plain(**batch()).loss
    loss.backward()
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((gradient.double() ** 2).sum() for gradient in grads))
    for mode in ("eager", "graph"):
        step = TrainStep(mg.optimize(made(CONFIGS[kind])), mode=mode, max_grad_norm=1e9)
        found = step([batch()], 0.0)
        assert float(found.loss) == pytest.approx(float(loss), rel=1e-5), mode
        assert float(found.grad_norm) == pytest.approx(float(norm), rel=1e-4), mode
