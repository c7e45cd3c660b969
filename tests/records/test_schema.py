"""The committed JSON Schemas are those of the records, and recorded files fit them."""

import json
from pathlib import Path

import pytest

from pipeline.records.json_schema import RECORDS, json_schema, schema_files
from tests.records.test_recorded import FILES, kind_of

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"


def test_the_committed_schemas_are_those_of_the_dataclasses() -> None:
    committed = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    assert committed == schema_files(), "python -m pipeline.records.json_schema docs/schemas writes them again"


def test_the_page_names_every_record() -> None:
    page = (FOLDER.parent / "records.md").read_text()
    for kind in RECORDS:
        assert f"`{kind.FILE}`" in page and f"`{kind.__name__}`" in page


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_files_fit_their_schema(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(path.read_text()), json_schema(kind_of(path)))
