"""Memory: tensors that leave it (`offload/`), a base larger than it (`base_memory/`), mapped files."""
