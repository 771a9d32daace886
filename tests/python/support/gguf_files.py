"""The end of every file that the gguf package writes."""

from typing import Any


def write_out(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
