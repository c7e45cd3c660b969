"""Families of commands: their arguments, the calls into the rooms, where results become text. For `cli/__init__.py`."""
