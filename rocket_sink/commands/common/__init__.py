"""Shared by commands: output, options, Spark sessions, signals."""
