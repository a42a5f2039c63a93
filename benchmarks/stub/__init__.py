"""A stub of a large cluster, for the scaling curves."""
