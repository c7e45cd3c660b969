"""The paths of all settings of the configuration."""

from pipeline.config.paths import settings

LEAVES = sorted(place.path for place in settings())
