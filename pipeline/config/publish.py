"""The ``publish`` group: what is published and under which name."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.config.values import check_name


@dataclass(kw_only=True)
class PublishConfig:
    """What is published."""

    model: str | None = setting(None, doc="Name of the model under `<store>/models`; null: `data.name`.")
    quantise: str = setting(
        "8", choices=("8", "4", "fp16", "fp32"), doc="Bits per weight of the published tables, or a float type."
    )
    cache_mib: float = setting(
        1024.0, low=0.0, doc="Memory for rows of tables while the gate scores a version, in MiB."
    )

    def check(self, path: str) -> None:
        """The name must be a directory's."""
        if self.model is not None:
            check_name(f"{path}.model", self.model, "clicks")
