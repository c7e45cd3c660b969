"""Host memory behind a device's cache: a line of rows in arrays, against the same in plain Python."""

import numpy as np
import pytest

from pipeline.embeddings.ssd.cached import HostRows
from pipeline.records import HOST_ROW_BYTES


class Plain:
    """What ``HostRows`` does, a row at a time: {row: (place, value)} in the order in which rows leave."""

    def __init__(self, count):
        self.count, self.rows = count, {}

    def add(self, rows, values):
        left = list(self.rows)[: max(0, len(self.rows) + len(rows) - self.count)]
        gone = [(row, self.rows.pop(row)) for row in left]
        self.rows |= dict(zip(rows.tolist(), values.tolist(), strict=True))
        return gone

    def again(self, rows):
        for row in rows:
            self.rows[row] = self.rows.pop(row)


@pytest.mark.parametrize(("count", "turns"), [(1, 300), (7, 300), (100, 300), (5_000, 30)])
def test_rows_leave_in_the_order_in_which_they_came_or_were_renewed(count, turns):
    generator, plain, host = np.random.default_rng(count), Plain(count), HostRows(count, 3)
    places, size = {}, host.bytes
    for turn in range(turns):
        fresh = np.setdiff1d(generator.integers(0, 2**32, generator.integers(0, count + 1)), list(plain.rows))
        fresh = generator.permutation(fresh)
        values = generator.integers(0, 2**32, (len(fresh), 3), np.uint32).view(np.float32)  # any bits, NaN too
        kinds = (fresh % 4).astype(np.int8)
        here, (left, their, left_kinds) = host.add(fresh, values, kinds)
        assert np.array_equal(left_kinds, left % 4)
        expected = plain.add(fresh, values.view(np.uint32))
        assert left.tolist() == [row for row, _ in expected]
        assert their.view(np.uint32).tolist() == [value for _, value in expected]
        for row in left.tolist():
            del places[row]
        places |= dict(zip(fresh.tolist(), here.tolist(), strict=True))
        some = [row for row in plain.rows if generator.random() < 0.3]
        host.renew(np.array([places[row] for row in some], np.int64))
        plain.again(some)
        if turn % 3 == 0:
            some = {row for row in plain.rows if generator.random() < 0.2}
            host.drop(np.array([places.pop(row) for row in some], np.int64))
            plain.rows = {row: value for row, value in plain.rows.items() if row not in some}
        held = host.read(np.array([places[row] for row in plain.rows], np.int64)).view(np.uint32)
        assert held.tolist() == list(plain.rows.values()) and len(set(places.values())) == len(places)
    assert host.bytes == size <= count * (3 * 4 + HOST_ROW_BYTES)
    host.clear()
    assert len(host.add(np.arange(count), np.zeros((count, 3), np.float32), np.zeros(count, np.int8))[1][0]) == 0


def test_it_takes_memory_for_the_rows_it_was_made_for_and_no_room_is_room_for_none():
    host, none = HostRows(0, 3), (np.empty(0, np.int64), np.empty((0, 3), np.float32), np.empty(0, np.int8))
    assert host.bytes == 0 and len(host.add(*none)[0]) == 0
