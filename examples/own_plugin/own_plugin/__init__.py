"""Click logs in SQLite, and a ledger of runs, for Nightjar."""
