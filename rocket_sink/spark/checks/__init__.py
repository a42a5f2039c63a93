"""Facts that Spark tells of sessions, queries, frames and tasks, and the checks on these facts."""
