"""``nightjar doctor``: checks whether this machine can run Nightjar, and says what to do if not.

The torch/torchrec/fbgemm triple is read from the installed metadata before anything of it is
imported: a wrong one dies at import with a bare OSError. The real import and a lookup then run in a
process of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.cli.commands.command import Command, show
from pipeline.core.cpus import available_cpus, cpu_quota
from pipeline.core.errors import ConfigError
from pipeline.core.kernels import load_kernels
from pipeline.core.machine import pinned_figures
from pipeline.core.units import GIB, plural
from pipeline.specs import REGISTRIES

# Maps a torch minor version to the minor versions of torchrec and fbgemm-gpu or fbgemm-gpu-cpu that are built for it.
TRIPLES = {"2.11": ("1.6", "1.6"), "2.12": ("1.7", "1.7"), "2.13": ("1.8", "1.8"), "2.14": ("1.9", "1.9")}
COMPILE = "install a C compiler, then run make install, or pip install with --no-deps, again"
ROWS_BY_TORCH = "torch; compiled, lazy Adam and FTRL are five times as fast"
LOCK = "make install installs the locked set (requirements/*.txt, with --no-deps)"
PROBE = """
import json, pathlib, sys
import torch, fbgemm_gpu, torchrec
bags = torchrec.EmbeddingBagCollection(device=torch.device("cpu"), tables=[torchrec.EmbeddingBagConfig(
    name="C1", embedding_dim=4, num_embeddings=3, feature_names=["C1"])])
ids = torchrec.KeyedJaggedTensor(keys=["C1"], values=torch.tensor([0, 2]), lengths=torch.tensor([1, 1]))
assert bags(ids).values().shape == (2, 4)
if sys.argv[1]:
    from pipeline.embeddings.ssd.diagnostics import examine
    print(json.dumps(examine(pathlib.Path(sys.argv[1]))))
