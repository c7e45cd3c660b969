"""Training and prediction: global batches from Parquet, the loop over TorchRec's sharded tables, guards."""

from __future__ import annotations

from pipeline.training.data import Batch, BatchReader, Order
from pipeline.training.loop import train
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import Predictions, predict
from pipeline.training.trainer import Trainer

__all__ = ["Batch", "BatchReader", "Order", "Predictions", "SplitReader", "Trainer", "predict", "train"]
