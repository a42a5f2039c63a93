"""Property tests without a time limit per example: the cores of a build machine are shared."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
