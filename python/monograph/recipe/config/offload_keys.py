"""`gradient_checkpointing: offload` and `offload_disk`: where what a forward keeps waits for its backward."""

from __future__ import annotations

from monograph.recipe.config.device_keys import device_type
from monograph.recipe.config.keys import Recipe


def offload_place(recipe: Recipe) -> str | None:
    """ "disk", "host" for `offload` on another device than the CPU, or None."""
    if recipe.gradient_checkpointing == "offload" and device_type(recipe) != "cpu":
        return "host"
    return "disk" if recipe.offloads else None


def offload_folder(recipe: Recipe) -> str | None:
    return recipe.offload_folder or recipe.output_dir if offload_place(recipe) == "disk" else None


def check_offload(recipe: Recipe, errors: list[str], notices: list[str]) -> None:
    place, written = offload_place(recipe), f"gradient_checkpointing: {recipe.gradient_checkpointing}"
    kind = device_type(recipe)
    if recipe.gradient_checkpointing == "unsloth":
        notices.append(f"{written} is plain recomputation here; write offload_disk to offload")
    if recipe.gradient_checkpointing == "offload" and place == "disk":
        notices.append(f"{written}: activations are in host memory (cpu) already, so it means offload_disk")
    if recipe.offload_folder is not None and place != "disk":
        errors.append(
            "offload_folder: no file is written, so it would do nothing; write gradient_checkpointing: "
            "offload_disk beside it"
        )
    if place is not None and recipe.mode in ("whole_step", "inductor_whole_step"):
        errors.append(
            f"{written} with step_mode: {recipe.mode}: a whole step has no border between forward and "
            "backward; write step_mode: graph or inductor"
        )
    if place == "disk" and kind != "cpu" and recipe.mode in ("graph", "inductor"):
        errors.append(
            f"{written} with device: {kind} and step_mode: {recipe.mode}: the graph of another device "
            "offloads to host memory only; write gradient_checkpointing: offload"
        )
