"""What every room uses: errors, registries, retries, units, this machine, logging."""
