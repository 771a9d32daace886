"""A run of a recipe: model, steps, checkpoints, what is beside an adapter."""
