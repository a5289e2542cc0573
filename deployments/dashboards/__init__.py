"""Grafana's dashboards and the PrometheusRule, written by `python -m deployments.dashboards`."""
