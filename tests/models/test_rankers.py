"""Every ranker in each of its forms: gradients, precisions, compiled, exported, initial values."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError
from pipeline.models.build import build_model
from pipeline.models.layers import CrossNet, batch_norms, pair_products
from pipeline.models.settings import DcnV2Config, FinalMlpConfig, WideDeepConfig
from pipeline.publishing.program import PROGRAM, read_program, write_program
from pipeline.specs import MODELS
from pipeline.store import Store
from tests.models.variants import DIM, FORMS, RANKERS, built, inputs_of
from tests.publishing.made import archived
from tests.tiers import with_slow

ROWS = 5
MOST_ULPS = 32  # what docs/publishing.md promises


def batch(dense: int = 2, dim: int = DIM, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(*shape, generator=generator) for shape in ((ROWS, dense), (ROWS, 3, dim))]
    return draw[0].to(dtype), draw[1].to(dtype)


def test_every_ranker_has_a_form() -> None:
    assert set(RANKERS) == {name for name in MODELS.names() if not MODELS.package(name)}
    assert {config.name for config in FORMS.values()} == set(RANKERS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dense", [0, 2])
def test_gradients_are_those_of_finite_differences(form: str, dense: int) -> None:
    model = built(form, dense).double()
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    first = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name, value in first.items():
        if name.endswith("largest"):  # the largest magnitude so far counts as a constant
            value.fill_(10.0)
    with torch.no_grad():  # away from 0, where a learnt constant starts
        given = [(first[name] + 0.1).requires_grad_() for name in names]
    inputs = [value.requires_grad_() for value in batch(dense, dtype=torch.float64)]

    def logits(*values: torch.Tensor) -> torch.Tensor:
        state = {name: value.clone() for name, value in first.items()}  # running statistics start anew
        return functional_call(model, state | dict(zip(names, values[2:], strict=True)), tuple(values[:2]))

    assert torch.autograd.gradcheck(logits, (*inputs, *given), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bf16", [False, True])
def test_logits_are_float32_and_every_parameter_learns(form: str, bf16: bool) -> None:
    model = built(form)
    dense, embeddings = batch()
    embeddings.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(dense, embeddings)
    assert logits.shape == (ROWS,) and logits.dtype == torch.float32
    logits.square().sum().backward()
    assert embeddings.grad is not None and bool(torch.isfinite(embeddings.grad).all())
    idle = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    dead_in_batch_norm = [name for name in idle if not (batch_norms(model) and name.endswith("bias"))]
    assert dead_in_batch_norm == []


@pytest.mark.parametrize("form", with_slow([*RANKERS, "mlp batch norm"], ["dlrm", "mlp batch norm"]))
def test_compiled_equals_eager(form: str) -> None:
    eager, compiled = built(form), built(form)
    compiled.compile(dynamic=False, backend="aot_eager")
    dense, embeddings = batch()
    for rows in (torch.ones(ROWS, 1), torch.tensor([[1.0]] * 4 + [[0.0]])):
        for model in (eager, compiled):
            for norm in batch_norms(model):
                norm.rows = rows
        torch.testing.assert_close(compiled(dense, embeddings), eager(dense, embeddings), rtol=1e-5, atol=1e-5)
    states = eager.state_dict(), compiled.state_dict()
    for name in states[0]:
        torch.testing.assert_close(states[1][name.replace("_orig_mod.", "")], states[0][name])
    torch._dynamo.reset()


@pytest.mark.parametrize("form", [*RANKERS, "mlp batch norm"])
def test_the_published_program_gives_the_same_logits(form: str, tmp_path) -> None:
    model = built(form)
    for _ in range(3):
        model(*batch())  # moves running statistics
    store = Store(str(tmp_path))
    with store.draft("models/m/v1", kind="publish", key="k", config={}, inputs={}) as draft:
        write_program(draft, model, 2, (3, DIM))
        draft.commit({})
    program = read_program(tmp_path / "models/m/v1" / PROGRAM)
    dense, embeddings = batch()
    with torch.no_grad():
        expected = model.eval()(dense, embeddings)
        # one row at a time: nothing of a row's score depends on the rows beside it
        alone = torch.cat([program(dense[i : i + 1], embeddings[i : i + 1]) for i in range(ROWS)])
        together = program(dense, embeddings)
    limit = MOST_ULPS * torch.finfo(torch.float32).eps * max(1.0, float(expected.abs().max()))
    assert float((together - expected).abs().max()) <= limit
    assert float((alone - expected).abs().max()) <= limit


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_form_has_an_operator_that_is_refused_in_the_archive_of_an_earlier_release(form: str, tmp_path) -> None:
    model, given = built(form).eval(), batch()
    with torch.no_grad():
        torch.testing.assert_close(archived(tmp_path, model, 2, (3, DIM))(*given), model(*given))


@pytest.mark.parametrize("form", FORMS)
def test_the_seed_alone_decides_the_weights_and_the_base_rate_the_first_logits(form: str) -> None:
    torch.manual_seed(1)
    first = built(form, seed=7).state_dict()
    torch.manual_seed(2)
    second, third = built(form, seed=7), built(form, seed=8)
    assert all(torch.equal(first[name], value) for name, value in second.state_dict().items())
    assert any(not torch.equal(first[name], value) for name, value in third.state_dict().items())
    dense, embeddings = batch()
    second(dense, embeddings)
    before = second.eval()(dense, 0.01 * embeddings)
    second.start_at(-3.0)
    moved = (second(dense, 0.01 * embeddings) - before).detach()
    torch.testing.assert_close(moved, moved[:1].expand(ROWS))  # one bias, which all samples share
    assert abs(float((moved + 3.0)[0])) < 3.0


@pytest.mark.parametrize("form", FORMS)
def test_vectors_of_towers_may_be_of_another_width(form: str) -> None:
    model = build_model(FORMS[form], inputs_of(dim=4))
    assert model(*batch(dim=4)).shape == (ROWS,)


def test_cross_layers_are_the_papers_formula() -> None:
    net = CrossNet("full", 2, 3, 0, 0)
    first = torch.randn(4, 3)
    one = first * (first @ net.layers[0].weight.T + net.layers[0].bias) + first
    torch.testing.assert_close(net(first), first * (one @ net.layers[1].weight.T + net.layers[1].bias) + one)


def test_a_mixture_of_equal_experts_is_one_of_them() -> None:
    net = CrossNet("mixture", 1, 4, 2, 3)
    layer, x = net.layers[0], torch.randn(5, 4)
    with torch.no_grad():
        layer.down.weight.copy_(layer.down.weight[:2].repeat(3, 1))
        layer.up.weight.copy_(layer.up.weight[:, :2].repeat(1, 3))
        for expert in layer.within:
            expert.weight.copy_(layer.within[0].weight)
    seen = torch.tanh(layer.within[0](torch.tanh(x @ layer.down.weight[:2].T)))
    torch.testing.assert_close(net(x), x * (seen @ layer.up.weight[:, :2].T + layer.up.bias) + x)


def test_pair_products_are_the_sum_over_pairs() -> None:
    vectors = torch.randn(4, 5, 3, dtype=torch.float64)
    pairs = sum((vectors[:, i] * vectors[:, j]).sum(1) for i in range(5) for j in range(i))
    torch.testing.assert_close(pair_products(vectors), pairs)


@pytest.mark.parametrize("name", ["deepfm", "wide_deep"])
def test_an_ids_own_weight_adds_to_the_logit(name: str) -> None:
    model = built(name)
    dense, embeddings = batch()
    moved = embeddings.clone()
    moved[:, 1, 0] += 2.5
    torch.testing.assert_close(model(dense, moved), model(dense, embeddings) + 2.5)


def test_settings_that_cannot_be_are_refused() -> None:
    for config, message, hint in (
        (DcnV2Config(top_mlp=[8, 0]), r"model.top_mlp is \[8, 0\], expected widths of at least 1", "model.top_mlp"),
        (FinalMlpConfig(heads=3), "model.top_mlp ends with 256, expected a multiple of model.heads=3", "heads=1"),
        (FinalMlpConfig(second_mlp=[]), r"model.second_mlp is \[\], expected a layer at least", "second_mlp=\\[256"),
        (
            WideDeepConfig(embedding_dim=4, wide=4),
            "model.wide is 4, expected less than model.embedding_dim=4",
            "wide=1",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            config.check("model")
        assert hint.replace("\\", "") in caught.value.hint
    with pytest.raises(ConfigError, match="model.first_gate names 'z', expected some of: a, b, c"):
        build_model(FinalMlpConfig(first_gate=["z"]), inputs_of())
    with pytest.raises(ConfigError, match="model.heads is 3, expected a divisor of the vectors' width 16"):
        compose(["model=dhen", "model.modules=[attention]", "model.heads=3"])
    with pytest.raises(ConfigError, match="model.modules names 'dott', expected some of: dot, attention"):
        compose(["model=dhen", "model.modules=[dott]"])
