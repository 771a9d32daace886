"""Adapters trained by the verbs that services of training have, in this process: no server and no futures.

service = mg.TrainingService(base)
law = service.create_lora_training_client(rank=16, seed=1)
loss = law.forward_backward(batches).loss          # a sum over targets; gradients accumulate
law.optim_step(mg.AdamParams(learning_rate=1e-4))  # one update of all that has accumulated
law.save_state("law-100")
tokens = law.sample([1, 5, 9], max_tokens=16)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from monograph.distributed import Order, TreeSum
from monograph.many.adapter_run import AdapterRun, check_number, check_update
from monograph.many.step import ManyStep, check_batches
from monograph.training.loss import has_router_loss
from monograph.training.step import MOST_MICRO_BATCHES

OPTIMIZER = "optimizer.safetensors"
# All that `save_state` and `save_weights` write; a folder with anything else is not theirs to replace.
_OURS = {"adapter_config.json", "adapter_model.safetensors", "README.md", OPTIMIZER}
# By which factors with the same shapes mean another change of the base.
_MEANING = [
    "lora_alpha",
    "use_rslora",
    "use_dora",
    "alpha_pattern",
    "rank_pattern",
    "r",
    "target_modules",
    "target_parameters",
]


@dataclass(frozen=True)
class AdamParams:
    """Of one update. grad_clip_norm: 0 clips nothing."""

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class ForwardBackward:
    """loss: the sum over all targets of the call, over `divisor`; targets: their number."""

    loss: float
    targets: int


class TrainingService:
    """Clients on one base. mode: of TrainStep, one whose update is a call of its own."""

    def __init__(self, base: nn.Module, *, mode: str = "graph") -> None:
        if mode not in ("graph", "inductor", "eager"):
            raise ValueError(
                f"mode is {mode!r}, wanted graph, inductor or eager: updates are calls of their own"
            )
        if has_router_loss(base.config):
            raise ValueError(
                "config.output_router_logits is True: the loss of routers is no sum over targets"
            )
        self._step = ManyStep(base, {}, mode=mode)
        self._count = 0

    def create_lora_training_client(
        self, rank: int = 32, *, seed: int = 0, config: LoraConfig | None = None, name: str = ""
    ) -> TrainingClient:
        """A new adapter: LoRA of this rank on all linear layers, or as `config` says."""
        if type(rank) is not int or rank < 1:
            raise ValueError(f"rank is {rank!r}, wanted a whole number, 1 or more")
        if not isinstance(name, str):
            raise ValueError(f"name is {name!r}, wanted a word")
        config = config or LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        self._count += 1
        name = name or f"adapter-{self._count}"
        self._step.join(name, AdapterRun(config, seed=seed, max_grad_norm=0.0))
        return TrainingClient(self._step, name)


class TrainingClient:
    """One adapter. Calls are done when they return; gradients of calls add up until `optim_step`."""

    def __init__(self, many: ManyStep, name: str) -> None:
        self.name = name
        self._many, self._step = many, many.step_of(name)
        self._gradients: list[torch.Tensor] = []
        self._closed = False

    @property
    def model(self) -> Any:
        """PEFT's model of the adapter."""
        self._check_open()
        return self._many.model(self.name)

    def _check_open(self) -> None:
        """The place of a closed one may be another adapter's."""
        if self._closed:
            raise ValueError(f"{self.name} is closed, wanted a client that is open")

    def forward(self, batches: Sequence[Mapping[str, Any]], *, divisor: float = 1.0) -> ForwardBackward:
        """The loss alone, without dropout."""
        self._check_open()
        check_batches(self.name, batches)
        check_number("divisor", divisor, above=True)
        found = [self._many.evaluate(self.name, batch) for batch in batches]
        loss = sum(float(loss) / divisor for loss, _ in found)
        return ForwardBackward(loss, sum(count for _, count in found))

    def forward_backward(
        self, batches: Sequence[Mapping[str, Any]], *, divisor: float = 1.0
    ) -> ForwardBackward:
        """Adds the gradients of these batches, as the collators make them. The loss of a target counts 1 /
        divisor: with that of all targets of an update, it is TrainStep's mean, to the bit."""
        self._check_open()
        check_batches(self.name, batches)
        check_number("divisor", divisor, above=True)
        step, targets, losses = self._step, 0, []
        if len(self._gradients) + len(batches) > MOST_MICRO_BATCHES:
            raise ValueError(f"more than {MOST_MICRO_BATCHES} batches before an optim_step")
        count = torch.full((), divisor, dtype=torch.float32, device=step.device)
        for batch in batches:
            gradient, found = step.gradient_of(batch, len(self._gradients), count)
            self._gradients.append(gradient)
            losses.append(gradient[step.state.flat.numel()])
            targets += found
        return ForwardBackward(float(torch.stack(losses).double().sum()) if losses else 0.0, targets)

    def optim_step(self, params: AdamParams) -> float:
        """One AdamW update; gives the norm of the gradient before clipping. One that is not finite, or a loss
        that is not, changes nothing. What has accumulated is gone."""
        self._check_open()
        check_number("learning_rate", params.learning_rate)
        numbers = params.betas, params.eps, params.weight_decay, params.grad_clip_norm
        check_update("", *numbers, "grad_clip_norm")
        if not self._gradients:
            raise ValueError(f"{self.name}: optim_step without a forward_backward before it")
        gradients, self._gradients = self._gradients, []
        total = TreeSum(Order.of(len(gradients), len(gradients), 0, 1).sums)
        for gradient in gradients:
            total.add(gradient)
        _, norm = self._step.apply_gradient(total.parts, len(gradients), params.learning_rate, numbers)
        return float(norm)

    def sample(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 32,
        temperature: float = 1.0,
        top_p: float = 1.0,
        num_samples: int = 1,
        seed: int | None = None,
    ) -> list[list[int]]:
        """Tokens behind a prompt of tokens; temperature 0 takes the likeliest. torch's generator stays."""
        self._check_open()
        ids, known = list(prompt), self.model.config.get_text_config().vocab_size
        if not ids or any(type(token) is not int or not 0 <= token < known for token in ids):
            raise ValueError(f"prompt is {ids[:8]}, wanted one token or more, each from 0 to {known - 1}")
        for what, value in (("max_tokens", max_tokens), ("num_samples", num_samples)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{what} is {value!r}, wanted a whole number, 1 or more")
        check_number("temperature", temperature)
        check_number("top_p", top_p, above=True)
        if top_p > 1:
            raise ValueError(f"top_p is {top_p!r}, wanted 1 at most")
        tokens = torch.tensor([ids], device=self._step.device)
        drawn: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            drawn |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
        self.model.eval()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if seed is not None:
                torch.manual_seed(seed)
            found = self.model.generate(
                input_ids=tokens.expand(num_samples, -1),
                attention_mask=torch.ones_like(tokens).expand(num_samples, -1),
                max_new_tokens=max_tokens,
                use_cache=True,
                **drawn,
            )
        return [row[tokens.shape[1] :].tolist() for row in found]

    def save_weights(self, folder: str) -> str:
        """PEFT's folder of the adapter."""
        return self._save(folder, optimizer=False)

    def save_state(self, folder: str) -> str:
        """The same with moments and the count of steps, for `load_state`. Refused while gradients wait."""
        if self._gradients:
            raise ValueError(f"{self.name}: gradients have accumulated, wanted optim_step before save_state")
        return self._save(folder, optimizer=True)

    def load_state(self, folder: str) -> None:
        """What `save_state` wrote of an adapter of the same shape; accumulated gradients are gone."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        self._check_open()
        path = os.path.join(folder, OPTIMIZER)
        for file in (OPTIMIZER, "adapter_config.json"):
            if not os.path.isfile(os.path.join(folder, file)):
                raise ValueError(f"load_state: {folder} has no {file}, wanted a folder of save_state")
        saved = LoraConfig.from_pretrained(folder).to_dict()
        own = self.model.peft_config["default"].to_dict()
        for key in _MEANING:
            if saved[key] != own[key]:
                raise ValueError(
                    f"load_state: {folder} has {key} {saved[key]!r}, wanted {own[key]!r} as {self.name}"
                )
        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"load_state: {path} is broken: {error}") from error
        self._many.load_state_dict(self.name, state)
        self._gradients = []

    def close(self) -> None:
        """Gives the place of the adapter to the next one of its kind."""
        self._check_open()
        self._many.retire(self.name)
        self._closed, self._gradients = True, []

    def _save(self, folder: str, *, optimizer: bool) -> str:
        from safetensors.torch import save_file

        self._check_open()
        if not folder:
            raise ValueError("the folder is '', wanted a path")
        if os.path.isfile(folder):
            raise ValueError(f"{folder} is a file, wanted a folder")
        if other := sorted(set(os.listdir(folder)) - _OURS) if os.path.exists(folder) else []:
            raise ValueError(
                f"{folder} holds something else than an adapter, {other[0]}; wanted another folder"
            )
        unfinished, replaced = (f"{os.path.normpath(folder)}.{what}" for what in ("unfinished", "replaced"))
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        self.model.save_pretrained(unfinished)
        if optimizer:
            save_file(self._many.state_dict(self.name), os.path.join(unfinished, OPTIMIZER))
        # One of the two is whole at any moment.
        shutil.rmtree(replaced, ignore_errors=True)
        if os.path.isdir(folder):
            os.rename(folder, replaced)
        os.rename(unfinished, folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return folder
