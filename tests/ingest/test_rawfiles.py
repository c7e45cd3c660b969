"""Which files are read, and that a new delivery of the same size is noticed, whatever the file system."""

import datetime
import os
import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.config import SparseFeature
from pipeline.core.errors import DataError
from pipeline.ingest.rawfiles import find_files
from pipeline.ingest.stage import raw_fingerprint

from .conftest import csv_config

READ = ["a.csv", "day=1/b.csv", "day=1/_x=2/c.csv", "v1.2/d_e.csv"]
HIDDEN = [
    "_SUCCESS",
    ".a.csv.crc",
    "_temporary/0/task/part-0.csv",
    "day=1/_temporary/part-0.csv",
    "_delta_log/0000.json",
    ".staging/a.csv",
    "day=1/.b.csv",
    "day=1/_c.csv",
    "_x=2/.tmp/c.csv",
    "_x/c.csv",
    "._x=2/c.csv",
    "_x=2.csv",
]


def deliver(fs, root: str, names: list[str]) -> None:
    for name in names:
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", b"label,x,c\n")


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """An empty folder of its own, below folders with hidden names."""
    return f"{tmp_path}/_up/.there" if request.param == "local" else f"memory://{uuid.uuid4()}/_up/.there"


@pytest.mark.parametrize("pattern", ["", "/", "/**/*", "/**"])
def test_a_hidden_name_anywhere_below_the_path_hides_a_file(place, pattern):
    fs, root = fsspec.core.url_to_fs(place)
    deliver(fs, root, [*READ, *HIDDEN])
    files = find_files(place + pattern)
    assert [name.removeprefix(root + "/") for name in files.paths] == sorted(READ)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("/_temporary", ["_temporary/0/task/part-0.csv"]),
        ("/_temporary/*/*/*", ["_temporary/0/task/part-0.csv"]),
        ("/*/_temporary/*", ["day=1/_temporary/part-0.csv"]),
        ("/day=1/_*.csv", ["day=1/_c.csv"]),
        ("/day=1/*.csv", ["day=1/b.csv"]),
        ("/_x*/*.csv", ["_x/c.csv"]),
        ("/_SUCCESS", ["_SUCCESS"]),
    ],
)
def test_what_the_path_spells_out_is_not_hidden(place, pattern, expected):
    fs, root = fsspec.core.url_to_fs(place)
    deliver(fs, root, [*READ, *HIDDEN])
    assert [name.removeprefix(root + "/") for name in find_files(place + pattern).paths] == expected


def test_links_to_folders_and_to_nothing_are_told_and_links_to_files_are_files(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/a.csv").write_text("1\n")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.csv").symlink_to(tmp_path / "kept/a.csv")
    (logs / "_latest").symlink_to(logs)
    for url in (f"{logs}", f"{logs}/*.csv"):
        assert find_files(url).paths == [f"{logs}/a.csv"]
    (tmp_path / "link").symlink_to(logs)
    assert find_files(f"{tmp_path}/link").paths == [f"{tmp_path}/link/a.csv"]
    for name, target, shown in (("more", logs, "a folder"), ("gone.csv", tmp_path / "none", "no file")):
        (logs / name).symlink_to(target)
        with pytest.raises(DataError, match=f"logs/{name} is a link that leads to {shown}") as error:
            find_files(str(logs))
        assert error.value.hint
        (logs / name).unlink()


class Clouds(MemoryFileSystem):
    """A store in memory whose ``info`` has the keys that ``marks`` makes of the time of writing."""

    protocol = "clouds"
    cachable = False
    marks = staticmethod(lambda written: {})

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("clouds://"))

    def info(self, path, **options):
        info = super().info(path, **options)
        written = info.pop("created", None)
        return info | (self.marks(written) if info["type"] == "file" else {})

    def modified(self, path):
        raise NotImplementedError


fsspec.register_implementation("clouds", Clouds, clobber=True)
# The keys of ``info`` as adlfs, gcsfs without its additions, webhdfs, ftp and pyarrow's HDFS have them.
STORES = {
    "azure": lambda at: {"etag": f"0x{at.timestamp()}", "last_modified": at, "metadata": None, "tags": None},
    "azure without etag": lambda at: {"last_modified": at, "creation_time": None},
    "gcs": lambda at: {"updated": at.isoformat(), "generation": str(at.timestamp()), "md5Hash": ""},
    "gcs generation": lambda at: {"generation": f"{at.timestamp()}"},
    "webhdfs": lambda at: {"modificationTime": int(at.timestamp() * 1e6), "accessTime": datetime.datetime.now()},
    "ftp": lambda at: {"modify": str(at.timestamp()), "unix.owner": "1"},
    "http": lambda at: {"Last-Modified": str(at), "url": "http://x", "mimetype": "text/csv"},
    "unheard of": lambda at: {"stamp": at, "atime": datetime.datetime.now(), "connection": object()},
}


@pytest.mark.parametrize("store", STORES)
def test_a_new_delivery_of_the_same_size_is_noticed_by_the_marks_of_any_store(monkeypatch, store):
    monkeypatch.setattr(Clouds, "marks", staticmethod(STORES[store]))
    check_noticed(f"clouds://{uuid.uuid4()}")


def test_a_new_delivery_of_the_same_size_is_noticed_where_only_the_file_system_can_tell():
    check_noticed(f"memory://{uuid.uuid4()}")


def check_noticed(url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    marks = []
    for content in (b"label,x,c\n1,2,a\n", b"label,x,c\n0,2,a\n"):
        fs.pipe_file(f"{root}/a.csv", content)
        marks += [raw_fingerprint(csv_config(url).data) for _ in range(2)]
    assert marks[0] == marks[1] != marks[2] == marks[3]


def test_the_marks_of_local_files_and_of_s3_are_what_they_were(tmp_path):
    """Another mark would be another key for every dataset there is."""
    from pipeline.ingest.rawfiles import change_mark

    fs = fsspec.filesystem("file")
    (tmp_path / "a").write_text("x")
    info = fs.info(f"{tmp_path}/a")
    assert change_mark(fs, f"{tmp_path}/a", info) == str(info["mtime"])
    s3 = {"ETag": '"abc"', "LastModified": datetime.datetime.now(), "size": 1, "VersionId": "1", "StorageClass": "x"}
    assert change_mark(fs, "b/a", s3) == '"abc"'


def test_names_of_files_need_not_be_utf8(run_ingest, tmp_path):
    lines = ["label,x,c", *(f"{i % 2},{i},id{i % 5}" for i in range(100)), "1,2"]
    marks = set()
    for name in (b"a\xff.csv", b"a\xfe.csv"):
        folder = tmp_path / f"logs{len(marks)}"
        folder.mkdir()
        (folder / os.fsdecode(name)).write_text("\n".join(lines) + "\n")
        os.utime(folder / os.fsdecode(name), (1_700_000_000, 1_700_000_000))
        config = csv_config(folder)
        marks.add(raw_fingerprint(config.data))
        dataset = run_ingest(config)
        assert dataset.summary["rows"] == 101
        assert [line["file"] for line in dataset.quarantine] == [f"a\\udc{name[1]:x}.csv"]
        assert "checksum" in dataset.json("sources.json")
        with pytest.raises(DataError) as told:
            run_ingest(csv_config(folder, sparse={"d": SparseFeature()}))
        assert str(told.value).encode()  # as pages and logs write it
    assert len(marks) == 2
