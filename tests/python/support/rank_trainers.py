"""Run on ranks by test_trainers_ranks.py: trainers of transformers and TRL under DDP, each case against the
same model in this process alone, which sums the micro-batches of all ranks in their order."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import tempfile
import time
from typing import Any

import torch
import torch._dynamo
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import monograph as mg
from monograph.distributed import World, share_base
from monograph.packing import PackedCollator, PaddedCollator
from monograph.training.regions import make_regions, region_layers
from support.trl_runs import tokenizer

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
EXPERTS = LoraConfig(
    r=2,
    target_modules=["q_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    init_lora_weights=False,
    task_type="CAUSAL_LM",
)
LONG = bool(os.environ.get("MONOGRAPH_LONG"))  # all combinations, not half of them
LENGTHS = (9, 14, 5, 21, 7, 12, 3, 16)
COLLATORS: dict[str, Any] = {
    "packed": PackedCollator(pad_to_multiple_of=32, max_documents=4),
    "padded": PaddedCollator(),
}


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(2, 60, (n,), generator=draw).tolist()} for n in lengths]


def base_of(folder: str, **options: Any) -> Any:
    """The NF4 folder is mapped; dense experts are quantised while they load."""
    quantization = mg.MonographConfig("mxfp4") if folder.endswith("experts") else None
    return mg.from_pretrained(folder, quantization, dtype=torch.float32, **options)


def arguments(kind: str, output: str, **change: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": output,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
    } | change
    if kind == "hf":
        return transformers.TrainingArguments(**given)
    return trl.SFTConfig(**given, dataset_kwargs={"skip_prepare_dataset": True}, max_length=64)


class Seen:
    """What a trainer has computed: its micro-batches, their losses, and the gradients before the update."""

    def __init__(self, trainer: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.trainer, step = trainer, trainer.training_step

        def recorded(model: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            self.batches.append({name: value for name, value in inputs.items()})
            self.losses.append(step(model, inputs, *rest, **options).item())
            return torch.tensor(self.losses[-1])

        trainer.training_step = recorded
        seen = self

        class Keep(transformers.TrainerCallback):
            def on_pre_optimizer_step(
                self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
            ) -> None:
                found = parameters(seen.trainer.model)
                seen.gradients = {name: whole(p.grad).detach().clone() for name, p in found.items()}

        trainer.add_callback(Keep())


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parameters(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make(
    kind: str, model: Any, collator: str, output: str, lora: Any = LORA, rows: Any = None, **change: Any
) -> Any:
    data = Dataset.from_list(rows or documents())
    if kind == "hf":
        model = get_peft_model(model, lora)
        return transformers.Trainer(
            model, arguments(kind, output, **change), train_dataset=data, data_collator=COLLATORS[collator]
        )
    return trl.SFTTrainer(
        model=model,
        args=arguments(kind, output, **change),
        train_dataset=data,
        data_collator=COLLATORS[collator],
        processing_class=tokenizer(),
        peft_config=lora,
    )


def alone(kind: str, model: Any, batches: Any, ranks: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of the mean over all targets without any wrapper: micro-batches are added as they lie on the
    ranks, and then the ranks."""
    model.train()
    total = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)
    sums: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        model.zero_grad()
        for batch in batches[rank::ranks]:
            given = {**batch, "use_cache": False, "num_items_in_batch": torch.tensor(total)}
            if kind == "hf":
                loss = model(**given).loss
            else:
                loss = -model(**given, fused_lm_head=True).log_probs.sum() / total
            loss.backward()
        for name, parameter in parameters(model).items():
            sums[name] = parameter.grad + sums.get(name, 0)
    model.zero_grad()
    return sums


def same_bits(got: Any, want: Any) -> list[str]:
    """Names whose gradients differ."""
    assert got.keys() == want.keys()
    assert want
    return [name for name in want if not torch.equal(got[name], want[name])]


def dealt(world: World, collator: str, batches: int, rows: Any = None) -> Any:
    """The micro-batches of a step in the order of one process: batch i is of rank i % size."""
    data = rows or documents()
    return [COLLATORS[collator](data[2 * i : 2 * i + 2]) for i in range(batches)]


def quiet() -> contextlib.redirect_stdout[io.StringIO]:
    return contextlib.redirect_stdout(io.StringIO())


def one_case(
    world: World,
    folder: str,
    kind: str,
    collator: Any,
    regions: Any,
    checkpointing: Any,
    lora: Any = LORA,
    **change: Any,
) -> Any:
    """One step under the trainer against the same step alone. Gives what differs."""
    with tempfile.TemporaryDirectory() as output, quiet():
        options = {"use_reentrant": False}
        steps = change.get("gradient_accumulation_steps", 1)
        torch.manual_seed(100)
        trainer = make(
            kind,
            base_of(folder),
            collator,
            output,
            lora,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs=options,
            **change,
        )
        model = mg.optimize(trainer.model)
        with torch.no_grad():  # adapters differ until DDP makes them rank 0's
            for parameter in parameters(model).values():
                parameter.mul_(1 + world.rank)
        drawn = {name: p.detach().clone() for name, p in parameters(model).items()}
        first = world.of_first(drawn)
        with torch.no_grad():
            for name, parameter in parameters(model).items():
                parameter.copy_(first[name])
        batches = dealt(world, collator, world.size * steps)
        want = alone(kind, model, batches)
        with torch.no_grad():
            for name, parameter in parameters(model).items():
                parameter.copy_(drawn[name])
        if regions:
            make_regions(model)
        seen = Seen(trainer)
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel) or change.get(
            "torch_compile_backend"
        )
        mine = batches[world.rank :: world.size]
        order = len(seen.batches) == len(mine) and all(
            torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(seen.batches, mine, strict=True)
        )
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "order": order,
            "broadcast": all(torch.equal(p, first[name]) for name, p in parameters(model).items()),
            "drawn_apart": world.rank == 0 or any(not torch.equal(drawn[n], first[n]) for n in first),
            "differs": same_bits(seen.gradients, want),
            "regions": len(region_layers(model)) if regions else 0,
            "loss": log[0]["loss"],
        }


