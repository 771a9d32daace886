"""One contender of `monograph.bench trl`: a TRL trainer in a process of its own, that steps on command.

    python -m monograph.bench.trl_contender '{"contender": "ours", "kind": "sft", "folder": "...", ...}'

Prints one JSON object per line: after two steps {"loss", "load_s", "first_step_s"}, then for each line read
from stdin {"ms", "cpu_ms", "generation_cpu_ms", "loss"} of the next step. It ends with its input. With
"watched": N it takes N steps at once and prints how the log-probabilities of generator and trainer differ:
{"tokens", "differing", "largest", "mean"}.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{number}" for number in range(1000)]
ROWS = 32


def tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def dataset(job: dict[str, Any]) -> Any:
    """Random words; every row has the same number of tokens, eos included where TRL adds it."""
    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(words))

    length, prompt = job["length"], job["prompt"]
    if job["kind"] == "sft":
        return Dataset.from_dict({"text": [text(length - 1) for _ in range(ROWS)]})
    rows = {"prompt": [text(prompt) + " " for _ in range(ROWS)]}
    if job["kind"] == "dpo":
        for name in ("chosen", "rejected"):
            rows[name] = [text(length - prompt - 1) for _ in range(ROWS)]
    return Dataset.from_dict(rows)


def last_words(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between answers."""
    return [float(sum(map(ord, text[-8:])) % 97) for text in completions]


def trainer(job: dict[str, Any], output: str) -> Any:
    kind = job["kind"]
    library: Any = trl
    config, make, options = {
        "sft": (library.SFTConfig, library.SFTTrainer, {"per_device_train_batch_size": job["rows"]}),
        "dpo": (library.DPOConfig, library.DPOTrainer, {"per_device_train_batch_size": 1}),
        "grpo": (
            library.GRPOConfig,
            library.GRPOTrainer,
            {
                "per_device_train_batch_size": job["answers"],
                "num_generations": job["answers"],
                "max_completion_length": job["answer"],
                # Random weights hardly ever end an answer; this makes it never, so that all have one length.
                "generation_kwargs": {"min_new_tokens": job["answer"]},
            },
        ),
    }[kind]
    if kind != "grpo":
        options["max_length"] = job["length"]
    arguments = config(
        output_dir=output,
        max_steps=job.get("watched") or 100_000,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        torch_compile=job["compiled"],
        **({"torch_compile_backend": "aot_eager"} if job.get("regions") else {}),
        **options,
    )
    rewards = {"reward_funcs": last_words} if kind == "grpo" else {}
    made = make(
        model=load(job),
        args=arguments,
        train_dataset=dataset(job),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        **rewards,
    )
    if job["contender"] == "ours":
        import monograph as mg

        mg.optimize(made.model, regions=job.get("regions", False))
    return made


def load(job: dict[str, Any]) -> Any:
    if job["contender"] == "ours":
        import monograph as mg

        return mg.from_pretrained(job["folder"])
    return transformers.AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.bfloat16)


class Paced(transformers.TrainerCallback):
    """Two steps to warm up, then one for each line of stdin."""

    def __init__(self, out: Any, began: float) -> None:
        self.out, self.began = out, began
        self.losses: list[float] = []
        self.seconds: list[tuple[float, float]] = []
        self.loaded = self.mark = (0.0, 0.0)
        self.generation = 0.0  # processor time of this step

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.loaded = (time.perf_counter(), time.process_time())

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.mark = (time.perf_counter(), time.process_time())
        self.generation = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
        used = (time.perf_counter() - self.mark[0], time.process_time() - self.mark[1])
        self.seconds.append(used)
        if len(self.seconds) < 2:
            return
        if len(self.seconds) == 2:
            load = self.loaded[0] - self.began
            self._say({"loss": self.losses[0], "load_s": load, "first_step_s": self.seconds[0][0]})
        else:
            times = {"ms": used[0], "cpu_ms": used[1], "generation_cpu_ms": self.generation}
            self._say({name: 1e3 * x for name, x in times.items()} | {"loss": self.losses[-1]})
        if not sys.stdin.readline():
            control.should_training_stop = True

    def time_generation(self, base: Any) -> None:
        generate = base.generate

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return generate(*arguments, **options)
            finally:
                self.generation += time.process_time() - began

        base.generate = timed

    def _say(self, answer: dict[str, float]) -> None:
        print(json.dumps(answer), file=self.out, flush=True)


def watched(job: dict[str, Any], output: str) -> dict[str, float]:
    """Steps without a pause; how far trainer and generator are from each other."""
    from monograph.hf.trl.mismatch import watch

    made = trainer(job, output)
    mismatch = watch(made)
    made.train()
    names = ("tokens", "differing", "largest", "mean")
    return {name: getattr(mismatch, name) for name in names}


def main() -> None:
    job = json.loads(sys.argv[1])
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries print, too
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as output:
        if job.get("watched"):
            print(json.dumps(watched(job, output)), file=out, flush=True)
            return
        paced = Paced(out, time.perf_counter())
        made = trainer(job, output)
        training_step = made.training_step

        def step(*arguments: Any, **options: Any) -> torch.Tensor:
            loss: torch.Tensor = training_step(*arguments, **options)
            paced.losses.append(float(loss))
            return loss

        made.training_step = step
        paced.time_generation(made.model.get_base_model())
        made.add_callback(paced)
        made.train()


if __name__ == "__main__":
    main()
