"""The work of a task: encode its rows, send them in order, count them. It needs no Spark."""
