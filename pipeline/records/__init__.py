"""Typed records: the JSON files that a stage promises to its readers, one module per record.

Pure data: nothing here reads a store or imports torch.
"""
