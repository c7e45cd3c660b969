"""How strongly features interact: what the measure sees in embeddings made by hand."""

import pytest
import torch

from pipeline.towers.interaction_strength import Interaction


def random_signs(rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, (rows, 1), generator=generator).float() * 2 - 1


def test_features_in_one_direction_interact_whatever_their_signs_and_orthogonal_ones_do_not():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    rows = torch.stack([random_signs(400, generator) * axis for axis in (x, x, y)], 1)
    measure, signed = Interaction(3), Interaction(3, signed=True)
    for part in rows.split(130):
        measure.add(part)
        signed.add(part)
    found = measure.matrix()
    assert found[0, 1] > 0.95
    assert found[0, 2] < 0.2 and found[1, 2] < 0.2
    assert found.diagonal() == pytest.approx([1.0, 1.0, 1.0])
    assert (found == found.T).all()
    assert signed.matrix()[0, 1] < 0.2, "interactions of both signs cancel in the mean cosine"


def test_what_all_samples_share_is_taken_off_first():
    generator = torch.Generator().manual_seed(1)
    noise = 0.1 * torch.randn(500, 2, 16, generator=generator)
    measure = Interaction(2)
    measure.add(noise + torch.ones(16))
    assert measure.matrix()[0, 1] < 0.3
    alike = Interaction(2, signed=True)
    alike.add(noise + torch.ones(16))
    assert alike.matrix()[0, 1] > 0.9


def test_a_sample_without_a_value_does_not_count():
    generator = torch.Generator().manual_seed(2)
    rows = (random_signs(300, generator) * torch.tensor([[1.0, 0.0]]))[:, None].repeat(1, 2, 1)
    rows[::2, 1] = 0.0
    measure = Interaction(2)
    measure.add(rows)
    assert measure.matrix()[0, 1] > 0.95
    never = Interaction(2)
    never.add(torch.zeros(4, 2, 3))
    assert never.matrix().tolist() == [[1.0, 0.0], [0.0, 1.0]]
