"""Worlds that are larger than the machine: predicted from measurements on it, or run dry in one process."""
