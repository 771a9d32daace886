"""From a YAML file to an adapter: `python -m monograph preprocess | train | generate CONFIG.yml`."""

from monograph.recipe.config.keys import DatasetKeys, Recipe
from monograph.recipe.config.read_config import ConfigError, ReadRecipe, check_keys, read_config

__all__ = ["ConfigError", "DatasetKeys", "ReadRecipe", "Recipe", "check_keys", "read_config"]
