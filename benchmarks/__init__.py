"""Measurements against other movers of KV and against the machine's limits: ``make bench``.

================== ============================================================
file               what it holds
================== ============================================================
``base.py``        :class:`Case` and :class:`Rival`: what is measured, and who
``process.py``     a rival of two processes, each command with a deadline
``worker.py``      the other end of that: what runs inside each process
``rounds.py``      interleaved rounds, medians and ratios
``report.py``      the table and ``bench-results/bench.json``
``limits.py``      one-thread memcpy: every ratio is against it
``rival_*.py``     one file per rival
``kvferry_paths.py`` kvferry's own transports
================== ============================================================

To add a rival: one file with a :class:`~benchmarks.worker.Worker` for each of its two processes and
a function that returns the rival, and one line in ``__main__.py``. Rivals run in ``.venv-bench``,
where kvferry is not installed, so ``base`` and ``worker`` need only numpy.
"""
