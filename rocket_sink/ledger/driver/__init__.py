"""The driver's side of the ledger: the fold, and `Ledger`."""
