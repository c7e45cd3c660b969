"""What can be chosen by name, and the registries that know every choice. No torch here, and no room above."""
