"""The second engine of a recipe: the same keys drive a trainer of TRL over packed weights."""
