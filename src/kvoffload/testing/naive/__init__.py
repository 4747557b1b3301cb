"""Naive twins: the obvious O(n) version of everything that is clever elsewhere.

Each twin says in plain Python, on lists and dicts, what its fast counterpart is meant to do. Property
tests drive both with the same calls and compare every decision; a reader who wants to know *what* a
kernel does reads the twin first. The policies serve a whole manager: ``OffloadingManager(policy=NaiveARC)``.
"""
