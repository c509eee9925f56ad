"""What happens when things go wrong, on kvferry and on its rivals: ``make bench-failures``.

================== ============================================================
file               what it holds
================== ============================================================
``scenarios.py``   the table: what is done to the peer, and what should happen
``verdict.py``     attempts to outcome and defects; pure
``world.py``       the processes, signals and network of one scenario
``system.py``      processor time, ports and network namespaces, by the kernel
``mover.py``       the base of all rivals, and what runs inside each process
``mover_*.py``     one file per rival
``report.py``      the table and ``bench-results/failures.json``
================== ============================================================

Every cell of the table has fresh processes and a hard limit: a rival that hangs is killed, one that
crashes takes nothing with it. ``mover`` and its rivals need only numpy and what they measure.
"""
