"""A run of a recipe under TRL: packed base, TRL's trainer, Monograph's layers beneath it, the same files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from monograph.memory.offload import offload_activations
from monograph.recipe.config.compile_options import compile_options
from monograph.recipe.config.keys import TrlRecipe
from monograph.recipe.config.model_folder import model_folder, naming
from monograph.recipe.config.placement import offload_folder, offload_place
from monograph.recipe.config.read_config import ConfigError
from monograph.recipe.config.trl_arguments import config_arguments, field_names
from monograph.recipe.config.trl_choose import trainer_classes
from monograph.recipe.data.encode import load_tokenizer
from monograph.recipe.data.full_disk import naming_file
from monograph.recipe.data.new_tokens import check_new_rows_are_trained
from monograph.recipe.data.token_rows import check_documents
from monograph.recipe.run.adapter_names import check_names
from monograph.recipe.run.base_fingerprint import make_base_fingerprint, packing_of, write_base_fingerprint
from monograph.recipe.run.checkpoint import STATE, checkpoint_to_resume, move_into, write_folder
from monograph.recipe.run.interrupt import Interrupt
from monograph.recipe.run.load_model import adapter_config, is_packed, load_base, set_router_loss
from monograph.recipe.run.metrics import plot_losses
from monograph.recipe.run.outcome import Outcome
from monograph.recipe.run.output_folder import finished_run, held, set_aside
from monograph.recipe.run.run_identity import kernels_identity
from monograph.recipe.run.trained_base import check_trained_base
from monograph.recipe.trl.callbacks import Records, Watch
from monograph.recipe.trl.datasets import make_datasets
from monograph.recipe.trl.import_path import callback_classes, reward_functions
from monograph.recipe.trl.optimizers import put_optimizer, put_schedule
from monograph.recipe.trl.resumed_run import NAME as RUN
from monograph.recipe.trl.resumed_run import compare_run, trl_identity, with_rows
from monograph.recipe.trl.unfreeze import unfreeze

_OPTIMIZER = "optimizer.pt"  # as transformers saves it


def make_trainer(recipe: TrlRecipe) -> Any:
    """The trainer of TRL with Monograph's layers beneath it, ready for `train()`."""
    from monograph.hf.optimize import optimize

    if (os.environ.get("WORLD_SIZE") or "1") != "1":
        raise ValueError(
            f"trainer: trl runs in one process, and WORLD_SIZE is {os.environ['WORLD_SIZE']}; start it "
            "without torchrun, or write a script (docs/reference/training.md, other trainers on ranks)"
        )
    recipe = replace(recipe, device=None, device_map=None)  # the CPU, as TRL's arguments say
    trainer_class, config_class = trainer_classes(recipe.method)
    extra: dict[str, Any] = {}
    with _wrong_recipe():
        if recipe.method.rows == "prompts":
            extra["reward_funcs"] = reward_functions(recipe)
        classes = callback_classes(recipe)
    callbacks = [made() for made in classes]
    _name_project(recipe)
    with _wrong_recipe():
        arguments = config_class(**config_arguments(recipe, field_names(config_class)))
    folder = model_folder(recipe)
    tokenizer = load_tokenizer(recipe, folder)
    datasets = make_datasets(recipe, tokenizer)
    if datasets.told:
        print(datasets.told, file=sys.stderr)
    parts = [part for part in (datasets.train, datasets.eval) if part is not None and hasattr(part, "iter")]
    check_documents(
        recipe, folder, tokenizer, [part for part in parts if "input_ids" in (part.column_names or ())]
    )
    model, peft_config = _model(recipe, folder)
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=datasets.train,
        eval_dataset=datasets.eval,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=callbacks,
        **extra,
    )
    if recipe.adapter is not None:
        check_new_rows_are_trained(trainer.model)
    if recipe.adapter is not None:
        check_names(recipe, trainer.model)
    with warnings.catch_warnings():
        if recipe.adapter is None:  # no LoRA layers are meant to be there
            warnings.filterwarnings("ignore", "monograph.optimize fused no layer")
        optimize(
            trainer.model,
            attention=recipe.attention == "monograph",
            regions=recipe.step_mode == "graph" and arguments.torch_compile,
        )
    with _wrong_recipe():
        put_optimizer(recipe, trainer)
    put_schedule(recipe, trainer)
    return trainer


@contextmanager
def _wrong_recipe() -> Iterator[None]:
    """What is said inside is about the recipe, not about data."""
    try:
        yield
    except ValueError as error:
        raise ConfigError("recipe", [" ".join(str(error).split())]) from error


@contextmanager
def _naming_metric(recipe: TrlRecipe, records: Records) -> Iterator[None]:
    """A metric that no evaluation gives is a mistake of the recipe; transformers raises KeyError."""
    try:
        yield
    except KeyError as error:
        if "metric_for_best_model" not in str(error):
            raise
        found = sorted({name for line in records.lines for name in line if name.startswith("eval_")})
        text = f"metric_for_best_model is {recipe.metric_for_best_model}, wanted one of {', '.join(found)}"
        raise ConfigError("recipe", [text]) from error


@contextmanager
def _whole_checkpoints(recipe: TrlRecipe, trainer: Any, resumed: str | None) -> Iterator[None]:
    """What ends a run inside a save leaves no half of a checkpoint; a full disk is named with its folder."""
    try:
        yield
    except BaseException:
        path = os.path.join(recipe.output_dir, f"checkpoint-{trainer.state.global_step}")
        half = os.path.isdir(path) and not os.path.isfile(os.path.join(path, RUN))  # which is written last
        if half and not (resumed and os.path.samefile(path, resumed)):
            shutil.rmtree(path, ignore_errors=True)
        with naming_file(path):
            raise


