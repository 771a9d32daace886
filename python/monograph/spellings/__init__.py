"""How producers write packed weights into checkpoints; one producer, one file."""
