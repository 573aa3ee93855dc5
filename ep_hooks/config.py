"""Configuration: one pydantic model, the same in YAML, JSON, a dict and a framework's own config file."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from ep_hooks.domains import REPLICATE, SHARD, Domain, Placement, partial
from ep_hooks.errors import ConfigError, DomainError
from ep_hooks.modes import Mode, resolve_mode
from ep_hooks.rules import Rule
from ep_hooks.topology import Axis, Topology

__all__ = [
    "AuditConfig",
    "ClipConfig",
    "DomainRule",
    "EPHooksConfig",
    "NonFiniteConfig",
    "ProbeConfig",
    "SyncConfig",
    "ThresholdConfig",
    "load_config",
    "ranks_in",
]


def _positive(value: float) -> float:
    if math.isnan(value) or value < 0:
        raise ValueError("must be a number >= 0")
    return value


def _norm_type(value: float) -> float:
    if math.isnan(value) or value < 1:
        raise ValueError("must be a number >= 1 or inf")
    return value


def _off(value: Any) -> Any:
    """YAML 1.1 reads an unquoted ``off`` as false."""
    return "off" if value is False else value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Number = Annotated[float, BeforeValidator(_no_bool)]
"""A float; ``off``, which YAML reads as false, is not 0."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class PartialSpec(_Model):
    """A pending reduction along one axis, written ``{partial: sum, divisor: 2}``."""

    partial: Literal["sum", "avg"] = Field(description="operator of the reduction that is still to be run")
    divisor: Number = Field(1.0, gt=0, allow_inf_nan=False, description="the SUM is divided by this after the operator")
    at: tuple[int, ...] = Field((), description="coordinates on the axis that take part; all if empty")


class TiedSpec(_Model):
    """The same value on some coordinates of an axis only, written ``{replicate: true, at: [0, -1]}``."""

    replicate: Literal[True]
    at: tuple[int, ...] = Field((), description="coordinates on the axis that hold it; all if empty")


def _spec_tag(value: Any) -> str:
    if isinstance(value, PartialSpec | TiedSpec):
        return "(partial)" if isinstance(value, PartialSpec) else "(tied)"
    if isinstance(value, Mapping):
        return "(tied)" if difflib.get_close_matches("replicate", map(str, value)) else "(partial)"
    return "(word)"


_TAGS: dict[str, type[BaseModel] | None] = {
    "(name)": None, "(placements)": None, "(word)": None, "(partial)": PartialSpec, "(tied)": TiedSpec
}  # fmt: skip
"""Members of the unions below, with their keys: pydantic puts them into the place of an error."""

PlacementSpec = Annotated[
    Annotated[Literal["shard", "replicate", "sum", "avg"], Tag("(word)")]
    | Annotated[PartialSpec, Tag("(partial)")]
    | Annotated[TiedSpec, Tag("(tied)")],
    Discriminator(_spec_tag),
]
DomainSpec = Annotated[
    Annotated[str, Tag("(name)")] | Annotated[dict[str, PlacementSpec], Tag("(placements)")],
    Discriminator(lambda value: "(placements)" if isinstance(value, Mapping) else "(name)"),
]


class DomainRule(_Model):
    """Declares the reduction domain of every parameter whose logical name matches."""

    match: str = Field(min_length=1, description="glob over the logical name, `*` crosses dots; case matters")
    domain: DomainSpec = Field(description="dense, expert, ep_sum, or placements by axis such as {ep: shard, edp: avg}")
    name: str | None = Field(None, description="label of the domain in logs; made from the placements if not given")
    rest: Literal["shard", "replicate"] | None = Field(
        None, description="placement along axes that are not listed; without it they must be listed (fail closed)"
    )
    id: str | None = Field(None, description="logical id shared by tied parameters that have different names")

    @model_validator(mode="after")
    def _resolvable(self) -> DomainRule:
        try:
            self.to_rule()
        except DomainError as error:
            raise ValueError(str(error)) from None
        return self

    def to_rule(self) -> Rule:
        """The rule for the classifier."""
        if isinstance(self.domain, str):
            named = Domain.named(self.domain)
            domain = replace(named, name=self.name or named.name)
        else:
            placements: dict[str | Axis, Placement] = {axis: _placement(spec) for axis, spec in self.domain.items()}
            rest = {"shard": SHARD, "replicate": REPLICATE, None: None}[self.rest]
            domain = Domain(self.name or _label(self.domain), placements, rest)
        return Rule(self.match, domain, self.id)


class ClipConfig(_Model):
    """When and how gradients are clipped."""

    max_norm: Annotated[Number, AfterValidator(_positive)] | None = Field(
        None, description="clip before every optimizer step of an attached optimizer; null: the caller or host clips"
    )
    norm_type: Annotated[Number, AfterValidator(_norm_type)] = Field(2.0, description="p >= 1, or .inf")
    replace: Literal["auto", "always", "never"] = Field(
        "auto", description="replace the host's norm: only where it is not known to be right, always, or never"
    )