def ddp_cases(world: World, folder: str, experts_folder: str) -> Any:
    results = {}
    for kind, collator, regions, checkpointing in itertools.product(
        ("hf", "sft"), ("packed", "padded"), (False, True), (False, True)
    ):
        odd = (kind == "sft") ^ (collator == "padded") ^ regions ^ checkpointing
        if odd and not LONG:  # half of them has every combination of three
            continue
        name = f"{kind} {collator} regions={regions} checkpointing={checkpointing}"
        results[name] = one_case(world, folder, kind, collator, regions, checkpointing)
    for kind in ("hf", "sft"):
        results[f"{kind} accumulated"] = one_case(
            world, folder, kind, "packed", False, False, gradient_accumulation_steps=2
        )
        # TRL adds a loss of the routers for each micro-batch of a rank, which one process adds otherwise.
        routers = {"router_aux_loss_coef": 0.0} if kind == "sft" else {}
        results[f"{kind} experts"] = one_case(
            world, experts_folder, kind, "packed", False, kind == "sft", EXPERTS, **routers
        )
    return results


def plain_ddp(world: World, folder: str) -> Any:
    """torch's own wrapper with each of its options, with and without regions and checkpointing; then frozen
    bytes that differ, and the base left mapped."""
    results = {}
    batches = dealt(world, "packed", world.size)
    total = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches)
    cases: list[tuple[dict[str, Any], bool, bool, bool]] = [
        ({"find_unused_parameters": True}, False, False, False),
        ({"find_unused_parameters": True}, True, True, False),
        ({"gradient_as_bucket_view": True}, False, True, False),
        ({"gradient_as_bucket_view": True}, True, False, False),
        ({"static_graph": True}, False, True, False),
        ({"static_graph": True}, True, True, False),
        ({}, False, False, True),
        ({}, True, True, True),
        ({"gradient_as_bucket_view": True, "static_graph": True}, True, False, True),
    ]
    for options, regions, checkpointing, compiled in cases if LONG else cases[1::2]:
        torch._dynamo.reset()
        model = adapted(folder, seed=world.rank)
        wrapped_first = {n: world.of_first(p.detach()) for n, p in model.named_parameters()}
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if regions:
            make_regions(model)
        plain = adapted(folder, seed=0)
        want = alone("hf", plain, batches)
        wrapped = DistributedDataParallel(model, **options)
        call = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
        found = []
        for _ in range(2):  # a static graph is learnt in the first
            model.zero_grad()
            given = {**batches[world.rank], "use_cache": False, "num_items_in_batch": torch.tensor(total)}
            (call(**given).loss * world.size).backward()
            found.append(same_bits({n: p.grad.clone() for n, p in parameters(model).items()}, want))
        same = all(torch.equal(p, wrapped_first[n]) for n, p in model.named_parameters())
        name = f"{options} regions={regions} checkpointing={checkpointing} compiled={compiled}"
        results[name] = {"differs": found, "broadcast": same}
    return results


def adapted(folder: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return mg.optimize(get_peft_model(base_of(folder), LORA)).train()


def anonymous() -> int:
    """KiB that this process holds beyond pages of files."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def bases(world: World, folder: str) -> Any:
    """What DDP does to frozen bytes, and what `share_base` makes of it."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    found: dict[str, Any] = {}
    for shared in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(base_of(folder), lora)
        packed = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
        found["kept"] = share_base(model, world) if shared else 0
        gc.collect()
        before, began = anonymous(), time.perf_counter()
        wrapped = DistributedDataParallel(model)
        seconds = time.perf_counter() - began
        grown = 1024 * (anonymous() - before)
        found[f"grown {shared}"], found[f"seconds {shared}"] = grown / packed, seconds
        del model, wrapped
    found["packed"] = packed
    model = get_peft_model(base_of(folder), lora)
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, mg.nn.QuantLinear))
    want = world.of_first(layer.values.clone())
    with torch.no_grad():
        layer.values.copy_(torch.arange(layer.values.numel()).reshape(want.shape) + 7 * world.rank)
    all_codes = world.of_first(layer.values.clone())
    try:
        share_base(model, world)
    except ValueError as error:
        found["refused"] = str(error)
    DistributedDataParallel(model)
    found["bytes"] = torch.equal(layer.values, all_codes) and len(set(all_codes.flatten().tolist())) == 256
    found["name"] = name
    return found
