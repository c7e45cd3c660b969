"""The C sources, built to notice accesses outside of memory and undefined behaviour: their tests meet neither."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import LEFT_OUT
from tests.waits import PATIENCE

ROOT = Path(__file__).parents[2]
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
BUILD = "from setuptools import setup; setup(script_args=['-q', 'build_ext', '--inplace'])"
# C source -> the tests that call each of its functions; those of make test.
TESTS = {
    "pipeline/plugins/cpu_kernels/native/rowcodes": ["checkpoint/test_quantise.py"],
    "pipeline/plugins/cpu_kernels/native/rowsteps": ["embeddings/test_native.py"],
    "pipeline/plugins/cpu_kernels/native/fields": ["ingest/test_native_text.py"],
    "pipeline/plugins/cpu_kernels/native/crosses": ["towers/test_crosses.py"],
    "pipeline/plugins/cpu_kernels/native/linear": ["training/test_linear.py"],
    "pipeline/plugins/cpu_kernels/native/rows": ["ingest/test_native_columns.py"],
    "pipeline/plugins/cpu_kernels/native/steps": [
        "embeddings/test_compiled.py",
        "models/test_dlrm.py",
        "training/test_linear.py",
    ],
    "pipeline/plugins/shampoo/native/shampoo": ["training/test_dense_optimizers.py"],
}


def test_every_source_is_among_them() -> None:
    sources = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "pipeline").rglob("native/*.c")}
    assert set(TESTS) == sources
    assert [name for names in TESTS.values() for name in names if not (ROOT / "tests" / name).is_file()] == []


@pytest.fixture(scope="module")
def runtime() -> str:
    """The libraries that must be loaded before all others; skips where there are none.

    The sanitizer looks for what throws C++ exceptions, as torch does, when it is loaded itself.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    paths = []
    for name in ("libasan.so", "libstdc++.so.6"):
        asked = [compiler, f"-print-file-name={name}"]
        paths.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        if not Path(paths[-1]).is_absolute():
            pytest.skip(f"{compiler} has no {name}")
    return ":".join(str(Path(path).resolve()) for path in paths)


@pytest.fixture(scope="module")
def copy(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with its libraries built in this way."""
    place = tmp_path_factory.mktemp("sanitised") / "tree"
    shutil.copytree(ROOT, place, symlinks=True, ignore=LEFT_OUT)
    for library in place.rglob("*.so"):
        library.unlink()
    environment = {**os.environ, "CFLAGS": FLAGS}
    built = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=place, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert built.returncode == 0, built.stderr
    return place


@pytest.mark.slow
@pytest.mark.parametrize("source", TESTS)
def test_its_tests_pass_when_memory_is_watched(copy: Path, runtime: str, source: str) -> None:
    (library,) = copy.glob(f"{source}.*.so")
    assert b"__asan_report" in library.read_bytes() and b"__ubsan_handle" in library.read_bytes()
    environment = {
        **os.environ,
        "CFLAGS": FLAGS,
        "LD_PRELOAD": runtime,
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
        # What Python, torch and Arrow keep to their end, or free in a way of their own, is not ours.
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not image"]
    done = subprocess.run(
        [*command, *(f"tests/{name}" for name in TESTS[source])],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert " passed" in done.stdout.splitlines()[-1]
    assert "ERROR: AddressSanitizer" not in done.stderr and "runtime error" not in done.stderr
    if source.endswith("/linear"):  # green must mean that products.h ran with both kinds of numbers
        cpu = Path("/proc/cpuinfo")
        flags = cpu.read_text() if cpu.exists() else ""
        if "avx512_bf16" not in flags:
            pytest.skip("this CPU has no AVX512_BF16: bf16 of linear.c did not run; the rest passed")
        if "amx_bf16" in flags:
            pytest.skip("this CPU has AMX, where oneDNN multiplies: linear.c did not run; the rest passed")
        assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-4000:]
