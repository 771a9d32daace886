"""The keys of a recipe: what they are called, what they mean, what is wrong with them."""
