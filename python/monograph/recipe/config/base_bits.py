"""load_in_4bit and load_in_8bit: how many bits the base of an adapter has."""

from __future__ import annotations

from monograph.recipe.config.key_row import Said, concerns
from monograph.recipe.config.keys import Recipe

INT8_NOTICE = (
    "load_in_8bit: the base becomes int8 with a scale for each row (W8A16); other than LLM.int8() it rounds "
    "weights alone: activations stay in 16 bits, and no column of outliers is kept apart"
)


@concerns("adapter load_in_4bit load_in_8bit")
def check_bits(recipe: Recipe, said: Said, stored: bool) -> None:
    """As in axolotl 4 bits go with adapter: qlora, 8 with lora. `stored`: the folder is quantised."""
    errors, notices = said.errors, said.notices
    if recipe.adapter == "qlora" and recipe.load_in_4bit is False:
        errors.append("adapter is qlora and load_in_4bit false; write adapter: lora for a 16-bit base")
    if recipe.adapter == "lora" and recipe.load_in_4bit:
        errors.append("adapter is lora and load_in_4bit true; write adapter: qlora")
    if not recipe.load_in_8bit or recipe.adapter is None:
        return
    if recipe.load_in_4bit:
        errors.append("load_in_8bit and load_in_4bit are true; write one of the two")
    elif recipe.adapter == "qlora":
        errors.append("adapter is qlora and load_in_8bit true; write adapter: lora for an int8 base")
    elif stored:
        notices.append("load_in_8bit: base_model is quantised already and stays as it is")
    else:
        notices.append(INT8_NOTICE)
