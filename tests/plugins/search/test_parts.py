"""The searchable parts: what they decide, how they act in the super-net, the settings they lead to."""

from dataclasses import replace

import pytest
import torch

from pipeline.config import Config
from pipeline.config.model import TableConfig
from pipeline.models.build import build_model
from pipeline.plugins.search.architecture import Choices
from pipeline.plugins.search.parts import SPECS
from pipeline.plugins.search.supernet import SuperNet
from pipeline.specs import Decision, ModelInputs, SearchPart
from tests.plugins.search.cases import SCHEMA, config

WIDTHS, INTERACTIONS, MLPS = SPECS


def net_of(whole: Config, *parts: SearchPart) -> tuple[SuperNet, list[Decision]]:
    torch.manual_seed(1)
    net = SuperNet(whole.model, SCHEMA, 1)  # type: ignore[arg-type]
    decisions = []
    for part in parts:
        own = list(part.decisions(whole, SCHEMA))
        part.attach(net, own)
        decisions += own
    return net, decisions


def gates(decisions: list[Decision], **chosen: object) -> dict[str, torch.Tensor]:
    """One-hot gates of the first choices, but for those ``chosen`` by name (``_`` for a blank)."""
    wanted = {name.replace("_of_", " of ").replace("_x_", " x "): choice for name, choice in chosen.items()}
    wanted = {name.replace("_mlp_", "_mlp ").replace("layer_", "layer "): choice for name, choice in wanted.items()}
    assert wanted.keys() <= {each.name for each in decisions}
    places = {each.name: each.choices.index(wanted.get(each.name, each.choices[0])) for each in decisions}
    return {each.name: torch.eye(len(each.choices))[places[each.name]] for each in decisions}


def batch(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 1), torch.randn(rows, 3, 8)


def test_widths_are_powers_of_two_below_the_tables_own_and_four_at_least_on_a_gpu() -> None:
    whole = config()
    whole = replace(whole, model=replace(whole.model, tables={"b": TableConfig(dim=6), "c": TableConfig(dim=1)}))
    found = {each.name: each.choices for each in WIDTHS.decisions(whole, SCHEMA)}
    assert found == {"width of a": (8, 4, 2, 1), "width of b": (6, 4, 2, 1)}
    on_gpu = replace(whole, hardware=replace(whole.hardware, device="cuda"))
    assert {each.choices for each in WIDTHS.decisions(on_gpu, SCHEMA)} == {(8, 4), (6, 4)}


def test_a_narrow_table_gives_its_first_values_alone() -> None:
    net, decisions = net_of(config(), WIDTHS)
    dense, embeddings = batch()
    cut = embeddings.clone()
    cut[:, 1, 2:] = 0
    narrow = net(dense, embeddings, gates(decisions, width_of_b=2))
    assert torch.allclose(narrow, net(dense, cut, gates(decisions)))
    assert not torch.allclose(narrow, net(dense, embeddings, gates(decisions)))


def test_a_dropped_pair_has_no_effect_and_the_other_pairs_keep_theirs() -> None:
    net, decisions = net_of(config(), INTERACTIONS)
    assert [each.name for each in decisions] == ["a x b", "a x c", "b x c"]
    dense, embeddings = batch()
    dropped = gates(decisions, a_x_b=False)
    with torch.no_grad():
        before = net(dense, embeddings, dropped)
        net.top.layers[0].weight[:, 8 + 3] += 1.0  # the column of the pair, behind the vector and three fixed pairs
        assert torch.equal(net(dense, embeddings, dropped), before)
        assert not torch.allclose(net(dense, embeddings, gates(decisions)), before)


def test_an_mlp_may_end_early_and_be_narrow() -> None:
    net, decisions = net_of(config(), MLPS)
    names = {each.name: each.choices for each in decisions}
    assert names == {
        "bottom_mlp layer 1": (16, 8),
        "top_mlp layer 1": (32, 16, 8),
        "top_mlp layer 2": (16, 8),
        "top_mlp layers": (2, 1),
    }
    dense, embeddings = batch()
    early = gates(decisions, top_mlp_layers=1)
    with torch.no_grad():
        before = net(dense, embeddings, early)
        net.top.layers[1].weight += 1.0
        assert torch.equal(net(dense, embeddings, early), before)
        narrow = net(dense, embeddings, gates(decisions, top_mlp_layer_1=8))
        net.top.layers[1].weight[:, 8:] += 1.0
        assert torch.equal(net(dense, embeddings, gates(decisions, top_mlp_layer_1=8)), narrow)


