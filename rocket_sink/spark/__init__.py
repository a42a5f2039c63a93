"""The Spark side: row contract, task body, the three lanes, the listener."""
