"""The commands of `rocket-sink`, one module each; `rocket_sink.cli` imports them when they run."""
