"""What a profiled training leaves behind, however many steps it takes."""

import pytest
import torch

from pipeline.store import Store
from pipeline.training.profiling import OTHER, Profiler, Speed, kind_of


def profiled(folder, steps, wanted=10):
    store = Store(str(folder))
    with Profiler(store, "*-rank0", wanted, Speed(flop=10**9, least_seconds=1e-3)) as profiler:
        for _ in range(steps):
            torch.ones(50, 50).mm(torch.ones(50, 50))
            profiler.on_step_end()
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize(("steps", "counted"), [(4, 1), (9, 6), (13, 10), (20, 10)])
def test_a_training_of_few_steps_has_a_table_of_those_it_took(tmp_path, steps, counted):
    files = profiled(tmp_path, steps)
    assert set(files) == {"trace-rank0.json", "profile-rank0.txt"}
    assert f"mean of {counted}:" in files["profile-rank0.txt"]
    assert "matrix products" in files["profile-rank0.txt"]


@pytest.mark.parametrize("steps", [0, 3])
def test_a_training_that_ends_before_says_that_nothing_was_profiled(tmp_path, caplog, steps):
    assert profiled(tmp_path, steps) == {}
    assert f"no steps were profiled: this session took {steps}, expected more than 3" in caplog.text


def test_an_error_ends_the_profile_and_stays_the_error(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError), Profiler(Store(str(tmp_path)), "*", 10, None):
        raise ZeroDivisionError
    assert not caplog.text


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("_CompiledLinearBackward", "matrix products"),
        ("_HeadBackward", "matrix products"),
        ("_LookUp", "lookups"),
        ("_LookUpBackward", "table updates"),
        ("aten::bmm", "matrix products"),
        ("aten::view", OTHER),
    ],
)
def test_every_part_of_a_compiled_step_has_its_kind(operation, kind):
    assert kind_of(operation) == kind
