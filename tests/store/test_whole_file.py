"""Files that a user names: whole or not there, never mixed; links, pipes and devices stay what they are."""

import os
import stat
import threading
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import ArtifactError, ConfigError
from pipeline.store.files import whole_file


def write(path: Path, text: str) -> None:
    with whole_file(str(path), "--out") as sink:
        sink.write(text.encode())


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.csv"
    with whole_file(str(out), "--out") as sink:
        sink.write(b"half")
        assert not out.exists()
    assert out.read_text() == "half"
    with pytest.raises(ZeroDivisionError), whole_file(str(out), "--out") as sink:
        sink.write(b"less")
        raise ZeroDivisionError
    assert out.read_text() == "half" and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_two_that_write_at_once_do_not_mix(tmp_path: Path, place: str) -> None:
    url = str(tmp_path / "out") if place == "disk" else f"memory://{tmp_path.name}/out"
    with whole_file(url, "--out") as first:
        first.write(b"first ")
        with whole_file(url, "--out") as second:
            second.write(b"second, all of it")
        with fsspec.open(url) as source:
            assert source.read() == b"second, all of it"
        first.write(b"and last")
    fs, full = fsspec.core.url_to_fs(url)
    assert fs.cat_file(full) == b"first and last" and len(fs.ls(full.rpartition("/")[0])) == 1


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe, "rows")
    reader.join()
    assert read == [b"rows"] and stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        write(device, "rows")
    except (PermissionError, ArtifactError):
        pytest.skip("devices cannot be made here, or not be opened")
    assert stat.S_ISCHR(device.lstat().st_mode)


def test_a_link_keeps_pointing_to_its_file_which_keeps_its_mode(tmp_path: Path) -> None:
    file, link, hanging = tmp_path / "kept" / "file", tmp_path / "link", tmp_path / "hanging"
    file.parent.mkdir()
    file.write_text("former")
    file.chmod(0o640)
    link.symlink_to(file)
    write(link, "now")
    assert link.is_symlink() and file.read_text() == "now" and stat.S_IMODE(file.stat().st_mode) == 0o640
    hanging.symlink_to(tmp_path / "kept" / "other")
    write(hanging, "now")
    assert hanging.is_symlink() and (tmp_path / "kept" / "other").read_text() == "now"


def test_a_folder_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out .* is a folder, expected a file"):
        write(tmp_path, "rows")
