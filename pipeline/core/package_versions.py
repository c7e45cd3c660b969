"""torch, torchrec and fbgemm-gpu, which are pinned together and installed by their own command.

The metadata of torchrec requires the GPU build of fbgemm-gpu, which overwrites files of the CPU build. So they
and two packages that depend on torch are installed with ``--no-deps``; pyproject.toml lists their dependencies.
"""

from __future__ import annotations

from importlib.util import find_spec

from pipeline.core.errors import ConfigError

PACKAGES = {
    "torch": "torch==2.13.0",
    "torchrec": "torchrec==1.8.0",
    "fbgemm_gpu": "fbgemm-gpu-cpu==1.8.0",
    "tensordict": "tensordict==0.15.3",
    "torchmetrics": "torchmetrics==1.0.3",
}
INSTALL = f"pip install --no-deps {' '.join(PACKAGES.values())}"


def require_triple() -> None:
    """Raise ConfigError if one of PACKAGES is not installed. Imports none of them."""
    # Use find_spec, because importing torch takes seconds.
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise _not_installed(missing)


def missing_triple(error: BaseException) -> ConfigError | None:
    """Return the message for an import that failed because one of PACKAGES is missing; None for another ``error``."""
    # The name equals a package's only if the package itself is missing; a missing torch.nowhere is another error.
    if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
        return _not_installed([error.name])
    return None


def _not_installed(names: list[str]) -> ConfigError:
    return ConfigError(f"not installed: {', '.join(names)}", hint=f"{INSTALL} (in a checkout: make install)")
