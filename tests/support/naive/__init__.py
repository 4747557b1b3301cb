"""Naive twins: a simple O(n) version of every fast structure, policy and rule, with lists and dicts.

Property tests make the same calls to twin and counterpart and compare every decision. To understand a kernel,
read its twin first. The policies serve a whole manager: ``OffloadingManager(policy=NaiveARC)``.
"""
