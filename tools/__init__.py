"""Tools of the project's own work. They are in the source distribution, and in no wheel."""
