"""Metrics: names and meanings, alarms, the dashboard, and a collector for `prometheus_client`."""

from kvoffload.metrics.collector import Collector

__all__ = ["Collector"]
