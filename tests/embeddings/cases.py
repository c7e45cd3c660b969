"""What the ranks of the sharding tests run, and the same in plain torch."""

from itertools import pairwise

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.embeddings.collection import build_collection, pooled_stack
from pipeline.embeddings.row_access import RowAccess
from pipeline.embeddings.sharding import shard_model
from pipeline.embeddings.table_training import clip_table_gradients, replica_optimizer, set_sparse_lr
from pipeline.embeddings.tables import dense_parameters
from pipeline.models.settings import DlrmConfig
from pipeline.specs import TABLE_OPTIMIZERS
from tests.embeddings.ranks import DIM, ROWS, plan_for, schema

SEED, BATCH, STEPS, LR, EPS = 5, 12, 5, 0.1, 1e-8


class Toy(nn.Module):
    """Tables and one linear layer."""

    def __init__(self):
        super().__init__()
        self.collection = build_collection(schema(), DlrmConfig(embedding_dim=DIM), torch.device("meta"))
        self.head = nn.Linear(len(ROWS) * DIM, 1)
        nn.init.constant_(self.head.weight, 0.3)
        nn.init.zeros_(self.head.bias)

    def forward(self, kjt):
        stack = pooled_stack(self.collection(kjt), list(ROWS))
        return stack, self.head(stack.flatten(1)).squeeze(1)


def batch(step):
    """Global batch: ids per feature [F][B, 2] (two ids per row, so that rows pool) and labels [B]."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = [torch.randint(0, rows, (BATCH, 2), generator=generator) for rows in ROWS.values()]
    return ids, torch.randint(0, 2, (BATCH,), generator=generator).float()


def kjt_of(ids):
    values = torch.cat([part.flatten() for part in ids]).int()
    return KeyedJaggedTensor(list(ROWS), values, lengths=torch.full((len(ids) * len(ids[0]),), 2, dtype=torch.int32))


def rate(step):
    return LR / (step + 1)


def make(plan, seed=SEED, ssd=None, optimizer="rowwise_adagrad", device="cpu", clip=None):
    model = Toy()
    model.head.to(device)
    learning = TABLE_OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    dmp = shard_model(model, plan, "collection", torch.device(device), learning, row_store=ssd)
    if clip is not None:
        clip_table_gradients(dmp, clip)
    access = RowAccess(dmp)
    access.initialise(seed)
    return dmp, access


def train(dmp, first=0, last=STEPS, device="cpu"):
    """Steps [first, last) on this rank's slice; outputs of each step [b, F, D]."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(dense_parameters(dmp).values(), lr=0.1)
    tables = replica_optimizer(dmp)
    outputs = {}
    size = BATCH // world
    for step in range(first, last):
        set_sparse_lr(dmp, rate(step))
        ids, labels = batch(step)
        part = slice(rank * size, (rank + 1) * size)
        stack, logits = dmp(kjt_of([i[part] for i in ids]).to(device))
        for each in (optimizer, tables):
            if each is not None:
                each.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, labels[part].to(device)).backward()
        for each in (optimizer, tables):
            if each is not None:
                each.step()
        outputs[f"output{step}"] = stack.detach().clone()
    return outputs


def shards_to_tensors(access):
    """Every owned shard by a name that says where it lies."""
    tensors = {}
    for s in access.local_shards():
        if s.owner:
            tensors[f"{s.table}|{s.row}|{s.column}|weight"] = s.weight.clone()
            tensors |= {f"{s.table}|{s.row}|{s.column}|sum": state.clone() for state in s.state.values()}
    return tensors


def run_shardings(folder, kinds, local, clip=None):
    """Train each sharding from the same start and leave outputs, first and last tables in ``folder``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, kind in kinds.items():
        dmp, access = make(plan_for(kind, world, local), clip=clip)
        save_file(shards_to_tensors(access), folder / f"{name}-start-{rank}.safetensors")
        views = access.local_shards()
        outputs = train(dmp)
        again = access.local_shards()
        assert all(a.weight.data_ptr() == b.weight.data_ptr() for a, b in zip(views, again, strict=True))
        assert all(torch.equal(a.weight, b.weight) for a, b in zip(views, again, strict=True))
        save_file({**outputs, **shards_to_tensors(access)}, folder / f"{name}-end-{rank}.safetensors")


def assemble(folder, stem, world):
    """Whole tables, and sums per column cut, from the ranks' shards; outputs in global batch order."""
    weights = {name: torch.full((rows, DIM), float("nan")) for name, rows in ROWS.items()}
    sums, outputs = {name: {} for name in ROWS}, {}
    for rank in range(world):
        for key, tensor in load_file(folder / f"{stem}-{rank}.safetensors").items():
            if key.startswith("output"):
                outputs.setdefault(int(key[6:]), []).append(tensor)
                continue
            table, row, column, what = key.split("|")
            row, column = int(row), int(column)
            if what == "weight":
                weights[table][row : row + tensor.shape[0], column : column + tensor.shape[1]] = tensor
            else:
                whole = sums[table].setdefault(column, torch.full((ROWS[table],), float("nan")))
                whole[row : row + len(tensor)] = tensor
    return weights, sums, {step: torch.cat(parts) for step, parts in outputs.items()}


def reference(start, blocks, clip=None):
    """The same steps in plain torch. ``blocks``: by table, the column cuts that keep an Adagrad sum of their own."""
    weights = {name: start[name].clone() for name in ROWS}
    sums = {name: torch.zeros(len(blocks[name]) - 1, rows) for name, rows in ROWS.items()}
    head, bias = torch.full((len(ROWS) * DIM,), 0.3), torch.zeros(1)
    outputs = []
    for step in range(STEPS):
        ids, labels = batch(step)
        leaves = [head, bias, *weights.values()]
        for leaf in leaves:
            leaf.requires_grad_().grad = None
        stack = torch.stack([weights[name][i].sum(1) for name, i in zip(ROWS, ids, strict=True)], dim=1)
        if clip is not None:
            stack.register_hook(lambda gradient: gradient.clamp(-clip, clip))
        logits = stack.flatten(1) @ head + bias
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        outputs.append(stack.detach())
        with torch.no_grad():
            head.sub_(0.1 * head.grad)
            bias.sub_(0.1 * bias.grad)
            for name, weight in weights.items():
                for k, (low, high) in enumerate(pairwise(blocks[name])):
                    part = slice(low, high)
                    grad = weight.grad[:, part]
                    sums[name][k] += grad.square().mean(1)
                    weight[:, part].sub_(rate(step) * grad / (sums[name][k].sqrt() + EPS)[:, None])
    return outputs, {name: w.detach() for name, w in weights.items()}, sums
