"""Writes Grafana's dashboards and the PrometheusRule; a part of `python -m docs.tools`."""
