"""Rows on their way in: the row contract, its checks, batches and order. No Spark in here."""
