"""The recipe: frozen, typed, and without unknown keys.

Comes in: a YAML file and command-line overrides. Goes out: one ``RunConfig``. Everything in the config is public; this
module must never see data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from dpllm.errors import ConfigError
from dpllm.privacy.plan import Neighbours
from dpllm.privacy.releases import flip_probability
from dpllm.recipe.section import Section, builtin_flags, explain, read_recipe
from dpllm.recipe.sections import AuditConfig, CardConfig, Objective, PrivacyConfig
from dpllm.recipe.sections import CsvConfig as CsvConfig
from dpllm.recipe.sections import TelemetryConfig as TelemetryConfig
from dpllm.recipe.sections import TrainConfig as TrainConfig


class ModelConfig(Section):
    """The base model. Its pretraining data are not covered by any guarantee of the run."""

    name_or_path: str
    """Hub id, local directory, or builtin:tiny."""
    revision: str | None = None
    """Commit, tag or branch of the Hub repository; the resolved commit is recorded in run.json."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the frozen base; auto is the checkpoint's on a GPU and float32 on a CPU. Trained weights are float32."""
    quantization: Literal["4bit", "8bit"] | None = None
    """Load the frozen base through bitsandbytes (extra: quant)."""
    adapter: str | None = Field(default=None, min_length=1)
    """Directory of an adapter to start from (a run's export/, or one saved by peft), with the recipe's rank, alpha and layers and
    on this base model. Its training data are protected by its own statement alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021) made and saved by peft."""

    method: Literal["lora"] = "lora"
    """lora: low-rank adapters train."""
    r: PositiveInt = 16
    """Rank. Servers such as vLLM accept up to 16 by default."""
    alpha: float = Field(default=32, gt=0)
    """The adapter's output is scaled by alpha / r."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input, in training only, and only without differential privacy."""
    target_modules: Literal["auto"] | list[str] | str = "auto"
    """auto: every linear layer of the decoder blocks. Otherwise layer names as peft takes them; embeddings are allowed."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead (Kalajdzievski 2023)."""
    lora_a: Literal["trained", "frozen"] = "trained"
    """frozen: the first factor keeps its random initialisation and only the second trains (FFA-LoRA, Sun et al. 2024). Half as
    many coordinates get noise, and the noise of one factor is not multiplied by that of the other."""
    use_dora: bool = False
    """Only false is possible; the key exists to say why."""
    modules_to_save: list[str] = Field(default_factory=list)
    """Names of layers that train in full besides the adapters, such as lm_head. A tied layer is copied, and thereby untied."""

    @field_validator("use_dora")
    @classmethod
    def _no_dora(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "the magnitude of DoRA has no per-example gradient, so it could not be clipped; set adapter.use_dora: false "
                "(LoRA and rsLoRA work)"
            )
        return value


class FrozenConfig(Section):
    """Frozen-layer fine-tuning: the last blocks train, everything below them does not."""

    method: Literal["frozen"]
    """frozen: the last blocks train, the others are frozen."""
    last_blocks: int = Field(default=2, ge=0)
    """How many of the last decoder blocks train."""
    lm_head: bool = False
    """Train the output head too. Where it is tied to the input embedding, the embedding trains with it."""
    final_norm: bool = True
    """Train the final norm, before the head, too."""


Source = str | list[str]
"""Value of ``data.train`` and ``data.eval``."""


