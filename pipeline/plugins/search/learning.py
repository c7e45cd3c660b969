"""The steps of a search: weights and probabilities learn in turns; their state, kept in the store."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import functional

from pipeline.checkpoint.container import read_tensors, write_tensors
from pipeline.checkpoint.train_state import flatten_optimizer, load_optimizer
from pipeline.config import Config
from pipeline.embeddings.table_optimizers import table_rules
from pipeline.models.layers.perceptron import initialise
from pipeline.plugins.search.architecture import Choices, Costs, Gates
from pipeline.plugins.search.rows import SearchBatch
from pipeline.plugins.search.supernet import SearchTables, SuperNet
from pipeline.records.dataset import DatasetSchema
from pipeline.specs.optimizers import ParameterGroup
from pipeline.store.artifacts import Store
from pipeline.training.lr_schedule import lr_factor
from pipeline.training.model import compute_dtype

DIGEST = 16  # bytes of XXH3-128 before the tensors
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SearchState:
    """Tensors, and JSON data, from which floats come back with the same bits."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class SearchStore:
    """A search's state in ``folder`` of ``store``. ``key``: what equal searches have in common."""

    store: Store
    folder: str
    key: str

    @property
    def path(self) -> str:
        """The file of the state, relative to the store."""
        return f"{self.folder}/search.state"

    def write(self, state: SearchState) -> None:
        """Replace what was kept, atomically. The file is put together in memory first."""
        tensors = {name: each.detach() for name, each in state.tensors.items()}
        buffer = io.BytesIO()
        # Reserve room for the digest, which is known only once the rest is written.
        buffer.write(bytes(DIGEST))
        write_tensors(buffer, tensors, {"key": self.key, "values": json.dumps(state.values)})
        with buffer.getbuffer() as whole:
            whole[:DIGEST] = xxhash.xxh3_128(whole[DIGEST:]).digest()
        self.store.write_bytes(self.path, buffer.getvalue())

    def read(self) -> SearchState | None:
        """Return the kept state; None if there is none, or it is damaged or of another search."""
        try:
            data = self.store.fs.cat_file(self.store.full(self.path))
        except FileNotFoundError:
            return None
        where = self.store.url_of(self.path)
        body = memoryview(data)[DIGEST:]
        if xxhash.xxh3_128(body).digest() != bytes(data[:DIGEST]):
            log.warning("%s is damaged: the search begins anew", where)
            return None
        # Copy to writable memory: the tensors share it, and torch warns of read-only bytes.
        tensors, about = read_tensors(bytearray(body), where)
        if about["key"] != self.key:
            log.info("%s is of a search with other settings: this one begins anew", where)
            return None
        return SearchState(tensors=tensors, values=json.loads(about["values"]))

    def remove(self) -> None:
        """Remove what was kept, if anything was."""
        if self.store.exists(self.path):
            self.store.fs.rm(self.store.full(self.path))


