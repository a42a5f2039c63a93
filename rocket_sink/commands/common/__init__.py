"""What several commands share: output, options, sessions, signals."""
