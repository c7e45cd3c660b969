"""Tower modules: their formulas, the names of their parameters, and what the planner charges for them."""

import copy

import pytest
import torch

from pipeline.records import TowerModuleSpec
from pipeline.towers import modules
from pipeline.towers.assignment import modules_costs
from pipeline.towers.modules import build_tower
from pipeline.training.linear import use_cpu_kernels

FEATURES, WIDTH = 5, 16
LOW_RANK = TowerModuleSpec(name="low_rank", dim=4, rank=8, cross_layers=2)
DCN_LOW_RANK = TowerModuleSpec(name="dcn_low_rank", dim=4, rank=8)


def embeddings(samples=7):
    return torch.randn(samples, FEATURES, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compiled(monkeypatch):
    """How often the compiled cross was called; it runs on any CPU that has its dot products."""
    kernels = modules.load_kernels("crosses")
    if kernels is None or not kernels.limit(2):
        pytest.skip("the compiled cross does not run on this CPU")
    calls, forward = [], kernels.forward

    def counted(*args):
        calls.append(args)
        return forward(*args)

    monkeypatch.setattr(kernels, "able", True)
    monkeypatch.setattr(kernels, "forward", counted)
    return calls


def test_mixtures_of_the_tower_cross_and_are_added_to_each_features_projection():
    module, given = build_tower(LOW_RANK, FEATURES, WIDTH, seed=3, number=0), embeddings()
    inner = given @ module.each.weight.T + module.each.bias
    assert inner.shape[2] == 6  # a third more than it sends, rounded up
    first = mixed = inner.flatten(1) @ module.mix.weight.T + module.mix.bias
    for layer in module.cross.layers:
        mixed = first * (mixed @ layer.weight.T + layer.bias) + mixed
    added = (mixed @ module.add.weight.T + module.add.bias).view(-1, FEATURES, 4)
    torch.testing.assert_close(module(given), inner[:, :, :4] + added)
    assert (module.vectors, module.dim) == (FEATURES, 4)


def test_a_rank_of_the_whole_tower_gives_every_vector_all_embeddings():
    """Without crosses it is a linear layer on the whole tower, of any matrix where the rank allows it."""
    spec = TowerModuleSpec(name="low_rank", dim=WIDTH, rank=FEATURES * WIDTH)
    low, whole = (
        build_tower(each, FEATURES, WIDTH, seed=3, number=0) for each in (spec, TowerModuleSpec(name="dcn", dim=WIDTH))
    )
    with torch.no_grad():
        for layer in (*low.cross.layers, *whole.cross):
            layer.weight.zero_()
        low.each.weight[:WIDTH] = torch.eye(WIDTH)
        low.mix.weight.zero_()
        spread = low.mix.weight.view(-1, FEATURES, low.each.out_features)
        for feature in range(FEATURES):
            rows = slice(feature * WIDTH, (feature + 1) * WIDTH)
            spread[rows, feature, :WIDTH] = torch.eye(WIDTH)
        low.add.weight.copy_(whole.project.weight - torch.eye(FEATURES * WIDTH))
    torch.testing.assert_close(low(embeddings()), whole(embeddings()), rtol=1e-4, atol=1e-5)


def crossing_tower():
    """A tower of ``DCN_LOW_RANK`` whose gate has departed from the initial zeros."""
    module = build_tower(DCN_LOW_RANK, FEATURES, WIDTH, seed=3, number=0)
    torch.nn.init.xavier_normal_(module.up.weight, generator=torch.Generator().manual_seed(2))
    return module


def test_all_features_cross_at_full_width_before_they_are_narrowed():
    module, given = crossing_tower(), embeddings()
    flat = given.flatten(1)
    gate = flat @ module.down.weight.T @ module.up.weight.T + module.up.bias
    crossed = flat * gate + flat
    mixed = (crossed @ module.mix.weight.T + module.mix.bias) @ module.add.weight.T + module.add.bias
    narrowed = crossed.view_as(given) @ module.each.weight.T + module.each.bias
    torch.testing.assert_close(module(given), narrowed + mixed.view(-1, FEATURES, 4))
    assert (module.vectors, module.dim) == (FEATURES, 4)


def test_it_begins_without_a_cross_and_with_projections_that_keep_lengths_and_angles():
    module, given = build_tower(DCN_LOW_RANK, FEATURES, WIDTH, seed=3, number=0), embeddings()
    mixed = (given.flatten(1) @ module.mix.weight.T) @ module.add.weight.T
    torch.testing.assert_close(module(given), given @ module.each.weight.T + mixed.view(-1, FEATURES, 4))
    torch.testing.assert_close(module.each.weight @ module.each.weight.T, torch.eye(4))


def test_in_bf16_a_compiled_cross_and_its_gradients_are_those_of_its_formula(compiled, monkeypatch):
    outcomes = []
    for kernels in (modules.load_kernels, lambda name: None):
        monkeypatch.setattr(modules, "load_kernels", kernels)
        module, given = crossing_tower(), embeddings(100).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = module(given)
        out.float().square().sum().backward()
        outcomes.append([out.detach().float(), given.grad, *(value.grad for value in module.parameters())])
    assert len(compiled) == 1
    for one, other in zip(*outcomes, strict=True):
        assert one.dtype == torch.float32 and (one - other).norm() < 0.02 * other.norm()


def in_bf16(module, given):
    with torch.autocast("cpu", torch.bfloat16):
        return module(given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_compiled_cross_leaves_parameters_of_other_dtypes_to_pytorch(compiled, dtype):
    module, given = build_tower(DCN_LOW_RANK, FEATURES, WIDTH, seed=3, number=0), embeddings()
    expected = in_bf16(module, given)
    assert len(compiled) == 1
    other = copy.deepcopy(module).to(dtype)
    torch.testing.assert_close(in_bf16(other, given), expected, rtol=0.05, atol=0.05)
    assert len(compiled) == 1


def test_an_exported_cross_consists_of_pytorchs_operations(compiled):
    class InBf16(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tower = build_tower(DCN_LOW_RANK, FEATURES, WIDTH, seed=3, number=0)

        def forward(self, given):
            return in_bf16(self.tower, given)

    program = torch.export.export(InBf16(), (embeddings(),), strict=False)
    assert not compiled
    torch.testing.assert_close(program.module()(embeddings()), InBf16()(embeddings()), rtol=0.05, atol=0.05)


def test_the_compiled_cross_refuses_to_be_differentiated_twice(compiled):
    module, given = build_tower(DCN_LOW_RANK, FEATURES, WIDTH, seed=3, number=0), embeddings().requires_grad_()
    (slope,) = torch.autograd.grad(in_bf16(module, given).float().square().sum(), given, create_graph=True)
    assert len(compiled) == 1
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()


def test_names_of_parameters_are_those_of_checkpoints_and_kernels_change_none():
    names = ["add", "cross.layers.0", "cross.layers.1", "each", "mix"]
    module, given = build_tower(LOW_RANK, FEATURES, WIDTH, seed=3, number=0), embeddings().requires_grad_()
    expected = [f"{name}.{kind}" for name in names for kind in ("bias", "weight")]
    assert sorted(dict(module.named_parameters())) == expected
    plain = module(given)
    use_cpu_kernels(module)
    assert sorted(dict(module.named_parameters())) == expected
    torch.testing.assert_close(module(given), plain)


def test_values_come_from_the_seed_and_the_towers_number():
    one, same, other = (build_tower(LOW_RANK, FEATURES, WIDTH, seed=3, number=number) for number in (0, 0, 1))
    assert torch.equal(one.mix.weight, same.mix.weight)
    assert not torch.equal(one.mix.weight, other.mix.weight)


def test_costs_are_those_of_the_products_forward_and_back():
    features, width, dim, rank, layers = 16, 128, 32, 64, 2
    low = TowerModuleSpec(name="low_rank", dim=dim, rank=rank, cross_layers=layers)
    products = features * width * 43 + features * 43 * rank + layers * rank**2 + rank * features * dim
    assert modules_costs(low, [features], width).flop == 6 * products
    whole = TowerModuleSpec(name="dcn", dim=dim, cross_layers=layers)
    size = features * width
    cross = TowerModuleSpec(name="dcn_low_rank", dim=dim, rank=rank)
    products = 3 * size * rank + size * dim + rank * features * dim
    assert modules_costs(cross, [features], width).flop == 6 * products
    assert modules_costs(whole, [features], width).flop == 6 * (layers * size**2 + size * features * dim)
    two, one = (modules_costs(low, [features] * count, width) for count in (2, 1))
    assert (two.flop, two.parameters) == (2 * one.flop, 2 * modules_costs(low, [features], width).parameters)
    assert modules_costs(TowerModuleSpec(), [features], width).flop == 0


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (TowerModuleSpec(), "pass_through"),
        (TowerModuleSpec(name="dlrm", c=1, p=2), "dlrm c=1 p=2"),
        (TowerModuleSpec(name="dcn", cross_layers=3), "dcn layers=3"),
        (LOW_RANK, "low_rank layers=2 rank=8"),
        (DCN_LOW_RANK, "dcn_low_rank rank=8"),
    ],
)
def test_a_label_names_the_module_with_its_sizes(spec, label):
    assert spec.label == label