class NonFiniteConfig(_Model):
    """What happens when a gradient holds NaN or inf; the decision is the same on every rank."""

    action: Literal["framework", "skip", "zero", "raise"] = Field(
        "framework",
        description="leave it to the framework (its scaler is told), skip the optimizer step, zero all gradients, or "
        "raise; the last three read one number from the device per step",
    )


class ThresholdConfig(_Model):
    """What happens when the norm exceeds a threshold."""

    norm: Annotated[Number, AfterValidator(_positive)] | None = Field(None, description="null: no threshold")
    action: Literal["warn", "skip", "zero", "raise"] = Field("warn", description="what to do above it")


class SyncConfig(_Model):
    """Pending reductions."""

    bucket_mb: Number = Field(
        25.0, gt=0, le=2**20, allow_inf_nan=False, description="size of one bucket in MiB of float32"
    )
    already_reduced: Annotated[Literal["raise", "warn", "off"], BeforeValidator(_off)] = Field(
        "raise", description="inputs of a pending SUM that are equal on all ranks and not zero"
    )
    broadcast: bool = Field(
        True, description="at set-up, make the replicas of parameters with pending reductions equal"
    )


class ProbeConfig(_Model):
    """Measuring what weight every rank's gradient has in every reduced gradient, with made-up gradients."""

    at_first_step: bool = Field(
        False, description="probe once, at the first step that is measured; gradients and buffers are put back"
    )
    level: Annotated[Literal["off", "warn", "raise"], BeforeValidator(_off)] = Field(
        "warn", description="what to do about a fault; off: never probe unless asked"
    )
    local_axes: tuple[str, ...] = Field(
        ("tp", "etp"),
        description="axes whose ranks compute the same gradient from the same data: nobody need reduce over them",
    )


class AuditConfig(_Model):
    """Comparing what was declared with gradients, weights and optimizer states, in a few steps."""

    level: Annotated[Literal["off", "warn", "raise"], BeforeValidator(_off)] = Field(
        "off", description="what to do about a fault; off: nothing is compared"
    )
    every: int = Field(
        1000, ge=1, description="audited are steps 1, 2, 10, 100, counted anew after a resume, and every so many"
    )


def _axes(value: Any) -> Any:
    """A flat mapping is one factorisation: {ep: 4} becomes {ranks: {ep: 4}}."""
    if isinstance(value, Mapping) and value and all(isinstance(size, int) for size in value.values()):
        return {"ranks": dict(value)}
    return value


