"""Naive twins: a simple O(n) version of every fast structure, policy and rule.

Each twin shows in plain Python, with lists and dicts, what its fast counterpart must do. Property tests make
the same calls to both and compare every decision; to learn *what* a kernel does, read its twin first. The
policies serve a whole manager: ``OffloadingManager(policy=NaiveARC)``.
"""
