"""What keeps a ledger small for years: merging, retention and erasure."""
