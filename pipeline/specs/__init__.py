"""What can be chosen by name, and the registries that know every choice. No torch here, and no room above."""

from pipeline.specs.id_mapping import BINS, IdMapping
from pipeline.specs.registry import Registry

ID_MAPPINGS: Registry[IdMapping] = Registry(
    "id mapping", setting="data.sparse_defaults.mapping", home="pipeline.ingest.mappings"
)


def mapping_of(chosen: str | None, default: str, bins: int | None) -> IdMapping:
    """The mapping of a feature: of ``bins`` where it has them, else the ``chosen`` one, else the ``default``."""
    return ID_MAPPINGS.get(BINS if bins else chosen or default)


def id_mapping_names() -> tuple[str, ...]:
    """The mappings that a setting can name."""
    return tuple(name for name in ID_MAPPINGS.names() if name != BINS)
