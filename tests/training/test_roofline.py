"""The products of a step: as many FLOP as the planner charges, and a speed that follows from them."""

import pytest
import torch

from pipeline.models.costs import model_costs
from pipeline.models.settings import DlrmConfig
from pipeline.specs import ModelInputs
from pipeline.training.profiling import Product, Speed, step_products

CONFIG = DlrmConfig(embedding_dim=8, bottom_mlp=[16], top_mlp=[32, 8])
INPUTS = ModelInputs(dense=("a", "b"), vectors=("c", "d", "e"), dim=8)


def test_the_products_have_the_flop_that_the_planner_charges():
    products = step_products(CONFIG, INPUTS, 128)
    flop = sum(count * each.flop for each, count in products.items())
    assert flop == model_costs(CONFIG, INPUTS).flop * 128
    assert products[Product(1, 128, 2, 16)] == 1  # the first layer's forward pass


@pytest.mark.measures
def test_speed_and_share_follow_from_the_time_of_a_step():
    speed = Speed.measure(CONFIG, INPUTS, 128, None, torch.device("cpu"))
    assert speed.least_seconds > 0
    figures = speed.figures(2 * speed.least_seconds)
    assert figures["ceiling_share"] == pytest.approx(0.5)
    assert figures["gflop_per_s"] == pytest.approx(speed.flop / (2 * speed.least_seconds) / 1e9)
