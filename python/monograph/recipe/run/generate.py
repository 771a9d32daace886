"""Answers of a tuned model: prompts worded as in training, the adapter on the packed base, text streamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TextStreamer

from monograph.recipe.config.keys import Recipe, TrlRecipe
from monograph.recipe.config.model_folder import model_folder
from monograph.recipe.config.placement import device_of
from monograph.recipe.data.chat_template import chat_template
from monograph.recipe.data.documents import prompt_of
from monograph.recipe.data.encode import load_tokenizer, prompt_tokens
from monograph.recipe.data.preference_rows import prompt_wording
from monograph.recipe.data.token_rows import check_token
from monograph.recipe.run.load_model import load_base, takes_ours
from monograph.recipe.run.saved_recipe import adapter_folder, trained_adapter
from monograph.recipe.run.trained_base import check_trained_base


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; a temperature of 0 takes the likeliest."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def options(self) -> dict[str, Any]:
        """As transformers' `generate` calls them."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "repetition_penalty": self.repetition_penalty,
            "do_sample": self.temperature > 0,
        }
        if self.temperature > 0:
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return options


class _Writer(TextStreamer):
    """Hands on text as soon as it is whole words."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write(text)


def find_adapter(recipe: Recipe) -> str | None:
    """The adapter to answer with: the trained one, or before any training that of lora_model_dir; None if
    there is neither."""
    return trained_adapter(recipe) or adapter_folder(recipe.lora_model_dir)


class Generator:
    """A model that answers.

    kind: "chat", "instruction" or "completion"; by default that of the first dataset of the recipe.
    adapter: its folder; None is the base alone.
    """

    def __init__(self, recipe: Recipe, adapter: str | None, kind: str | None = None) -> None:
        self._device = device_of(recipe)
        folder = model_folder(recipe)
        self._recipe = recipe
        self.tokenizer = load_tokenizer(recipe, folder)
        written = recipe.datasets[0].type
        preferences = isinstance(recipe, TrlRecipe) and recipe.method.rows != "documents"
        if recipe.reward_model:
            raise ValueError("reward_model: it gives rewards, and no answers")
        self._prompt = (
            prompt_wording(written) if preferences and isinstance(written, dict) else prompt_of(written)
        )
        self.kind = kind or _kind(written)
        if self.kind == "instruction" and self._prompt is None:
            self._prompt = prompt_of("alpaca")
        self._template = _template(recipe, self.tokenizer) if self.kind == "chat" else None
        self.model = load_base(recipe, folder)
        if adapter is not None:
            from peft import PeftModel

            from monograph.hf.optimize import optimize

            check_trained_base(recipe, adapter, folder, self.model)
            self.model = PeftModel.from_pretrained(self.model, adapter)
            optimize(self.model, attention=takes_ours(recipe, self._device.type))
        self.model.eval()
        known = self.tokenizer.get_vocab()
        self._ends = [self.tokenizer.eos_token_id, *(known[token] for token in recipe.eot_tokens or [])]

    def tokens(self, prompt: str, history: list[dict[str, str]] | None = None) -> torch.Tensor:
        """The prompt as the model saw prompts in training, int64 [1, T], on its device; `history` is the chat
        so far."""
        if self.kind == "chat":
            system = self._recipe.default_system_message
            messages = [{"role": "system", "content": system}] if system else []
            text = self.tokenizer.apply_chat_template(
                [*messages, *(history or []), {"role": "user", "content": prompt}],
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **self._recipe.chat_template_kwargs,
            )
            ids = prompt_tokens(text, self.tokenizer, begins=False)
        else:
            asked = self._prompt.prompt(prompt) if self._prompt and self.kind == "instruction" else prompt
            ids = prompt_tokens(asked, self.tokenizer, begins=True)
        if not ids:
            raise ValueError("the prompt has no tokens")
        check_token(self._recipe, self.tokenizer, max(ids), self.model.get_input_embeddings().weight.shape[0])
        return torch.tensor([ids], device=self._device)

    @torch.inference_mode()
    def answer(self, tokens: torch.Tensor, sampling: Sampling, write: Callable[[str], None]) -> str:
        """Generates behind `tokens` with a KV cache; `write` gets the text as it comes."""
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        out = self.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            use_cache=True,
            eos_token_id=self._ends,
            pad_token_id=self.tokenizer.pad_token_id,
            streamer=_Writer(self.tokenizer, write),
            **sampling.options(),
        )
        return self.tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)


def _template(recipe: Recipe, tokenizer: Any) -> str:
    """The template of the first dataset of chats: that of training."""
    own = [entry.chat_template for entry in recipe.datasets if _kind(entry.type) == "chat"]
    return chat_template(recipe, tokenizer, own[0] if own else None)


def _kind(written: str | dict[str, str]) -> str:
    if isinstance(written, str) and written.startswith("chat_template"):
        return "chat"
    return "instruction" if prompt_of(written) is not None else "completion"
