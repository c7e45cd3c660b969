"""Files that a user names: whole or not there, never mixed; links, pipes and devices stay what they are."""

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import fsspec
import pytest

from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.store.files import one_file, whole_file


def write(path: Path | str, text: str) -> None:
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


@pytest.mark.parametrize("name", ["a[1]/out", "a*/out", "a/out?"])
def test_a_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    url = f"memory://{tmp_path.name}/{name}"
    write(url, "rows")
    fs, full = fsspec.core.url_to_fs(url)
    assert fs.cat_file(full) == b"rows" and len(fs.find(f"/{tmp_path.name}")) == 1


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(pipe, "rows")
    reader.join(60)
    assert read == [b"rows"] and stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        write(device, "rows")
    except (PermissionError, ArtifactError):
        pytest.skip("devices cannot be made here, or not be opened")
    assert stat.S_ISCHR(device.lstat().st_mode)


@pytest.mark.parametrize("place", ["/dev/fd", "/proc/self/fd"])
def test_what_a_shell_substitutes_is_written_to(place: str) -> None:
    """``>(gzip > x)`` is a name such as /dev/fd/63."""
    reading, writing = os.pipe()
    try:
        write(Path(f"{place}/{writing}"), "rows")
        os.close(writing)
        assert os.read(reading, 10) == b"rows"
    finally:
        os.close(reading)


def test_an_open_file_is_written_to_where_it_stands(tmp_path: Path) -> None:
    """As standard output that a shell has sent to a file, which its other output goes to as well."""
    file = tmp_path / "all"
    with file.open("wb") as out:
        out.write(b"before, ")
        out.flush()
        write(Path(f"/dev/fd/{out.fileno()}"), "rows")
        out.write(b", after")
    assert file.read_text() == "before, rows, after" and list(tmp_path.iterdir()) == [file]


def test_standard_output_is_that_of_the_process(tmp_path: Path) -> None:
    code = "from tests.store.test_whole_file import write; print('first', flush=True); write('/dev/stdout', 'rows')"
    file = tmp_path / "scores.csv"
    with file.open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=Path(__file__).parents[2])
    assert file.read_text() == "first\nrows" and list(tmp_path.iterdir()) == [file]


def test_a_number_that_is_no_open_file_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"--out /dev/fd/99999 is no open file"):
        write(Path("/dev/fd/99999"), "rows")


def test_a_link_that_leads_to_itself_is_a_mistake(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(ConfigError, match=r"--out .*one is a link that leads to itself"):
        write(one, "rows")
    assert sorted(tmp_path.iterdir()) == [one, other]


def test_the_bytes_are_on_the_disk_before_the_file_has_its_name(tmp_path: Path, monkeypatch) -> None:
    out, synced = tmp_path / "out", []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append((out.exists(), os.fstat(handle).st_size)))
    write(out, "rows")
    assert synced == [(False, 4)] and out.read_text() == "rows"


def test_names_of_one_file_are_told(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    file = str(tmp_path / "file")
    for same in (file, f"file://{file}", f"{tmp_path}/./file", f"{tmp_path}/x/../file", str(tmp_path / "link")):
        assert one_file(file, same), same
    assert not one_file(file, f"memory://{file}") and not one_file(file, f"{file}s")


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


def test_a_socket_is_refused(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        with pytest.raises(ConfigError, match="is a socket"), whole_file(str(path), "--out"):
            pass
    assert path.is_socket()
