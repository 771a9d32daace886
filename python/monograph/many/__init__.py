"""Many adapters trained in one process on one base, each with the bits that it has alone."""
