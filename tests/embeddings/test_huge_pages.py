"""Tables in large pages: which memory is asked for, what a refusal means, and that values stay."""

import errno
import mmap

import pytest
import torch

from pipeline.embeddings import huge_pages
from pipeline.embeddings.huge_pages import LARGE_PAGE, large_pages, use_large_pages
from pipeline.embeddings.row_access import LocalShard

PAGE = LARGE_PAGE


class Linux:
    """Takes the place of madvise: answers the n-th piece by the n-th of ``errors``, and later ones by 0."""

    def __init__(self, *errors):
        self.errors, self.asked = list(errors), []

    def __call__(self, address, size, advice):
        self.asked.append((address, size, advice))
        return self.errors.pop(0) if self.errors and advice != mmap.MADV_HUGEPAGE else 0

    @property
    def collapsed(self):
        return [(address, size) for address, size, advice in self.asked if advice != mmap.MADV_HUGEPAGE]


@pytest.fixture(autouse=True)
def offered(monkeypatch):
    monkeypatch.setattr(huge_pages, "_large_pages_allowed", lambda: True)


def shard(name, weight, **state):
    return LocalShard(name, 0, len(weight), 0, weight.shape[1], True, weight, state)


def inside(flat, size):
    """The part of ``flat``'s memory that large pages can be, from and to."""
    first = -(-flat.data_ptr() // PAGE) * PAGE
    return first, (flat.data_ptr() + size) // PAGE * PAGE


def test_tables_that_lie_one_behind_the_other_are_one_piece():
    flat = torch.zeros(6 * PAGE // 4)
    tables = flat.view(3, -1, 16)
    linux = Linux()
    first, last = inside(flat, 6 * PAGE)
    assert use_large_pages([shard(str(i), tables[i]) for i in (2, 0, 1)], linux) == last - first >= 5 * PAGE
    assert linux.collapsed == [(first, last - first)]


def test_states_that_lie_between_each_other_count_once():
    flat = torch.zeros(4 * PAGE // 4)
    one, two = flat.view(-1, 2, 16).unbind(1)
    linux, small = Linux(), torch.zeros(8, 16)
    first, last = inside(flat, 4 * PAGE)
    assert use_large_pages([shard("a", small, one=one, two=two)], linux) == last - first
    assert linux.collapsed == [(first, last - first)]


def test_memory_of_less_than_a_page_is_left_alone():
    linux = Linux()
    assert use_large_pages([shard("a", torch.zeros(100, 16), sum=torch.zeros(100))], linux) == 0
    assert use_large_pages([], linux) == 0 and not linux.asked


def test_shards_on_ssd_are_left_alone():
    class OnDisk(LocalShard):
        pass

    linux, weight = Linux(), torch.zeros(3 * PAGE // 64, 16)
    disk = OnDisk("a", 0, len(weight), 0, 16, True, weight, {})
    assert use_large_pages([disk], linux) == 0 and not linux.asked


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EBUSY])
def test_a_piece_that_is_refused_leaves_the_others(monkeypatch, error):
    monkeypatch.setattr(huge_pages, "_CHUNK", 2 * PAGE)
    flat = torch.zeros(9 * PAGE // 4)
    first, last = inside(flat, 9 * PAGE)
    linux = Linux(0, error)
    assert use_large_pages([shard("a", flat.view(-1, 16))], linux) == last - first - 2 * PAGE
    assert [address for address, _ in linux.collapsed] == list(range(first, last, 2 * PAGE))


def test_without_memory_for_a_page_it_stops(monkeypatch):
    monkeypatch.setattr(huge_pages, "_CHUNK", 2 * PAGE)
    linux = Linux(0, errno.ENOMEM)
    assert use_large_pages([shard("a", torch.zeros(9 * PAGE // 64, 16))], linux) == 2 * PAGE
    assert len(linux.asked) == 2


def test_an_older_linux_does_it_in_the_background():
    linux = Linux(errno.EINVAL)
    assert use_large_pages([shard("a", torch.zeros(4 * PAGE // 64, 16))], linux) == 0
    (first, second) = linux.asked
    assert first[:2] == second[:2] and second[2] == mmap.MADV_HUGEPAGE


def test_where_large_pages_are_switched_off_linux_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.undo()
    enabled = tmp_path / "enabled"
    for text, offered in (("always madvise [never]\n", False), ("always [madvise] never\n", True)):
        enabled.write_text(text)
        assert huge_pages._large_pages_allowed(enabled) is offered
    assert not huge_pages._large_pages_allowed(tmp_path / "missing")


def test_values_stay_as_they_are_on_this_machine():
    flat = torch.randn(5 * PAGE // 4, generator=torch.Generator().manual_seed(1))
    before, tables = flat.clone(), flat.view(5, -1, 16)
    moved = use_large_pages([shard(str(i), table) for i, table in enumerate(tables)])
    assert moved % PAGE == 0 and moved <= 5 * PAGE
    assert torch.equal(flat, before)
    flat += 1
    assert torch.equal(flat, before + 1)


@pytest.mark.parametrize("count", [0, 1, PAGE // 4 - 1, PAGE // 4, PAGE + 3])
def test_memory_for_large_pages_begins_as_zeros(count):
    values = large_pages(count)
    assert values.shape == (count,) and values.dtype == torch.float32 and not values.any()


def test_memory_that_there_is_not_is_an_error_of_memory():
    with pytest.raises(RuntimeError, match="allocate memory"):
        large_pages(1 << 50)
