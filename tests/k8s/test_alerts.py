"""Alerts as Prometheus itself decides about them; and the page that tells what to do."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from k8s.tools.monitoring import MONITORING
from tests.conftest import command
from tests.support.k8s.rendering import Manifest, Objects, read
from tests.support.prometheus import program

ALERTS = MONITORING / "alerts.yaml"
CASES = Path(__file__).with_name("alert_cases.yaml")
_JOB = 'job="d"'
_UP = "drafthouse_target_up"


@pytest.fixture(scope="module")
def rules() -> Objects:
    document = yaml.safe_load(ALERTS.read_text("utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def labelled(series: str) -> str:
    """Add the job to a series' labels."""
    name, _, labels = series.removesuffix("}").partition("{")
    return f"{name}{{{', '.join(filter(None, (_JOB, labels)))}}}"


def unit_tests(name: str, case: Manifest) -> Iterator[Manifest]:
    """Yield promtool's two tests of a case: its alert fires and no other, and none does."""
    alerts = [name.split(" ")[0], *case.get("also", ())]
    for outcome, firing in (("fires", alerts), ("silent", [])):
        series = case[outcome]
        if not any(each.startswith(_UP) for each in series):
            series = {_UP: "1x1500", **series}
        yield {
            "name": f"{name}: {outcome}",
            "interval": "1m",
            "input_series": [
                {"series": labelled(each), "values": values} for each, values in series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": case["after"],
                    "exp_samples": [
                        {"labels": f'{{alertname="{each}"}}', "value": 1} for each in firing
                    ],
                }
            ],
        }


def test_every_alert_fires_on_its_case_and_is_silent_on_the_other(rules: Objects, tmp_path: Path):
    # All values are text: YAML takes 0x20 for a number.
    cases = yaml.load(CASES.read_text("utf-8"), Loader=yaml.BaseLoader)
    assert {name.split(" ")[0] for name in cases} == {rule["alert"] for rule in rules}
    written = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [test for name, case in cases.items() for test in unit_tests(name, case)],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(written), "utf-8")
    done = command(program("promtool"), "test", "rules", tmp_path / "tests.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_is_wrong_and_leads_to_its_heading_in_the_runbook(
    rules: Objects,
):
    page = read("docs/runbook.md")
    entries = dict(re.findall(r"^## (Drafthouse\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert list(entries) == [rule["alert"] for rule in rules], "the same, in the same order"
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "runbook"}
        link = f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == link
        entry = entries[rule["alert"]]
        for part in ("* **It means**: ", "* **Look at**: ", "* **Remedy**: "):
            assert entry.count(part) == 1, f"{rule['alert']}: {part}"
