"""The commands of `python -m monograph`, one file each."""