def _model(recipe: TrlRecipe, folder: str) -> tuple[Any, Any]:
    """The base with the adapter of lora_model_dir, or the base and the config of the adapter it will get."""
    from peft import PeftModel

    from monograph.hf.peft.packed_layers import refuse_packed_copies
    from monograph.packing.stateful_layers import refuse_packed

    base = load_base(recipe, folder)
    set_router_loss(recipe, base)
    if recipe.sample_packing or recipe.packs_evaluation:
        refuse_packed(base, "sample_packing: true")
    if recipe.adapter is None:
        with _wrong_recipe():
            unfreeze(base, recipe.unfrozen_parameters)
        return base, None
    if recipe.lora_model_dir:
        check_trained_base(recipe, recipe.lora_model_dir, folder, base)
        with naming("lora_model_dir", recipe.lora_model_dir):
            return PeftModel.from_pretrained(base, recipe.lora_model_dir, is_trainable=True), None
    refuse_packed_copies(base, recipe.lora_modules_to_save, "lora_modules_to_save")
    return base, adapter_config(recipe, base)


def _name_project(recipe: TrlRecipe) -> None:
    """Weights & Biases takes them from the environment."""
    for name, value in (("WANDB_PROJECT", recipe.wandb_project), ("WANDB_ENTITY", recipe.wandb_entity)):
        if value:
            os.environ[name] = value


def train(recipe: TrlRecipe, *, quiet: bool = False) -> Outcome:
    """Runs a recipe to its end, or to the next Ctrl-C or SIGTERM."""
    with held(recipe.output_dir):
        return _train(recipe, quiet)


def _train(recipe: TrlRecipe, quiet: bool) -> Outcome:
    resumed = _checkpoint(recipe)
    if resumed:
        compare_run(resumed, trl_identity(recipe))  # before anything is loaded
    trainer = make_trainer(recipe)
    if quiet:
        from transformers import PrinterCallback, ProgressCallback

        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
    identity = with_rows(trl_identity(recipe) | kernels_identity(recipe), trainer.train_dataset)
    told = compare_run(resumed, identity)
    if resumed:
        check_trained_base(recipe, resumed, model_folder(recipe), trainer.model)
    records = Records(recipe, _base_fingerprint(recipe, trainer.model), identity)
    for line in (*told, *set_aside(recipe.output_dir, resumed, _step_of(resumed) if resumed else 0)):
        print(line, file=sys.stderr)
    with (
        compile_options(recipe.torch_compile_options, recipe.torch_compile_mode),
        _offload(recipe, trainer.model),
        Interrupt() as interrupt,
    ):
        trainer.add_callback(records)
        trainer.add_callback(Watch(recipe, interrupt))
        if recipe.early_stopping_patience:
            from transformers import EarlyStoppingCallback

            trainer.add_callback(EarlyStoppingCallback(recipe.early_stopping_patience))
        with _naming_metric(recipe, records), _whole_checkpoints(recipe, trainer, resumed):
            trainer.train(resume_from_checkpoint=resumed)
    state = trainer.state
    if interrupt.signal is None:
        wrote = _finish(recipe, trainer, records)
        if not quiet:
            print(wrote)
    else:
        print(f"stopped after step {state.global_step}; go on with --resume-from-checkpoint auto")
    return Outcome(
        state.global_step, state.max_steps, interrupt.signal, state.best_global_step, recipe.output_dir
    )


def _base_fingerprint(recipe: TrlRecipe, model: Any) -> dict[str, Any]:
    """Of the base of this run. What an earlier run has left keeps its own until it is replaced."""
    folder, output_dir = model_folder(recipe), recipe.output_dir
    record = make_base_fingerprint(folder, output_dir, quantised=is_packed(model), packed=packing_of(model))
    if not finished_run(output_dir):
        write_base_fingerprint(record, output_dir)
    return record


def _offload(recipe: TrlRecipe, model: Any) -> AbstractContextManager[Any]:
    """What autograd keeps inside waits elsewhere."""
    place = offload_place(recipe)
    if place is None:
        return nullcontext()
    return offload_activations(model, to=place, folder=offload_folder(recipe))


def _checkpoint(recipe: TrlRecipe) -> str | None:
    """Where the run goes on; a checkpoint of Monograph's own trainer is no such place."""
    found = checkpoint_to_resume(
        recipe.output_dir, recipe.resume_from_checkpoint, recipe.auto_resume_from_checkpoints
    )
    for name in (STATE, _OPTIMIZER) if found else ():
        if not os.path.isfile(os.path.join(str(found), name)):
            raise ValueError(
                f"resume_from_checkpoint: {found} has no {name}; wanted one of a run with trainer: trl"
            )
    return found


def _step_of(checkpoint: str) -> int:
    with open(os.path.join(checkpoint, STATE), encoding="utf-8") as file:
        return json.load(file)["global_step"]


def _finish(recipe: TrlRecipe, trainer: Any, records: Records) -> str:
    """Writes the adapter that the run was for, with tokenizer, recipe and plot; says where."""

    def write(folder: str) -> None:
        trainer.model.save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)
        records.write_beside(folder, trainer.model)

    final = os.path.join(recipe.output_dir, "final")
    write_folder(final, write)
    move_into(final, recipe.output_dir)
    plot = os.path.join(recipe.output_dir, "loss.png")
    plot_losses({"": records.lines}, plot)
    if recipe.hub_model_id:
        trainer.push_to_hub()
    return f"{'adapter' if recipe.adapter else 'model'} in {recipe.output_dir}; losses in {plot}"
