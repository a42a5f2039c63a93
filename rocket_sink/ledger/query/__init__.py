"""Questions of drivers and tasks to the ledger: its views, new rows, pending letters."""
