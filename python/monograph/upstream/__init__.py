"""Other libraries as this release knows them: private names, tested versions, hooks on their import.

`<library>_names.py` is the only file that spells a name which the library does not promise. Its table says
where each was read; tests/python/upstream/test_private_names.py looks each up and fails by name when a new
version has dropped it.
"""