def test_the_parts_lead_to_a_plain_configuration() -> None:
    whole = config()
    found = WIDTHS.apply(whole, {"width of a": 8, "width of b": 2})
    found = INTERACTIONS.apply(found, {"a x b": True, "a x c": False})
    found = MLPS.apply(found, {"top_mlp layer 1": 8, "top_mlp layers": 1, "bottom_mlp layer 1": 8})
    assert found.model == replace(
        whole.model, tables={"b": TableConfig(dim=2)}, drop_pairs=[["a", "c"]], top_mlp=[8], bottom_mlp=[8]
    )  # type: ignore[call-arg]
    assert INTERACTIONS.decisions(found, SCHEMA)[0].name == "a x b" and len(INTERACTIONS.decisions(found, SCHEMA)) == 2


def test_a_model_leaves_out_the_dropped_pairs() -> None:
    inputs = ModelInputs(dense=("x",), vectors=("a", "b", "c"), dim=8, seed=3)
    whole, fewer = config().model, replace(config().model, drop_pairs=[["c", "a"]])  # type: ignore[call-arg]
    torch.manual_seed(2)
    dense, embeddings = batch()
    one, other = build_model(whole, inputs), build_model(fewer, inputs)
    state = dict(one.state_dict())
    first = state["top.0.weight"]  # pairs in the order (a,x) (b,x) (b,a) (c,x) (c,a) (c,b), behind eight values
    state["top.0.weight"] = torch.cat([first[:, : 8 + 4], first[:, 8 + 5 :]], dim=1)
    other.load_state_dict(state)
    with torch.no_grad():
        first[:, 8 + 4] = 0
    left, right = embeddings.requires_grad_(), embeddings.detach().clone().requires_grad_()
    expected, got = one(dense, left), other(dense, right)
    assert torch.allclose(got, expected, atol=1e-6)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert torch.allclose(left.grad, right.grad, atol=1e-5)  # type: ignore[arg-type]


def test_a_pair_of_a_name_that_is_no_vector_is_refused() -> None:
    inputs = ModelInputs(dense=("x",), vectors=("a", "b", "c"), dim=8)
    with pytest.raises(Exception, match=r"model.drop_pairs names 'd', but the model's vectors are: a, b, c"):
        build_model(replace(config().model, drop_pairs=[["a", "d"]]), inputs)  # type: ignore[call-arg]


def test_draws_are_one_choice_each_follow_the_seed_and_the_probabilities() -> None:
    decisions = [Decision(name="one", choices=(1, 2, 3)), Decision(name="two", choices=(True, False))]
    choices, other = Choices(decisions, seed=5), Choices(decisions, seed=5)
    with torch.no_grad():
        choices.logits[0, 0] = other.logits[0, 0] = 1.0
    drawn = [choices.draw(1.0) for _ in range(500)]
    for gates in drawn:
        again = other.draw(1.0)
        assert all(torch.equal(gate, again[name]) for name, gate in gates.items())
        assert all(sorted(gate.tolist()) == [0.0] * (len(gate) - 1) + [1.0] for gate in gates.values())
    share = torch.stack([gates["one"].detach() for gates in drawn]).mean(0)
    assert torch.allclose(share, choices.probabilities()[0].detach(), atol=0.06)


def test_a_draw_has_the_gradients_of_a_relaxed_one() -> None:
    choices = Choices([Decision(name="one", choices=(1, 2, 3))], seed=5)
    for _ in range(3000):  # the third choice lowers the loss, and the others do nothing
        (-choices.draw(1.0)["one"][2]).backward()
    assert choices.logits.grad is not None
    slope = choices.logits.grad[0] / 3000
    assert slope[2] < -0.05 and slope[0] > 0.02 and torch.allclose(slope[0], slope[1], atol=0.01)
    assert abs(float(slope.sum())) < 1e-4
