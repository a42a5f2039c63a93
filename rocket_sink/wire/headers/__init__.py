"""Headers of commands: values and both serialisations."""
