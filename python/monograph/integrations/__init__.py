"""What is used of other libraries without being promised by them, one folder a library.

`<library>/private_names.py` is the only place that spells a private name. Its table says where each was read;
tests/python/test_private_names.py looks each up and fails by name when a new version has dropped it.
"""