class Learner:
    """The super-net, its tables and its choices, with what trains each of them.

    ``total``: steps of the weights, over which the learning rates follow ``train.schedule``.
    """

    def __init__(self, config: Config, schema: DatasetSchema, choices: Choices, total: int, start: float) -> None:
        self.config, self.choices, self.total = config, choices, total
        train, search = config.train, config.search
        dtype = compute_dtype(train.precision, torch.device("cpu"))
        self.net = initialise(SuperNet(config.model, schema, config.seed, dtype), config.seed)  # type: ignore[arg-type]
        self.net.start_at(start)
        self.tables = SearchTables(schema, config.model, table_rules(config.model, train), config.seed)
        group = ParameterGroup(list(self.net.parameters()), train.lr, train.weight_decay)
        self.dense = train.dense_spec.build([group])
        self.architecture = torch.optim.Adam(choices.parameters(), lr=search.lr, betas=(0.9, 0.99))

    def learn_weights(self, rows: SearchBatch, step: int, temperature: float, *, whole: bool = False) -> float:
        """Take a step (from 0) of the weights for an architecture drawn at ``temperature``; return the mean log loss.

        With ``whole``, use all columns and pairs.
        """
        with torch.no_grad():
            gates = self.choices.draw(temperature, self.net.measured if whole else ())
        loss = self._loss(rows, gates)
        # The dense optimizer takes its rate from its groups, while the tables take the factor: both follow one
        # schedule.
        factor = lr_factor(self.config.train, step, self.total)
        self.dense.zero_grad(set_to_none=True)
        loss.backward()
        for group in self.dense.param_groups:
            group["lr"] = self.config.train.lr * factor
        self.dense.step()
        self.tables.step(self.config.train.sparse_lr, factor, step + 1)
        return loss.item()

    def learn_choices(self, rows: SearchBatch, costs: Costs, temperature: float) -> tuple[float, float]:
        """Take a step of the probabilities; return the log loss of a drawn architecture and the expected cost."""
        # The weights do not change in this step, and must not get gradients either. ``SearchTables.step`` clears those
        # of the rows only after using them, so these would add to the next step of the weights.
        weights = [*self.net.parameters(), self.tables.rows]
        for each in weights:
            each.requires_grad_(False)
        loss = self._loss(rows, self.choices.draw(temperature))
        cost = costs.expected(self.choices.probabilities())
        self.architecture.zero_grad(set_to_none=True)
        (loss + cost).backward()
        assert self.choices.logits.grad is not None
        # Do not learn measured decisions: at a gate of 1, the gradient is that of a slight change, which weights make
        # up for. It says little about the cost of leaving the choice out.
        for place, decision in enumerate(self.choices.decisions):
            if decision.name in self.net.measured:
                self.choices.logits.grad[place] = 0
        self.architecture.step()
        for each in weights:
            each.requires_grad_(True)
        return loss.item(), cost.item()

    def sort_columns(self) -> None:
        """Turn every table to its principal axes, so that its first columns are the best of their number.

        The model stays the same: the projections are turned back.
        """
        self.net.project.data = self.tables.turn(self.net.project.data)

    @torch.no_grad()
    def compare(self, batches: Sequence[SearchBatch], chosen: Gates) -> dict[str, Tensor]:
        """Log loss that each choice by itself adds to that of the architecture ``chosen``, the mean over equal batches.

        [choices] of each decision that is measured; 0 for the choice that is in ``chosen``.
        """
        added = {name: torch.zeros(len(chosen[name])) for name in sorted(self.net.measured)}
        for rows in batches:
            # Choices act after the lookup, so one lookup serves all of them.
            embeddings = self.tables(rows.ids, rows.lengths, rows.id_weights)
            base = self._loss(rows, chosen, embeddings)
            for name, losses in added.items():
                for place, gate in enumerate(torch.eye(len(losses))):
                    if not chosen[name][place]:
                        losses[place] += self._loss(rows, {**chosen, name: gate}, embeddings) - base
        for losses in added.values():
            losses /= len(batches)
        return added

    def state(self) -> SearchState:
        """Return all state that a step changes."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.net.named_parameters():
            tensors[f"net/{name}"] = parameter
        for name, each in self.tables.state.items():
            tensors[f"tables/{name}"] = each
        tensors |= {"rows": self.tables.rows, "logits": self.choices.logits}
        # With this state, a search that goes on after a stop draws what it would have drawn without it.
        tensors["generator"] = self.choices.generator.get_state()
        values: dict[str, Any] = {}
        for name, (optimizer, parameters) in self._optimizers().items():
            parts, values[name] = flatten_optimizer(optimizer, parameters)
            for part, each in parts.items():
                tensors[f"{name}/{part}"] = each
        return SearchState(tensors=tensors, values=values)

    @torch.no_grad()
    def restore(self, state: SearchState) -> None:
        """Put ``state`` in place."""
        for name, parameter in self.net.named_parameters():
            parameter.copy_(state.tensors[f"net/{name}"])
        for name, values in self.tables.state.items():
            values.copy_(state.tensors[f"tables/{name}"])
        self.tables.rows.copy_(state.tensors["rows"])
        self.choices.logits.copy_(state.tensors["logits"])
        self.choices.generator.set_state(state.tensors["generator"])
        for name, (optimizer, parameters) in self._optimizers().items():
            own = {}
            for key, each in state.tensors.items():
                prefix, _, part = key.partition("/")
                if part and prefix == name:
                    own[part] = each
            load_optimizer(optimizer, parameters, own, state.values[name])

    def _optimizers(self) -> dict[str, tuple[torch.optim.Optimizer, dict[str, Tensor]]]:
        """Return the optimizers of the weights and of the choices, with their parameters by name."""
        return {
            "dense": (self.dense, dict(self.net.named_parameters())),
            "architecture": (self.architecture, dict(self.choices.named_parameters())),
        }

    def _loss(self, rows: SearchBatch, gates: Gates, embeddings: Tensor | None = None) -> Tensor:
        """Return the rows' mean log loss; ``embeddings`` are the rows' embeddings, if known."""
        if embeddings is None:
            embeddings = self.tables(rows.ids, rows.lengths, rows.id_weights)
        logits: Tensor = self.net(rows.dense, embeddings, gates)
        # If rows without a click were sampled, the log odds of the kept rows are higher by this offset.
        if rows.offset is not None:
            logits = logits + rows.offset
        # The weights of a batch sum to 1 and are 0 for padding, so this sum is the mean over the rows.
        return functional.binary_cross_entropy_with_logits(logits, rows.labels, rows.weights, reduction="sum")
