"""PEFT.

It is imported first: its import installs packed_layers.py, which imports the modules of this folder.
"""

import peft  # noqa: F401
