"""Clusters that refuse a launcher before anything is submitted: one clear message, exit code 8, nothing left behind."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.launch.locks import night_lease_path
from pipeline.plugins.kubernetes.api_client import Api, check_clock
from pipeline.store import Store
from tests.launch.cluster_cases import CLUSTER
from tests.servers import kept_port


class Clock(BaseHTTPRequestHandler):
    """A server whose clock says what ``stated`` says."""

    stated = ""

    def do_GET(self) -> None:
        self.send_response_only(200)
        self.send_header("Date", self.stated)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@contextmanager
def clock(seconds: float) -> Iterator[str]:
    """URL of an API server whose clock is ``seconds`` ahead of this machine's."""
    Clock.stated = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + seconds))
    with HTTPServer(("127.0.0.1", 0), Clock) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_right_clock_passes() -> None:
    from kubernetes.client import ApiClient, Configuration

    with clock(0.0) as url:
        check_clock(Api(ApiClient(Configuration(host=url))))


def use_cluster(folder: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find a kubeconfig of ``server``."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "users": [{"name": "u", "user": {"token": "t"}}],
        "clusters": [{"name": "k", "cluster": {"server": server}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }
    (folder / "config").write_text(json.dumps(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "config"))


def assert_night_refused(folder: Path, capsys: pytest.CaptureFixture[str], message: str, hint: str) -> None:
    """One message, exit code 8, the reason on record, and neither a lock nor anything of the run left."""
    volume = f"launch.pods.volumes={{store:{{claim:c,path:{folder}}}}}"
    night = ["nightly", "date=2026-01-01", *CLUSTER, "launch.outage_minutes=0", f"store={folder}/s", volume]
    assert cli.main([*night, "publish.model=m"]) == 8
    said = capsys.readouterr().err
    assert re.match(f"nightjar: {message}", said), said
    assert said.count("nightjar:") == 1 and "Traceback" not in said and hint in said.partition("hint: ")[2]
    store = Store(f"{folder}/s")
    record = store.read_json("runs/m-2026-01-01/nightly.json")
    assert (record["outcome"], record["exit_code"]) == ("failed", 8)
    assert record["message"] in said and record["message"] in (folder / "s/runs/m-2026-01-01/nightly.md").read_text()
    assert sorted(store.names("runs/m-2026-01-01")) == ["nightly.html", "nightly.json", "nightly.md"]
    assert not store.exists(night_lease_path("m"))


def test_a_night_on_an_unreachable_cluster_says_so_on_its_page(tmp_path, monkeypatch, capsys) -> None:
    with kept_port() as port:
        use_cluster(tmp_path, f"https://127.0.0.1:{port}", monkeypatch)
        message = f"the Kubernetes API server https://127.0.0.1:{port} does not answer: "
        assert_night_refused(tmp_path, capsys, message, "launch.context=")


def test_a_night_whose_clock_is_not_the_clusters_says_so(tmp_path, monkeypatch, capsys) -> None:
    with clock(-3600.0) as url:
        use_cluster(tmp_path, url, monkeypatch)
        assert_night_refused(tmp_path, capsys, r"this machine's clock is 3,\d\d\d s ahead of the API server's", "NTP")


def test_an_unreachable_cluster_is_one_message(tmp_path, monkeypatch, capsys) -> None:
    with kept_port() as port:
        server = f"https://127.0.0.1:{port}"
        use_cluster(tmp_path, server, monkeypatch)
        assert_unreachable(tmp_path, server, capsys)


def assert_unreachable(tmp_path: Path, server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A run on ``server`` says in one message why it cannot be, as it does with a kubeconfig that is none."""
    volume = f"launch.pods.volumes={{store:{{claim:c,path:{tmp_path}}}}}"
    run = [
        "run",
        *CLUSTER,
        "launch.outage_minutes=0",
        "run=lost",
        f"store={tmp_path}/s",
        volume,
        "data.synthetic.rows=2000",
    ]
    assert cli.main(run) == 8
    said = capsys.readouterr().err
    assert said.startswith(f"nightjar: the Kubernetes API server {server} does not answer: ")
    assert said.count("nightjar:") == 1 and "Traceback" not in said and "launch.context" in said
    assert not (tmp_path / "s/runs/lost/config.yaml").exists()
    assert cli.main([*run, "launch.context=nowhere"]) == 8
    assert "no way into a cluster" in capsys.readouterr().err
    for broken in ("a: [b", "- x", ""):
        (tmp_path / "config").write_text(broken)
        assert cli.main([*run]) == 8
        said = capsys.readouterr().err
        assert "no way into a cluster" in said and "Traceback" not in said and said.count("\n") == 2
