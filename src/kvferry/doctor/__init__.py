"""What this machine has, what is wrong with it, and which path serves a pair of memories.

``facts.py`` looks, at the edge; ``findings.py`` judges plain facts; ``report.py`` puts both, and
what trials showed, into words and JSON.
"""
