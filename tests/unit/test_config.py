"""The configuration: the same from every source, and mistakes that say where they are and what was meant."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from ep_hooks.config import EPHooksConfig, load_config
from ep_hooks.domains import REPLICATE, SHARD, Domain, Placement, PlacementKind, partial
from ep_hooks.errors import ConfigError
from ep_hooks.modes import ENVIRONMENT_VARIABLE, Mode, resolve_mode

FULL: dict[str, Any] = {
    "mode": "observe",
    "axes": {"dense": {"dp": 4}, "expert": {"edp": 2, "ep": -1}},
    "ranks": [0, 1, 2, 3],
    "domains": [
        {"match": "*.experts.*", "domain": "expert", "name": "moe"},
        {"match": "shared.*", "domain": {"ep": {"partial": "avg", "divisor": 2.0}}, "rest": "replicate", "name": "s"},
        {"match": "head", "domain": {"edp": {"replicate": True, "at": [0, -1]}, "ep": "shard"}, "id": "tied"},
    ],
    "expert_containers": ["*.MoE"],
    "undeclared": "raise",
    "clip": {"max_norm": 1.5, "norm_type": 2.5, "replace": "always"},
    "nonfinite": {"action": "skip"},
    "threshold": {"norm": 100.0, "action": "raise"},
    "sync": {"bucket_mb": 1.0, "already_reduced": "warn", "broadcast": False},
    "allow_untested_host": True,
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_source_gives_the_same(tmp_path: Path) -> None:
    given = load_config(FULL)
    sources = [
        load_config(write(tmp_path, yaml.safe_dump(FULL))),
        load_config(str(write(tmp_path, yaml.safe_dump(FULL), "c.yml"))),
        load_config(write(tmp_path, json.dumps(FULL), "c.json")),
        load_config(json.loads(given.model_dump_json())),
        load_config(given),
    ]
    assert all(other == given and other.digest() == given.digest() for other in sources)
    assert load_config({"sync": {"bucket_mb": 2}}).digest() != load_config({}).digest()


def test_nothing_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(None) == load_config({}) == load_config(write(tmp_path, "# a comment\n")) == EPHooksConfig()


def test_infinity_can_be_written(tmp_path: Path) -> None:
    for text in ("clip: {norm_type: .inf, max_norm: .inf}", 'clip: {norm_type: "inf", max_norm: "inf"}'):
        clip = load_config(write(tmp_path, text)).clip
        assert (clip.norm_type, clip.max_norm) == (math.inf, math.inf)


def test_off_needs_no_quotes(tmp_path: Path) -> None:
    """YAML 1.1 reads an unquoted off as false."""
    config = load_config(write(tmp_path, "mode: off\nsync: {already_reduced: off}"))
    assert (config.mode, config.sync.already_reduced) == (Mode.OFF, "off")
    assert config == load_config({"mode": "off", "sync": {"already_reduced": "off"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mode: on", "mode: Input should be 'off', 'observe', 'repair' or 'enforce' (got True, as YAML reads an"),
        ("sync: {already_reduced: yes}", "sync.already_reduced: Input should be 'raise', 'warn' or 'off' (got True"),
        ("undeclared: off", "undeclared: Input should be 'assume' or 'raise' (got False, as YAML reads an unquoted"),
        ("clip: {max_norm: off}", "clip.max_norm: must be a number (got False, as YAML"),
        ("clip: {norm_type: on}", "clip.norm_type: must be a number (got True, as YAML"),
        ("threshold: {norm: off}", "threshold.norm: must be a number (got False, as YAML"),
        ("sync: {bucket_mb: on}", "sync.bucket_mb: must be a number (got True, as YAML"),
        ("domains: [{match: a, domain: {ep: {partial: sum, divisor: on}}}]", "divisor: must be a number (got True, as"),
    ],
)  # fmt: skip
def test_other_words_that_yaml_reads_as_true_or_false(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("mode: off\n\nmode: enforce\n", "c.yaml", "line 3: key 'mode' is there already, in line 1"),
        ("clip:\n  max_norm: 1\n  max_norm: 2\n", "c.yaml", "line 3: key 'max_norm' is there already, in line 2"),
        ('{"clip": {\n\t"max_norm":1,\n\t"max_norm":2}}', "c.json", "line 3: key 'max_norm' is there already, in line"),
    ],
)  # fmt: skip
def test_a_key_that_is_written_twice(text: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text, name))


def test_equal_keys_of_different_mappings_are_no_repeats(tmp_path: Path) -> None:
    text = "nonfinite: &same {action: skip}\nthreshold: {<<: *same, action: raise}\n"
    config = load_config(write(tmp_path, text))
    assert (config.nonfinite.action, config.threshold.action) == ("skip", "raise")
    config = load_config(write(tmp_path, '{"nonfinite":{"action":"skip"},\n\t"threshold":{"action":"skip"}}', "c.json"))
    assert (config.nonfinite.action, config.threshold.action) == ("skip", "skip")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file '.*nowhere.yaml': No such file"):
        load_config(tmp_path / "nowhere.yaml")
    for text, name in (("clip: [", "c.yaml"), ("{", "c.json")):
        with pytest.raises(ConfigError, match="is no valid YAML or JSON"):
            load_config(write(tmp_path, text, name))
    with pytest.raises(ConfigError, match="must hold a mapping of keys, got list"):
        load_config(write(tmp_path, "- clip"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clipp": {}}, "clipp: unknown key; did you mean 'clip'?"),
        ({"zzz": 1}, "zzz: unknown key; known keys: mode, axes, ranks, domains"),
        ({"clip": {"max_nrom": 1}}, "clip.max_nrom: unknown key; did you mean 'max_norm'?"),
        ({"clip": {"zzz": 1}}, "clip.zzz: unknown key; known keys: max_norm, norm_type, replace"),
        ({"nonfinite": {"actoin": "skip"}}, "nonfinite.actoin: unknown key; did you mean 'action'?"),
        ({"threshold": {"norms": 1}}, "threshold.norms: unknown key; did you mean 'norm'?"),
        ({"sync": {"bucket": 1}}, "sync.bucket: unknown key; did you mean 'bucket_mb'?"),
        ({"domains": [{"match": "b", "domain": "dense", "rset": "x"}]}, "domains.0.rset: unknown key; did you mean"),
        ({"clip": {"max_norm": -1}}, "clip.max_norm: must be a number >= 0"),
        ({"clip": {"max_norm": math.nan}}, "clip.max_norm: must be a number >= 0"),
        ({"clip": {"norm_type": 0}}, "clip.norm_type: must be a number >= 1 or inf"),
        ({"clip": {"norm_type": math.nan}}, "clip.norm_type: must be"),
        ({"clip": {"replace": "yes"}}, "clip.replace: Input should be 'auto', 'always' or 'never' (got 'yes')"),
        ({"threshold": {"norm": math.nan}}, "threshold.norm: must be"),
        *(({"sync": {"bucket_mb": wrong}}, "sync.bucket_mb: Input should be") for wrong in (
            0, -1.0, math.inf, -math.inf, math.nan, 1e308, ".inf", "inf"
        )),
        ({"mode": "observ"}, "mode: Input should be 'off', 'observe', 'repair' or 'enforce' (got 'observ')"),
        ({"domains": [{"domain": "dense"}]}, "domains.0.match: Field required"),
        ({"domains": [{"match": "a", "domain": "exprt"}]}, "domains.0: no domain 'exprt'; built in are dense"),
        ({"domains": [{"match": "a", "domain": {"ep": {"partial": "sum", "divisor": 0}}}]}, "greater than 0"),
        ({"domains": [{"match": "a", "domain": {"ep": {"partial": "sum", "divisor": math.inf}}}]}, "a finite number"),
        ({"domains": [{"match": "a", "domain": {"ep": {"partial": "sum", "divisor": math.nan}}}]}, "a finite number"),
        ({"domains": [{"match": "a", "domain": {"ep": "shard"}, "name": "a b"}]}, "a domain's name may hold"),
        ({"clip": {"max_norm": -1, "x": 1}, "snyc": {}}, "3 error(s)"),
    ],
)  # fmt: skip
def test_mistakes_say_where_and_what_was_meant(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(wrong)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            {"partial": "sum", "divsor": 2},
            ".divsor: unknown key; did you mean 'divisor'? Known keys: partial, divisor, at",
        ),
        ({"partial": "sum", "zzz": 2}, ".zzz: unknown key; known keys: partial, divisor, at"),
        ({"replicate": True, "att": [0]}, ".att: unknown key; did you mean 'at'? Known keys: replicate, at"),
        ({"partial": "max"}, ".partial: Input should be 'sum' or 'avg' (got 'max')"),
        ({"divisor": 2}, ".partial: Field required (got {'divisor': 2})"),
        ("shrad", ": Input should be 'shard', 'replicate', 'sum' or 'avg' (got 'shrad')"),
    ],
)
def test_a_mistake_in_a_placement_is_one_error(placement: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"domains": [{"match": "a", "domain": {"edp": "avg", "ep": placement}}]})
    assert str(caught.value) == f"config: 1 error(s):\n  domains.0.domain.ep{message}"


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({"ep": 8}, {"ep": 8}),
        ({"edp": -1, "ep": 2}, {"edp": 4, "ep": 2}),
        ({"edp": 8, "ep": -1}, {"edp": 8, "ep": 1}),
        ({"pp": 2, "edp": -1, "ep": 2}, {"pp": 2, "edp": 2, "ep": 2}),
    ],
)
def test_axes(axes: dict[str, int], sizes: dict[str, int]) -> None:
    for given in (axes, {"experts": axes}):
        topology = load_config({"axes": given}).topology(tuple(range(8)))
        assert topology is not None
        assert {name: topology.axis(name).size(0) for name in topology.axes} == sizes


def test_two_factorisations_over_a_rank_set_with_gaps() -> None:
    topology = load_config({"axes": {"dense": {"dp": -1}, "expert": {"edp": -1, "ep": 2}}}).topology((1, 2, 5, 9))
    assert topology is not None
    assert topology.axis("dp").groups == ((1, 2, 5, 9),)
    assert topology.axis("ep").groups == ((1, 2), (5, 9))
    assert load_config({}).topology((0, 1)) is None


@pytest.mark.parametrize(
    "axes", [{"ep": 3}, {"ep": 0}, {"ep": -2}, {"a": -1, "b": -1}, {"ep": -1, "edp": 0}, {"ep": 16}]
)
def test_axes_that_do_not_number_the_ranks(axes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"does not number the 8 ranks.*one size may be -1"):
        load_config({"axes": axes}).topology(tuple(range(8)))


def test_rules_of_a_full_config() -> None:
    expert, shared, head = load_config(FULL).rules()
    assert expert.domain == Domain.expert(name="moe")
    assert shared.domain == Domain("s", {"ep": partial("avg", 2.0)}, REPLICATE)
    tied = Placement(PlacementKind.REPLICATE, at=(0, -1))
    assert head.domain == Domain("edp-replicate_ep-shard", {"edp": tied, "ep": SHARD})
    assert (expert.id, head.id) == (None, "tied")


@pytest.mark.parametrize(
    ("written", "placement"),
    [
        ("shard", SHARD),
        ("replicate", REPLICATE),
        ("sum", partial("sum")),
        ("avg", partial("avg")),
        ({"partial": "sum", "divisor": 4, "at": [0, -1]}, partial("sum", 4.0, (0, -1))),
        ({"replicate": True, "at": [1]}, Placement(PlacementKind.REPLICATE, at=(1,))),
    ],
)
def test_placements(written: object, placement: Placement) -> None:
    (rule,) = load_config({"domains": [{"match": "a", "domain": {"ep": written}}]}).rules()
    assert (rule.domain.placements, rule.domain.rest) == ({"ep": placement}, None)


@pytest.mark.parametrize(
    ("environment", "configured", "argument", "mode"),
    [
        (None, None, None, Mode.ENFORCE),
        (None, None, "observe", Mode.OBSERVE),
        (None, "repair", "observe", Mode.REPAIR),
        ("off", "repair", "observe", Mode.OFF),
        ("0", "enforce", "enforce", Mode.OFF),
        ("1", "repair", "observe", Mode.REPAIR),
        ("", "repair", None, Mode.REPAIR),
        (" Observe ", "enforce", None, Mode.OBSERVE),
    ],
)
def test_environment_over_config_over_argument(
    environment: str | None, configured: str | None, argument: str | None, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, environment)
    assert resolve_mode(configured, argument) is mode
    assert load_config({"mode": configured}).resolved_mode(argument) is mode


def test_misspelt_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="argument `mode` is 'enforced', which is no mode; valid are off, observe"):
        resolve_mode(None, "enforced")
    with pytest.raises(ConfigError, match="config `mode` is 'x'"):
        resolve_mode("x", None)
    with pytest.raises(ConfigError, match="argument `mode` is False, which is no mode"):
        resolve_mode(None, False)  # type: ignore[arg-type]
    for value in ("obsrve", "true", "2"):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
        with pytest.raises(ConfigError, match=f"environment variable EP_HOOKS is '{value}'"):
            resolve_mode("enforce", "enforce")
