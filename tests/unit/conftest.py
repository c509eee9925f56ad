"""Property tests draw the same examples at each run, and few enough for a quick suite."""

from hypothesis import settings

settings.register_profile(
    "kvferry", derandomize=True, database=None, deadline=None, max_examples=40
)
settings.load_profile("kvferry")
