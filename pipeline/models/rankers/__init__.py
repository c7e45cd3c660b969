"""The torch module of each built-in ranker, composed of the parts in ``layers/``. Importing one loads torch."""
