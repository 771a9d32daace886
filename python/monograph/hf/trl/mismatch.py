"""How far the log-probabilities of a GRPO trainer are from those that its tokens were drawn with.

    mismatch = watch(trainer)
    trainer.train()
    print(mismatch)

Any model of transformers may be inside. Tokens are compared while the trainer computes its loss, with
autocast, checkpointing and torch.compile as they are. At temperature 1 and other, as TRL divides by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from monograph.hf.transformers.listen import listen
from monograph.upstream.trl_names import per_token_logps, set_per_token_logps


@dataclass
class Mismatch:
    """Over all tokens that were trained on so far."""

    tokens: int = 0
    differing: int = 0
    largest: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)

    def add(self, trained: torch.Tensor, drawn: torch.Tensor) -> None:
        away = (trained - drawn).abs().double()
        self.tokens += away.numel()
        self.differing += int((away != 0).sum())
        self.largest = max(self.largest, float(away.max()))
        self.total += float(away.sum())

    def __str__(self) -> str:
        away = f"largest {self.largest:.3g}, mean {self.mean:.3g}"
        return f"{self.differing} of {self.tokens} tokens differ, {away}"


def watch(trainer: Any) -> Mismatch:
    """Call it before `train()`."""
    mismatch = Mismatch()
    drawn: dict[tuple[int, ...], list[tuple[list[int], torch.Tensor]]] = {}  # by prompt
    base: Any = trainer.model.get_base_model()
    own_generate, own_score = base.generate, per_token_logps(trainer)

    def generate(*arguments: Any, **options: Any) -> Any:
        prompts, mask = options["input_ids"], options["attention_mask"].bool()
        with listen(base) as heard:
            found = own_generate(*arguments, **options)
        tokens = found[:, prompts.shape[1] :]
        log_probs = heard.log_probs(tokens, trainer.temperature)
        drawn.clear()
        for prompt, real, row, numbers in zip(prompts, mask, tokens, log_probs, strict=True):
            drawn.setdefault(tuple(prompt[real].tolist()), []).append((row.tolist(), numbers))
        return found

    def score(
        model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *rest: Any, **more: Any
    ) -> Any:
        found = own_score(model, input_ids, attention_mask, logits_to_keep, *rest, **more)
        if torch.is_grad_enabled():  # else a reference, or the policy before its step
            real = attention_mask.bool()
            for row in range(input_ids.shape[0]):
                prompt = tuple(input_ids[row, :-logits_to_keep][real[row, :-logits_to_keep]].tolist())
                tokens = input_ids[row, -logits_to_keep:][real[row, -logits_to_keep:]].tolist()
                numbers = next(n for ids, n in drawn[prompt] if ids[: len(tokens)] == tokens)
                mismatch.add(found[0][row, : len(tokens)].detach(), numbers[: len(tokens)])
        return found

    base.generate = generate
    set_per_token_logps(trainer, score)
    return mismatch
