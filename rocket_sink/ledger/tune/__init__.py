"""What other settings would have made of the sends that a ledger has recorded."""