class DataConfig(Section):
    """The data: their files, the format of their rows, and their owners."""

    train: Source
    """jsonl, json, csv or parquet file (the first three also as .gz, .bz2 or .xz), glob, directory, Hub id, or
    builtin:clinic; or a list of them."""
    eval: Source | None = None
    """Held-out data in the same format; null: no evaluation."""
    csv: CsvConfig = CsvConfig()
    """How csv files are read."""
    train_split: str = "train"
    """Split to read if data.train is a directory of datasets or a Hub id."""
    eval_split: str = "validation"
    """Split to read if data.eval is a directory of datasets or a Hub id."""
    revision: str | None = None
    """Commit, tag or branch, if the data come from the Hub."""
    public: bool = False
    """The training data are public. A run without differential privacy needs this, or an exception in the ledger."""
    eval_public: bool = False
    """The evaluation data are public, so that figures computed from them may be published."""
    public_size: PositiveInt | None = None
    """Declared number of privacy units (rows, with sampling: example), not counted in the data; the neighbouring relation is then
    add/remove-one. null: they are counted and the count is published; the relation is then zero-out."""
    format: Literal["auto", "text", "prompt_completion", "messages", "preference"] = "auto"
    """Format of the rows. auto infers it from the columns that have values, and refuses rows that fit several formats or differ
    from each other. Alpaca columns are read as prompt_completion, ShareGPT's as messages. preference: pairs of a chosen and a
    rejected answer, with or without a column prompt, of text or of messages."""
    label_record: str | None = None
    """What `dpllm randomize-labels` wrote beside data.train: labels are private at the source, and the loss knows how much."""
    label_epsilon: float | None = Field(default=None, gt=0, le=50)
    """Of data.label_record, which sets it: the epsilon of one label."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Your names for the text columns, as in {prompt: meaning_representation}; every row must have them (input, system, tools and
    chat_template_kwargs: at least one row). null: the column of that name is ignored, as in {messages: null}."""
    chat_template: str | None = None
    """Chat template in place of the model's, for messages: a file such as chat.jinja, a folder with a tokenizer that has one, or
    the template itself. config.yaml holds its text, run.json its SHA-256, and export/ the tokenizer with it."""
    unit: str = "example"
    """The privacy unit: example, or the name of a column that says whose row it is. Values that differ only in surrounding or
    invisible spaces, in Unicode form, or as 1 and 1.0 do, are one unit; case matters."""
    max_examples_per_unit: PositiveInt | None = None
    """With a unit column: the most rows of one unit that train, chosen by a rule that reads that unit's rows only."""
    owners: Literal["one", "several"] = "one"
    """How many people a row names in the unit column. several: in a list, or between semicolons. Who has which row is then
    public: it alone decides which rows are kept, so that each person has at most max_examples_per_unit of them (more than 1: with
    sampling: example). The relation is zero-out of one person's rows, which keep their slots."""
    sampling: Literal["unit", "example"] = "unit"
    """What is sampled and clipped as a whole. unit: all rows of a unit together. example: single rows; the guarantee for a unit
    of up to max_examples_per_unit rows then follows from a mixture of Gaussians (Charles et al. 2024)."""
    template: str | None = None
    """How prompt and completion become one text, such as "{prompt}\\n### Answer:\\n{completion}"; all before the completion is
    masked. null: one space between the two, unless the data already have whitespace there. For format prompt_completion only."""
    max_length: int = Field(default=512, ge=2)
    """Most tokens in one sequence."""
    long_examples: Literal["chunk", "truncate", "refuse"] = "truncate"
    """What to do with a row longer than max_length; the chunks of a row stay in its privacy unit."""
    packing: bool = False
    """Only false is possible; the key exists to say why."""
    control: list[str] = Field(default_factory=list)
    """Control codes: columns such as [visit, age], by which the model is later asked for texts. Each text is trained on after a
    line with its row's values, "visit: home | age: old", which itself is masked. Canaries get no such line; not for format
    messages."""

    @model_validator(mode="before")
    @classmethod
    def _builtin_is_public(cls, values: Any) -> Any:
        """The builtin data are generated, so figures computed from them may be published."""
        return {**values, **dict.fromkeys(builtin_flags(values), True)} if isinstance(values, dict) else values

    @field_validator("columns")
    @classmethod
    def _columns_of_text(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        texts = "text", "prompt", "completion", "messages", "instruction", "input", "output", "conversations", "system"
        others = "chosen", "rejected", "tools", "chat_template_kwargs"
        if wrong := sorted(value.keys() - {*texts, *others}):
            raise ValueError(
                f"{wrong[0]!r} is not a text column of any format, and renaming the column of a unit would change who is "
                f"protected. Rename only {', '.join((*texts, *others))}; name the unit's own column in data.unit."
            )
        return value

    @field_validator("train", "eval", mode="wrap")
    @classmethod
    def _one_or_several(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            source = read(value)
        except ValidationError:  # would give one error for each possible type
            source = []
        if source == [] or value == "":
            raise ValueError("should be a file, directory, glob or Hub id, or a list of them")
        return source

    @field_validator("packing")
    @classmethod
    def _no_packing(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "packing puts several people's text in one row, so clipping would bound rows and not people; "
                "set data.packing: false"
            )
        return value

    @field_validator("template")
    @classmethod
    def _two_fields(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if re.findall(r"\{\w*\}", value) != ["{prompt}", "{completion}"] or not value.endswith("{completion}"):
            raise ValueError(
                "should hold {prompt}, then {completion}, each once, no other field, and end there: the end token follows"
            )
        if re.search(r"\{\{(prompt|completion)\}\}", value) or not re.sub(r"[\n\t]", "", value).isprintable():
            raise ValueError("should have single braces, and only printable characters besides line ends and tabs")
        if "\\n" in value:
            raise ValueError(
                'has a backslash and an n, not a line end; write it in double quotes, as "{prompt}\\n{completion}"'
            )
        return value

    @field_validator("control")
    @classmethod
    def _columns_of_control(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value) or any(not name.strip() or set(name) & set(";=|:\r\n") for name in value):
            raise ValueError(
                "should be distinct column names without ; = | : and line ends, which separate names and values; rename the "
                "column in the data"
            )
        return value

    @model_validator(mode="after")
    def _unit(self) -> DataConfig:
        if self.unit != "example" and self.unit in self.control:
            raise ValueError(
                f"data.control names {self.unit!r}, the unit column: texts would be requested by person, and the names of "
                "people would have to be public; remove it from data.control"
            )
        if self.unit == "example" and self.max_examples_per_unit is not None:
            raise ValueError("max_examples_per_unit needs data.unit: <column>; with unit: example remove it")
        if self.unit == "example" and self.sampling == "example":
            raise ValueError("sampling: example needs data.unit: <column>; if each row is a unit they are the same")
        if self.unit != "example" and self.max_examples_per_unit is None:
            raise ValueError("data.unit: <column> needs data.max_examples_per_unit, the most rows of one unit")
        if self.owners == "several":
            self._check_owners()
        if self.label_epsilon is not None and self.label_record is None:
            raise ValueError("label_epsilon is set by data.label_record; name the record, or remove label_epsilon")
        return self

    @property
    def relation(self) -> Neighbours:
        """The neighbouring relation, by whether the size is counted or declared, or owners are public."""
        if self.owners == "several":
            return "zero_out_public_graph"
        return "zero_out" if self.public_size is None else "add_or_remove_one"

    def slots_each(self, repetitions: int) -> int:
        """Slots in N of one candidate canary: one for each repetition if rows are sampled, else one."""
        return repetitions if "example" in (self.unit, self.sampling) else 1

    def _check_owners(self) -> None:
        if self.unit == "example":
            raise ValueError("owners: several needs data.unit: <column>, which says whose each row is")
        if self.public_size is not None:
            raise ValueError(
                "with owners: several, who has which row is public, and so is the number of rows; remove data.public_size, which "
                "would hide it"
            )
        if self.sampling == "unit" and self.max_examples_per_unit != 1:
            raise ValueError(
                "with owners: several, rows are drawn one by one, since those of one person are others' too; set "
                "data.max_examples_per_unit: 1, or data.sampling: example for more"
            )


class RunConfig(Section):
    """One run, fully described by public values."""

    model: ModelConfig
    adapter: Annotated[LoraConfig | FrozenConfig, Field(discriminator="method")] = LoraConfig()
    data: DataConfig
    privacy: PrivacyConfig = PrivacyConfig()
    train: TrainConfig
    audit: AuditConfig = AuditConfig()
    card: CardConfig = CardConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    output_dir: str
    """The run directory; a directory that already holds a run is refused without --resume or --overwrite."""

    @field_validator("adapter", mode="before")
    @classmethod
    def _lora_by_default(cls, value: Any) -> Any:
        return {"method": "lora", **value} if isinstance(value, dict) else value

    def __str__(self) -> str:
        return repr(self)  # the ledger's address may hold a password

    def __repr__(self) -> str:
        promised = f"epsilon {self.privacy.epsilon}" if self.privacy.enabled else "no differential privacy"
        return f"Recipe: {self.adapter.method} of {self.model.name_or_path}, {promised}, output_dir {self.output_dir}"

    @property
    def flaw(self) -> str | None:
        """Why a run of this recipe has no guarantee; None if it has one."""
        if not self.privacy.enabled:
            return "it was trained without differential privacy"
        if self.privacy.insecure_seed is not None:
            return "its noise and sampling were seeded by the user (privacy.insecure_seed), so they can be regenerated"
        return None

    @property
    def deviations(self) -> list[str]:
        """Deviations that the card names although the guarantee holds."""
        notes: list[str] = []
        if self.flaw is not None:
            return notes
        if self.data.eval is not None and not self.data.eval_public:
            sent = self.telemetry.private_metrics and self.telemetry.trackers
            kept = "went to trackers (telemetry.private_metrics)" if sent else "is kept private"
            notes.append(
                f"held-out loss was computed on private evaluation data; it {kept} and nothing was chosen by it"
            )
        if self.telemetry.private_metrics and not self.data.public:
            notes.append(
                "un-noised figures of the training data (loss, share of clipped gradients) and of the evaluation data went to "
                "metrics and trackers (telemetry.private_metrics); they are outside the guarantee"
            )
        return notes

    @model_validator(mode="after")
    def _model_suits_adapter(self) -> RunConfig:
        if self.model.quantization is not None and self.adapter.method == "frozen":
            raise ValueError(
                "adapter.method: frozen trains whole weights, and weights quantised by model.quantization: "
                f"{self.model.quantization} cannot be trained; set model.quantization: null, or adapter.method: lora"
            )
        if self.model.adapter is not None and self.adapter.method == "frozen":
            raise ValueError(
                "model.adapter is an adapter to start LoRA from, and adapter.method: frozen trains none; set model.adapter: "
                "null, or adapter.method: lora"
            )
        return self

    @model_validator(mode="after")
    def _objective(self) -> RunConfig:
        data, train = self.data, self.train
        stated = Objective(train.objective, train.beta, train.label_smoothing)
        stated.check(data.format, data.long_examples, data.label_record)
        return self

    @property
    def objective(self) -> Objective:
        """The training objective of each example."""
        train, epsilon = self.train, self.data.label_epsilon
        return Objective(train.objective, train.beta, flip_probability(epsilon) if epsilon else train.label_smoothing)


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads a recipe and applies overrides.

    Args:
        path: YAML file.
        overrides: Dotted key -> value, as ``section.parse_overrides`` returns them.

    Raises:
        ConfigError: The file is missing, YAML is broken or unclear, or a key or value is not allowed; one line for each.
    """
    return make_config(read_recipe(Path(path)), overrides, str(path))


OF_DATA = {
    "unit": "data.unit",
    "max_examples_per_unit": "data.max_examples_per_unit",
    "dataset": "privacy.dataset",
    "ledger": "privacy.ledger",
}
"""Option of a release of data -> the recipe key that it sets; with a model, ``OF_MODEL``."""
OF_MODEL = {**OF_DATA, "model": "model.name_or_path"}


def around(source: str, keys: Mapping[str, Any], command: str) -> RunConfig:
    """The recipe of a YAML file with these keys; or a minimal recipe for other data, with these keys.

    Raises:
        ConfigError: See ``load_config``; or no model is named.
    """
    if Path(source).suffix in (".yaml", ".yml"):
        return load_config(source, dict(keys))
    if "model.name_or_path" not in keys:
        raise ConfigError(f"{command} reads text with a model, but none is named. Type --model NAME, or a recipe.")
    raw: dict[str, Any] = {"model": {}, "data": {"train": source}, "train": {"steps": 1}, "output_dir": "none"}
    return make_config(raw, keys, source)


def make_config(raw: dict[str, Any], overrides: Mapping[str, Any] | None, origin: str) -> RunConfig:
    """The recipe from a mapping of sections, with overrides; errors name ``origin``. See ``load_config``."""
    changes = dict(overrides or {})
    for flag in builtin_flags(raw.get("data")):  # it is of the builtin rows, and not of those that replace them
        if f"data.{'train' if flag == 'public' else 'eval'}" in changes:
            changes.setdefault(f"data.{flag}", False)
    if "audit.canaries" in changes and changes["audit.canaries"] is None:
        changes.setdefault("audit.gradient_canaries", 0)
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = raw
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[last] = value
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {line}" for line in explain(error, RunConfig))) from None


def dump_config(config: RunConfig) -> str:
    """The resolved recipe as YAML, with every default."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
