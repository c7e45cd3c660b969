"""What an MLflow server is asked, by stand-ins: whom the login goes to, and how the run of a store is found."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.plugins.trackers.mlflow import find_run
from pipeline.plugins.trackers.mlflow_server import MlflowServer
from tests.servers import Quiet, serving

STORES = ("/mnt/store", "/mnt/it's/store", '/mnt/"x"/store', "/mnt/'\"/store")
# MLflow's filters know no escapes: a value is all there is between two quotes of a kind.
CONDITION = r"tags\.`([\w.]+)` = (?:'([^']*)'|\"([^\"]*)\")"


@contextmanager
def answering(logins: list[str | None], to: str = "") -> Iterator[str]:
    """A server that notes the login of each request and answers, or sends it on ``to``: its URL."""

    class Handler(Quiet):
        def do_POST(self):
            self.body()
            logins.append(self.headers["Authorization"])
            self.send_response(302 if to and "/moved" not in self.path else 200)
            self.send_header("Location", to)
            self.end_headers()
            self.wfile.write(b"{}")

        do_GET = do_POST  # noqa: N815 what follows a redirected POST

    with serving(Handler) as url:
        yield url


@pytest.mark.parametrize("secret", ["user:password", "token"])
def test_a_login_does_not_follow_to_another_server(tmp_path: Path, secret: str) -> None:
    (tmp_path / "login").write_text(secret)
    first, second = list[str | None](), list[str | None]()
    with answering(second) as other, answering(first, f"{other}/x") as url:
        assert MlflowServer(url, str(tmp_path / "login")).post("runs/search") == {}
    assert [bool(each) for each in first] == [True] and second == [None]


def test_a_login_follows_on_its_own_server(tmp_path: Path) -> None:
    (tmp_path / "login").write_text("token")
    logins = list[str | None]()
    with answering(logins, "/moved") as url:
        assert MlflowServer(url, str(tmp_path / "login")).post("runs/search") == {}
    assert logins == ["Bearer token"] * 2


class Runs:
    """A server with a run ``r`` of each of STORES, which reads filters as MLflow does."""

    def post(self, path: str, **fields) -> dict:
        assert path == "runs/search" and re.fullmatch(f"{CONDITION}( AND {CONDITION})*", fields["filter"])
        wanted = {name: one or other for name, one, other in re.findall(CONDITION, fields["filter"])}
        found = [{"nightjar.run": "r", "nightjar.store": store} for store in STORES]
        runs = [tags for tags in found if wanted.items() <= tags.items()]
        return {"runs": [{"data": {"tags": [{"key": key, "value": tags[key]} for key in tags]}} for tags in runs]}


@pytest.mark.parametrize("store", STORES)
def test_a_run_of_a_store_with_quotes_is_found(store: str) -> None:
    found = find_run(Runs(), "0", store, "r")  # type: ignore[arg-type]
    assert found is not None and {"key": "nightjar.store", "value": store} in found["data"]["tags"]
    assert find_run(Runs(), "0", store, "other") is None  # type: ignore[arg-type]
