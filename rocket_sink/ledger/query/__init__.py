"""What drivers and tasks ask the ledger: its views, what is new in it, what is pending in it."""
