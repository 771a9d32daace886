"""A base larger than memory: its files are mapped, read ahead and let go: docs/explain/offload.md."""

from monograph.memory.base_memory.read_ahead import BaseMemory, base_memory_of, limit_base_memory
from monograph.memory.base_memory.sizes import bytes_of

__all__ = ["BaseMemory", "base_memory_of", "bytes_of", "limit_base_memory"]