from pipeline.core.kernels import GROUP, load_kernels
from pipeline.core.registry import find_plugins
# Those of a step. The others have findings of their own, or are of ingestion.
names = {"steps", "linear", *(point.name for point in find_plugins(GROUP))}
names -= {"rowcodes", "rowsteps", "rows", "fields"}
print(int(all(load_kernels(name) is not None for name in names)),
      int(torch.ops.mkldnn._is_mkldnn_bf16_supported()), torch.cuda.device_count(),
      int(torch.cuda.is_available() and torch.cuda.is_bf16_supported()))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``level``: ok | warn | fail; ``advice``: what to do about it, empty for ok."""

    level: str
    name: str
    found: str
    advice: str = ""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--store", default="./store", help="the store whose disk is checked (default: ./store)")
    parser.set_defaults(function=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    findings = examine(options.store)
    if options.json:
        show(json.dumps(list(map(asdict, findings)), indent=1))
    else:
        for finding in findings:
            text = f"{finding.level:<5} {finding.name:<15} {finding.found}"
            if finding.advice:
                text += f" -> {finding.advice}"
            show(text)
    return 2 if any(finding.level == "fail" for finding in findings) else 0


def examine(store: str) -> list[Finding]:
    """Check this machine and the ``store`` URL; takes a few seconds (it imports torch in another process)."""
    findings = [
        python_version(),
        triple(),
        *tools(),
        *choices(),
        _compiled("quantiser", load_kernels("rowcodes") is not None, "torch; the compiled one is ten times as fast"),
        _compiled("row steps", load_kernels("rowsteps") is not None, ROWS_BY_TORCH),
        cores(),
        memory(),
        disk(store),
        shared_memory(),
        auto_hardware(),
    ]
    # With a wrong triple the import would fail, which is reported already.
    failed = {finding.name for finding in findings if finding.level == "fail"}
    if "torch" not in failed:
        findings += lookup(store)
    return findings


def python_version() -> Finding:
    """Check for Python 3.11 or 3.12."""
    release = platform.python_version()
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        return Finding("ok", "python", release)
    return Finding("fail", "python", release, "create a virtual environment with Python 3.11 or 3.12")


def triple() -> Finding:
    """Check that torch, torchrec and fbgemm belong together, by their metadata alone."""
    torch, torchrec = installed("torch"), installed("torchrec")
    # Both packages install the same module.
    builds = {}
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        if release := installed(name):
            builds[name] = release
    if not (torch and torchrec and builds):
        present = {"torch": torch, "torchrec": torchrec, "fbgemm-gpu-cpu": builds}
        absent = ", ".join(name for name, found in present.items() if not found)
        return Finding("fail", "torch", f"{absent} not installed", LOCK)
    fbgemm = " and ".join(f"{name} {release}" for name, release in builds.items())
    found_text = f"torch {torch}, torchrec {torchrec}, {fbgemm}"
    if len(builds) > 1:
        return Finding("fail", "torch", found_text, "both overwrite each other's files: uninstall both, then " + LOCK)
    wanted = TRIPLES.get(minor(torch))
    if wanted is None:
        return Finding("fail", "torch", found_text, f"expected torch {', '.join(TRIPLES)}: {LOCK}")
    (build,) = builds.values()
    if (minor(torchrec), minor(build)) != wanted:
        advice = f"torch {torch} needs torchrec {wanted[0]} and fbgemm {wanted[1]}: {LOCK}"
        return Finding("fail", "torch", found_text, advice)
    return Finding("ok", "torch", found_text)


def tools() -> Iterable[Finding]:
    """Check that TorchX, Hydra and OmegaConf have the versions the launcher was written for."""
    for name, wanted in (("torchx", "0.7"), ("hydra-core", "1.3"), ("omegaconf", "2.3")):
        release = installed(name)
        if release and minor(release) == wanted:
            yield Finding("ok", name.partition("-")[0], f"{name} {release}")
        else:
            state = f"{name} is not installed"
            if release:
                state = f"{name} {release}"
            yield Finding("fail", name.partition("-")[0], state, f"expected {wanted}.x: {LOCK}")


def choices() -> Iterable[Finding]:
    """List what each registry has, and which packages add to it."""
    for registry in REGISTRIES:
        listed = []
        try:
            for name in registry.names():
                package = registry.package(name)
                if package:
                    name += f" ({package})"
                listed.append(name)
        except ConfigError as error:
            # A package that adds to this registry fails; the other registries are still checked.
            yield Finding("fail", registry.kind, error.message, error.hint)
        else:
            yield Finding("ok", registry.kind, ", ".join(listed))


def _compiled(name: str, built: bool, otherwise: str) -> Finding:
    """Judge whether a library of ours was ``built`` when the package was installed; ``otherwise``: what runs then."""
    if built:
        return Finding("ok", name, "compiled")
    return Finding("warn", name, otherwise, COMPILE)


def cores() -> Finding:
    """Count the CPUs this process may use: by its affinity, and by the quota of its cgroup."""
    count, quota, node = available_cpus(), cpu_quota(), os.cpu_count() or 1
    text = str(count)
    if quota is not None and quota < node:
        text += f", limited by a cgroup quota of {quota:g} CPU{'s' * (quota != 1)} ({node} in the node)"
    elif count < node:
        text += f", limited by this process's affinity ({node} in the node)"
    if count >= 2:
        return Finding("ok", "cores", text)
    return Finding("warn", "cores", text, "runs will be slow; two ranks need two cores")


def memory() -> Finding:
    """Measure memory that is free to use, in GiB, the container's limit respected."""
    import psutil

    free = psutil.virtual_memory().available
    # In a container, psutil sees the memory of the whole node. "max" means that there is no limit.
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, int(limit.read_text()) - used)
    text = f"{free / GIB:.1f} GiB available"
    if free >= 4 * GIB:
        return Finding("ok", "memory", text)
    advice = "the demo needs about 4 GiB; smaller: data.synthetic.rows, train.global_batch"
    return Finding("warn", "memory", text, advice)


def local_place(store: str) -> Path | None:
    """Return the nearest existing directory above ``store``; None if it is not on a local disk."""
    if "://" in store and not store.startswith("file://"):
        return None
    place = Path(store.removeprefix("file://")).absolute()
    while not place.exists():
        place = place.parent
    return place


def disk(store: str) -> Finding:
    """Measure free space where the store lies (its nearest existing parent, if it is on a local disk)."""
    place = local_place(store)
    if place is None:
        return Finding("ok", "disk", f"{store} is not a local disk; free space unknown")
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.1f} GiB free at the store"
    if not os.access(place, os.W_OK):
        return Finding("fail", "disk", f"{place} cannot be written", "store=<an fsspec URL you may write to>")
    if free >= 5 * GIB:
        return Finding("ok", "disk", text)
    level = "warn" if free >= GIB else "fail"
    return Finding(level, "disk", text, "free space there, or store=<another place>")


