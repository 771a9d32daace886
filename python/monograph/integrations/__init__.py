"""What belongs to another library, one folder per library: transformers, PEFT, TRL, accelerate, torch.

`<library>/private_names.py` is the only file that spells a name which the library does not promise. Its table
says where each was read; tests/python/upstream/test_private_names.py looks each up and fails by name when a
new version has dropped it.
"""
