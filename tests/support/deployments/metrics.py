"""What a server's page of metrics says."""

import re

import httpx


def samples(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series of that name, as the page of a server has them now."""
    page = httpx.get(f"{url}/metrics", timeout=30, verify=False).raise_for_status().text
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", page, re.MULTILINE)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in found]


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of the series of that name that carry `labels`."""
    return sum(value for own, value in samples(url, name) if labels.items() <= own.items())
