"""``nightjar init``: drafts the schema of a log from a sample of it."""
