"""A published version scores rows: a file's (``nightjar predict``) or a dataset's (the gate)."""
