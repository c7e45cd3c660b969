"""The steps of a search: the super-net's weights and the choices' probabilities learn in turns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.config import Config
from pipeline.embeddings.rules import table_rules
from pipeline.models.layers import initialise
from pipeline.records import DatasetSchema
from pipeline.search.choices import Choices, Gates
from pipeline.search.cost import Costs
from pipeline.search.rows import Rows
from pipeline.search.supernet import SuperNet
from pipeline.search.tables import Tables
from pipeline.specs.dense_optimizer import DenseGroup
from pipeline.training.schedule import lr_factor


class Learner:
    """The super-net, its tables and its choices, with what trains each of them.

    ``total``: steps of the weights, over which the learning rates follow ``train.schedule``.
    """

    def __init__(self, config: Config, schema: DatasetSchema, choices: Choices, total: int, start: float) -> None:
        self.config, self.choices, self.total = config, choices, total
        train, search = config.train, config.search
        self.net = initialise(SuperNet(config.model, schema, config.seed), config.seed)  # type: ignore[arg-type]
        self.net.start_at(start)
        self.tables = Tables(schema, config.model, table_rules(config.model, train), config.seed)
        group = DenseGroup(list(self.net.parameters()), train.lr, train.weight_decay)
        self.dense = train.dense_spec.build([group])
        self.architecture = torch.optim.Adam(choices.parameters(), lr=search.lr, betas=(0.9, 0.99))

    def learn_weights(self, rows: Rows, step: int, temperature: float) -> float:
        """A step (from 0) of the weights for an architecture drawn at ``temperature``; the rows' mean log loss."""
        with torch.no_grad():
            gates = self.choices.draw(temperature)
        loss = self._loss(rows, gates)
        factor = lr_factor(self.config.train, step, self.total)
        self.dense.zero_grad(set_to_none=True)
        loss.backward()
        for group in self.dense.param_groups:
            group["lr"] = self.config.train.lr * factor
        self.dense.step()
        self.tables.step(self.config.train.sparse_lr * factor, factor, step + 1)
        return loss.item()

    def learn_choices(self, rows: Rows, costs: Costs, temperature: float) -> tuple[float, float]:
        """A step of the probabilities: log loss of a drawn architecture plus the expected cost. Returns both."""
        weights = [*self.net.parameters(), self.tables.rows]
        for each in weights:
            each.requires_grad_(False)
        loss = self._loss(rows, self.choices.draw(temperature))
        cost = costs.expected(self.choices.probabilities())
        self.architecture.zero_grad(set_to_none=True)
        (loss + cost).backward()
        self.architecture.step()
        for each in weights:
            each.requires_grad_(True)
        return loss.item(), cost.item()

    def _loss(self, rows: Rows, gates: Gates) -> Tensor:
        embeddings = self.tables(rows.ids, rows.lengths, rows.id_weights)
        logits: Tensor = self.net(rows.dense, embeddings, gates)
        if rows.offset is not None:
            logits = logits + rows.offset
        return functional.binary_cross_entropy_with_logits(logits, rows.labels, rows.weights, reduction="sum")
