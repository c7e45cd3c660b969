"""What tests of launching share."""

from tests.launch.launchers import no_launcher_goes_on  # noqa: F401 (a fixture)
