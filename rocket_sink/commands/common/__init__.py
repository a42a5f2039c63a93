"""Code that commands share: output, options, Spark sessions, signals."""
