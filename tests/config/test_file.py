from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.file import load, parse_arguments
from tests.support.errors import config_error

DOCUMENT = """
applications:
  - name: drafthouse
    import_path: deployments.app:build
    args:
      model_name: demo
      http: {port: 8001}
      target:
        engine:
          model: somewhere
      drafters:
        lookup:
          kind: prompt_lookup
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(DOCUMENT, "utf-8")
    return path


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "other.yaml"
    path.write_text(text, "utf-8")
    return path


def test_a_model_without_another_name_is_served_by_its_own(file: Path):
    overrides = ["model_name=''", "target.engine.model=org/model"]
    loaded = load(file, overrides)
    assert loaded.config.model_name == "org/model"
    arguments = loaded.document["applications"][0]["args"]
    assert parse_arguments(arguments).model_name == "org/model"


def test_settings_come_from_args_and_overrides_and_a_replica_parses_the_same(file: Path):
    config = load(file).config
    assert (config.model_name, config.target.engine.model) == ("demo", "somewhere")
    assert (config.http.host, config.http.port, config.grpc.port) == ("127.0.0.1", 8001, 9000)
    loaded = load(
        file,
        [
            "target.engine.dtype=float32",
            "target.engine.threads=2",
            "coordinator.target_silence_s=9.5",
            "tasks.code=[lookup]",
            "target.placement.labels={ray.io/node-group: target}",
            "drafters.lookup.options.max_ngram=4",
            "http.port=8123",
            "grpc.port=9123",
        ],
    )
    config, application = loaded.config, loaded.document["applications"][0]
    assert (config.target.engine.dtype, config.target.engine.threads) == ("float32", 2)
    assert config.coordinator.target_silence_s == 9.5
    assert config.tasks == {"code": ("lookup",)}
    assert config.target.placement.labels == {"ray.io/node-group": "target"}
    assert config.drafters["lookup"].options == {"max_ngram": 4}
    assert (config.http.port, config.grpc.port) == (8123, 9123)
    assert application["import_path"] == "deployments.app:build"
    assert parse_arguments(application["args"]) == config


def test_the_last_override_wins_and_a_value_may_be_empty_or_hold_an_equals_sign(file: Path):
    assert load(file, ["model_name=a", "model_name=b=c"]).config.model_name == "b=c"
    assert load(file, ["drafters={}"]).config.drafters == {}
    assert load(file, ["drafters="]).config.drafters == {}


# What YAML 1.1 reads as False, True, None, 750, 16, 1000, 8, a date, a float and its own `=`.
OTHER_NAMES = (
    *("no", "Off", "on", "null", "~", "12:30", "0x10", "1_000", "010", "0b11", "7"),
    *("2026-11-27", "2026-11-27 10:00:00", "2026-13-45", "1.5", ".inf", "=", "[a]", "{a: 1}"),
)


@pytest.mark.parametrize("key", OTHER_NAMES)
def test_a_key_that_yaml_reads_as_another_name_is_to_be_quoted(tmp_path: Path, key: str):
    target = "target: {engine: {model: m}}"
    for section in (f"tasks: {{{key}: []}}", f"drafters: {{x: {{options: {{{key}: 1}}}}}}"):
        path = written(tmp_path, f"applications:\n- args: {{{target}, {section}}}")
        with config_error(r"line 2, column \d+: .*put it in quotes"):
            load(path)
    path = written(tmp_path, f"applications:\n- args: {{{target}}}")
    with config_error(r"--set 'tasks=.*put it in quotes", "tasks"):
        load(path, [f"tasks={{{key}: []}}"])


def test_keys_in_quotes_and_those_of_an_override_are_names_as_they_stand(tmp_path: Path):
    quoted = "'no': [], \"12:30\": [], '<<': []"
    text = f"applications: [{{args: {{target: {{engine: {{model: m}}}}, tasks: {{{quoted}}}}}}}]"
    tasks = load(written(tmp_path, text), ["tasks.null=[]", "tasks.010=[]"]).config.tasks
    assert set(tasks) == {"no", "12:30", "<<", "null", "010"}


@pytest.mark.parametrize("value", ["0100", "12:30", "1_000", "0b11", "2026-11-27", "2026-13-45"])
def test_a_value_that_seems_another_number_is_refused(file: Path, value: str):
    for place in (f"logging_config: {{port: {value}}}\napplications: [{{}}]", f"- {value}"):
        with config_error(f"{value} is another value to YAML than it seems"):
            load(written(file.parent, place))
    with config_error(f"--set 'http.port={value}': line 1, column 1: {value}"):
        load(file, [f"http.port={value}"])


@pytest.mark.parametrize("text", ["no", "0100", "12:30", "null", "::1", "[a", "a: b", "2026-11-27"])
def test_an_override_of_a_text_is_the_text_as_it_stands(file: Path, text: str):
    assert load(file, [f"model_name={text}"]).config.model_name == text
    labels = load(file, [f"target.placement.labels.zone= {text} "]).config.target.placement.labels
    assert labels == {"zone": text}
    assert load(file, [f"model_name='{text}'"]).config.model_name == text


def test_mappings_are_merged_from_others_and_from_merged_ones(tmp_path: Path):
    path = written(
        tmp_path,
        "applications:\n- args:\n    target: {engine: {model: m}}\n    drafters:\n"
        "      x: {kind: lm, options: {a: &z {n: 1}, b: {c: &a {<<: *z, n: 2}}}}\n"
        "      y: &y {kind: lm, max_nodes: 4, options: {<<: *a}}\n"
        "      z: {<<: *y, max_nodes: 8}\n",
    )
    drafters = load(path).config.drafters
    assert drafters["x"].options["b"] == {"c": {"n": 2}}
    assert drafters["y"].options == {"n": 2}
    assert drafters["z"] == replace(drafters["y"], max_nodes=8)
    changed = replace(drafters["z"], options={"n": 5})
    assert load(path, ["drafters.z.options.n=5"]).config.drafters == drafters | {"z": changed}


def test_a_missing_file_and_one_that_is_not_text_are_refused(tmp_path: Path):
    with config_error("cannot be read: No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with config_error("not valid YAML"):
        load(tmp_path / "binary.yaml")
