"""``nightjar`` in this process, as the command line's tests run it."""

from tests.cli.conftest import nightjar

__all__ = ["nightjar"]
