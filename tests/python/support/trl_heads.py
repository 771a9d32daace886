"""TRL's head beside ours on one tiny model, and the fields that both return."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from monograph.integrations.trl import head as trl_head

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def tiny(**change):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        **change,
    )
    return LlamaForCausalLM(config)


def batch(rows=3, length=17):
    ids = torch.randint(0, 131, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


def both(outputs=FIELDS, temperature=1.0, **change):
    """A model with TRL's head, and the same taken over."""
    models = []
    for ours in (False, True):
        model = tiny(**change)
        add_fused_lm_head(model, temperature=temperature, outputs=outputs)
        assert trl_head.take_over(model) is True if ours else True
        models.append(model)
    return models
