"""Studies: many runs that differ in the settings that are searched, and the best of them."""