def shared_memory() -> Finding:
    """Check ``/dev/shm``, which ranks on one host and compiled kernels use."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding("warn", "/dev/shm", "does not exist", "containers: mount a tmpfs of 1 GiB or more there")
    size = shutil.disk_usage(place).total
    text = f"{size / GIB:.1f} GiB"
    if size >= GIB // 2:
        return Finding("ok", "/dev/shm", text)
    return Finding("warn", "/dev/shm", text, "containers: --shm-size=1g, or a memory emptyDir at /dev/shm")


def auto_hardware() -> Finding:
    """Say what ``hardware=auto`` stands for here, and where its speeds come from."""
    from pipeline.calibration.hardware_cache import find_kept
    from pipeline.config.compose import compose

    try:
        config = compose(["hardware=auto"])
    except ConfigError as error:
        return Finding("fail", "hardware", error.message, error.hint)
    hardware, kept = config.hardware, find_kept(config)
    gib = ""
    if hardware.device == "cuda":
        gib = f"{hardware.hbm_gib:g} GiB HBM and "
    text = f"auto: {plural(hardware.ranks_per_host, f'{hardware.device} rank')}, {gib}{hardware.ddr_gib:g} GiB for each"
    if not hardware.measured:
        return Finding("ok", "hardware", f"{text}; all figures from {pinned_figures()}")
    if kept is None:
        return Finding("ok", "hardware", f"{text}; the first plan measures its speed, in a few seconds")
    return Finding("ok", "hardware", f"{text}; its speed was measured on {kept.day}, in {kept.seconds:g} s")


def lookup(store: str) -> list[Finding]:
    """Import the triple for real and look two ids up in a tiny table, in a separate process.

    The process also reports what the machine refuses of tables on SSD whose files lie in a local ``store``.
    """
    place = local_place(store)
    scratch = str(place) if place is not None and os.access(place, os.W_OK) else ""
    # Use a separate process, since libraries that do not fit may crash it instead of raising an error.
    done = subprocess.run([sys.executable, "-c", PROBE, scratch], capture_output=True, text=True, timeout=300)
    if done.returncode:
        return [not_imported(done.stderr or f"died with exit code {done.returncode}")]
    # Take only the last words, since a library may print something when it is imported.
    compiled, bf16, devices, device_bf16 = map(int, done.stdout.split()[-4:])
    # The probe opens these libraries, as torch has their OpenMP.
    without = "PyTorch and FBGEMM; compiled, a step on four threads is a third shorter"
    findings = [
        Finding("ok", "lookup", "imports and a two-id lookup in a tiny table work"),
        _compiled("step", bool(compiled), without),
    ]
    if bf16 or device_bf16:
        findings.append(Finding("ok", "bf16", "native: train.precision=auto uses it"))
    else:
        advice = "nothing to do: train.precision=auto uses fp32"
        findings.append(Finding("warn", "bf16", "not native on this machine", advice))
    if scratch:
        findings += tables_on_ssd(done.stdout.splitlines()[-2])
    gpus = "none; hardware.device=cpu"
    if devices:
        gpus = f"{devices} CUDA devices"
    findings.append(Finding("ok", "gpu", gpus))
    return findings


def not_imported(errors: str) -> Finding:
    """Judge the ``errors`` of a lookup that died."""
    # The CUDA build of fbgemm loads the driver's libraries.
    if driver := re.search(r"lib(?:cuda|nvidia-ml)\.so\.1", errors):
        why = f"the CUDA build needs the NVIDIA driver, and there is no {driver[0]} here"
        return Finding("fail", "lookup", why, "run it on a node with a GPU, whose runtime brings the driver")
    return Finding("fail", "lookup", errors.strip().splitlines()[-1][:200], LOCK)


def tables_on_ssd(examined: str) -> list[Finding]:
    """Judge what ``PROBE`` printed of ``pipeline.embeddings.ssd.diagnostics.examine``."""
    reading, refused = json.loads(examined)
    if not refused:
        return [Finding("ok", "ssd", f"{reading}, past the page cache, at the store")]
    # Warnings, not failures: tables on SSD still work, only slower.
    return [Finding("warn", "ssd", what, advice) for what, advice in refused]


def installed(name: str) -> str | None:
    """Return the version of distribution ``name`` without its local part (``+cpu``), or None."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def minor(text: str) -> str:
    """Return ``2.13`` of ``2.13.0``."""
    return ".".join(text.split(".")[:2])


COMMANDS = (Command("doctor", "check this machine and say what to fix", _add_arguments, takes_store=True),)
