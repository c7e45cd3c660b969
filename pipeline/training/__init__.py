"""Training and prediction: global batches from Parquet, the loop over TorchRec's sharded tables, guards."""
