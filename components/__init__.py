"""TorchX components, all in one file: ``torchx run -s local_cwd components/nightjar.py:ingest -- <overrides>``."""
