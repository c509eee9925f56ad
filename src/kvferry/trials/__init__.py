"""Trials: a path is proven with random bytes between two processes, and timed, before it is
trusted.

``records.py`` is what was found out and ``cache.py`` the file that keeps it; engines read both.
``attempt.py`` tries one path between two engines, ``process.py`` is the processes that do it, and
``run.py`` starts them under a strict limit. Nothing here runs on the data path by itself.
"""
