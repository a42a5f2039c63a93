"""What Spark tells of sessions, queries, frames and tasks, and what the driver refuses for it."""
