"""Keys that other tools have are answered with the setting they mean."""

import pytest

from pipeline.config.compose import compose
from pipeline.config.paths import ALIASES, field_type, setting_for_alias
from pipeline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.learning_rate=0.01", "train.lr=0.01"),
        ("learning_rate=0.01", "train.lr=0.01"),
        ("train.batch_size=512", "train.global_batch=512"),
        ("evaluate.batch_size=512", "evaluate.global_batch=512"),
        ("batch_size=512", "train.global_batch=512"),
        ("epochs=2", "train.epochs=2"),
        ("train.num_epochs=2", "train.epochs=2"),
        ("model.embedding_size=8", "model.embedding_dim=8"),
        ("embedding_size=8", "model.embedding_dim=8"),
        ("train.optimizer=adagrad", "train.dense_optimizer=adagrad"),
        ("optimizer=adagrad", "train.dense_optimizer=adagrad"),
        ("train.embedding_optimizer=sgd", "train.sparse_optimizer=sgd"),
        ("train.max_grad_norm=1", "train.clip.dense_norm=1"),
        ("hardware.num_gpus=2", "hardware.ranks_per_host=2"),
        ("train.epoch=2", "train.epochs=2"),
        ("train.schedul=cosine", "train.schedule=cosine"),
    ],
)
def test_a_name_of_the_field_is_answered_with_the_setting_it_means(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([typed])
    assert f"{typed.partition('=')[0]} is unknown; did you mean {meant.partition('=')[0]}?" in caught.value.message
    assert caught.value.hint == meant


def test_every_word_means_settings_that_exist_and_is_none_of_them_itself() -> None:
    unknown = [(name, path) for name, paths in ALIASES.items() for path in paths if field_type(path) is None]
    assert unknown == []
    assert [name for name in ALIASES if field_type(name) is not None] == []
    assert {name: setting_for_alias(name.upper().replace("_", "-")) for name in ALIASES} == {
        name: paths[0] for name, paths in ALIASES.items()
    }


def test_what_is_no_word_of_the_field_is_left_to_its_spelling() -> None:
    assert setting_for_alias("train.frobnicate") is None