class EPHooksConfig(_Model):
    """Configuration of ep_hooks.

    Unknown keys are errors. The same schema is used in YAML, JSON, a dict and a framework's config file.
    """

    mode: Annotated[Mode | None, BeforeValidator(_off)] = Field(
        None, description="observe, repair, enforce or off; EP_HOOKS in the environment wins"
    )
    axes: Annotated[dict[str, dict[str, int]], BeforeValidator(_axes)] = Field(
        default_factory=dict,
        description="sizes of the axes where no device mesh says so, last axis fastest: {edp: 2, ep: 4}, or by "
        "factorisation {dense: {dp: 8}, expert: {edp: 2, ep: 4}}; one size may be -1",
    )
    ranks: tuple[int, ...] | None = Field(None, description="the ranks that take part; all ranks if not given")
    domains: tuple[DomainRule, ...] = Field((), description="declared reduction domains")
    expert_containers: tuple[str, ...] = Field(
        (),
        description="globs over `module.ClassName` of expert modules; undeclared parameters in them raise",
    )
    undeclared: Literal["assume", "raise"] = Field(
        "assume",
        description="plain parameters of an attached model about which nothing is known: assume that they are "
        "replicated (measured at the first step whose gradients are not zero), or raise",
    )
    clip: ClipConfig = Field(default_factory=ClipConfig, description="norm and clip")
    nonfinite: NonFiniteConfig = Field(default_factory=NonFiniteConfig, description="NaN and inf")
    threshold: ThresholdConfig = Field(default_factory=ThresholdConfig, description="norm threshold")
    sync: SyncConfig = Field(default_factory=SyncConfig, description="pending reductions")
    probe: ProbeConfig = Field(default_factory=ProbeConfig, description="measuring the reductions themselves")
    audit: AuditConfig = Field(default_factory=AuditConfig, description="comparing what was declared with what is")
    record: str | None = Field(
        None, description="file to which the first rank appends what probe and audit find, as JSON lines"
    )
    allow_untested_host: bool = Field(
        False, description="enforce on a host version outside the tested range instead of falling back to observe"
    )

    def rules(self) -> tuple[Rule, ...]:
        """The declared domains as rules of the classifier."""
        return tuple(rule.to_rule() for rule in self.domains)

    def resolved_mode(self, argument: str | None = None) -> Mode:
        """Environment over this config over ``argument``."""
        return resolve_mode(self.mode, argument)

    def topology(self, ranks: tuple[int, ...]) -> Topology | None:
        """Topology from ``axes`` over ``ranks``; ``None`` if no axes are given.

        Raises:
            ConfigError: the sizes do not multiply to the number of ranks.
        """
        if not self.axes:
            return None
        factorisations = {}
        for name, sizes in self.axes.items():
            known = math.prod(size for size in sizes.values() if size != -1)
            free = [axis for axis, size in sizes.items() if size == -1]
            filled = {axis: (len(ranks) // known if size == -1 and known else size) for axis, size in sizes.items()}
            if len(free) > 1 or any(size < 1 for size in filled.values()) or math.prod(filled.values()) != len(ranks):
                raise ConfigError(
                    f"axes: {dict(sizes)} does not number the {len(ranks)} ranks. Name every axis, the last one "
                    "varying fastest; one size may be -1, for example {edp: -1, ep: 2}"
                )
            factorisations[name] = filled
        return Topology.grid(factorisations, ranks=ranks)

    def digest(self) -> str:
        """Short hash that is equal on ranks with the same configuration."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=8).hexdigest()


def load_config(source: str | Path | Mapping[str, Any] | EPHooksConfig | None = None) -> EPHooksConfig:
    """Configuration from a YAML or JSON file, a mapping, a ready object, or the defaults for ``None``.

    Raises:
        ConfigError: the file cannot be read or a value is wrong; names every wrong key with its place and, for an
            unknown key, the nearest known one.
    """
    if source is None:
        return EPHooksConfig()
    if isinstance(source, EPHooksConfig):
        return source
    origin = "config"
    if isinstance(source, str | Path):
        origin = str(source)
        try:
            text = Path(source).read_text(encoding="utf-8")
            data = _parse_json(text) if origin.endswith(".json") else yaml.load(text, Loader=_Loader)
        except OSError as error:
            raise ConfigError(f"cannot read the config file {origin!r}: {error.strerror or error}") from None
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{origin} is no valid YAML or JSON: {error}") from None
    else:
        data = source
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{origin} must hold a mapping of keys, got {type(data).__name__}")
    try:
        return EPHooksConfig.model_validate(dict(data))
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: {len(lines)} error(s):\n" + "\n".join(f"  {line}" for line in lines)) from None


class _Loader(yaml.SafeLoader):
    """Refuses keys that are written twice, of which PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                raise yaml.YAMLError(f"line {line}: key {key.value!r} is there already, in line {first}; remove one")
            lines[key.tag, key.value] = line
        return node


def _parse_json(text: str) -> Any:
    data = json.loads(text)
    # JSON is YAML but for tabs: refuses repeated keys and names their lines.
    yaml.compose(text.replace("\t", " "), Loader=_Loader)
    return data


def ranks_in(source: Any) -> tuple[int, ...] | None:
    """The rank set that a configuration asks for, even if something else in it is wrong; ``None`` if it asks for none.

    A rank with a wrong configuration needs it in order to tell the others.
    """
    try:
        if isinstance(source, str | Path):
            source = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
        given = source.ranks if isinstance(source, EPHooksConfig) else source["ranks"]
        return EPHooksConfig(ranks=given).ranks
    except Exception:
        return None


def _explain(item: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"] if part not in _TAGS)
    if item["type"] != "extra_forbidden":
        given = item["input"]
        words = "yes or on" if given is True else "no or off"
        origin = f", as YAML reads an unquoted {words}" if isinstance(given, bool) else ""
        return f"{place or 'config'}: {item['msg'].removeprefix('Value error, ')} (got {given!r:.200}{origin})"
    model: type[BaseModel] = EPHooksConfig
    for part in item["loc"][:-1]:
        if part in _TAGS:
            model = _TAGS[part] or model
        elif isinstance(part, str) and part in model.model_fields:
            inner = model.model_fields[part].annotation
            model = DomainRule if part == "domains" else inner if isinstance(inner, type) else model
    near = difflib.get_close_matches(str(item["loc"][-1]), model.model_fields, n=1)
    hint = f"did you mean {near[0]!r}? Known" if near else "known"
    return f"{place}: unknown key; {hint} keys: {', '.join(model.model_fields)}"


def _placement(spec: PlacementSpec) -> Placement:
    match spec:
        case "shard":
            return SHARD
        case "replicate":
            return REPLICATE
        case PartialSpec():
            return partial(spec.partial, spec.divisor, spec.at)
        case TiedSpec():
            return Placement(REPLICATE.kind, at=spec.at)
        case _:
            return partial(spec)


def _label(placements: Mapping[str, PlacementSpec]) -> str:
    words = []
    for axis, spec in placements.items():
        kind = spec if isinstance(spec, str) else spec.partial if isinstance(spec, PartialSpec) else "replicate"
        words.append(f"{axis}-{kind}")
    return "_".join(words) or "dense"
