"""What is optional: found by entry points (``pyproject.toml``), and never imported by a room of the core."""
