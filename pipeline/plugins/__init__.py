"""Optional parts, found by entry points (``pyproject.toml``) and never imported by the core packages."""
