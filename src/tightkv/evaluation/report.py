"""What an evaluation found: the content of `report.json`, from which all other forms are made."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tightkv.metrics import DivergenceFigures

__all__ = [
    "SCHEMA_VERSION",
    "AnswerExample",
    "ArmReport",
    "BucketFigures",
    "CacheFigures",
    "DataEntry",
    "EvaluationReport",
    "FidelityPass",
    "GenerationFigures",
    "LayerFigures",
    "LayerGroupFigures",
    "Level",
    "RetrievalCell",
    "RetrievalFigures",
    "TaskFigures",
    "Thresholds",
    "Verdict",
]

SCHEMA_VERSION: Literal[1] = 1

Level = Literal["safe", "caution", "unsafe"]
PassName = Literal["prefill", "decode"]


class _Entry(BaseModel):
    # NaN is a finding, too; as null it could not be read back.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class BucketFigures(_Entry):
    """Tokens with `begin` to `end - 1` tokens before them."""

    begin: int
    end: int
    figures: DivergenceFigures


class FidelityPass(_Entry):
    """One way of reading the text: in chunks (prefill), or token by token (decode)."""

    overall: DivergenceFigures
    buckets: tuple[BucketFigures, ...]


class LayerGroupFigures(_Entry):
    """The arm's formats in some layers only, the baseline's in all others.

    Attributes:
        layers: as "0-9".
    """

    layers: str
    figures: DivergenceFigures


class LayerFigures(_Entry):
    """One layer by itself, given what the baseline gives it.

    Attributes:
        k_clip_rate, v_clip_rate: clipped values as a share of those written.
        attention_error: squared error of attention's output as a share of its square.
    """

    layer_idx: int
    k_clip_rate: float
    v_clip_rate: float
    attention_error: float


class AnswerExample(_Entry):
    """A prompt whose answers differ.

    Attributes:
        first_divergence: tokens that are equal before the first that is not.
        rouge_l: of the arm's answer against the baseline's.
    """

    prompt: str
    base: str
    answer: str
    first_divergence: int
    rouge_l: float


class GenerationFigures(_Entry):
    """Answers of an arm against the baseline's.

    Attributes:
        exact_match: share of answers with equal tokens.
        median_first_divergence: equal tokens at the beginning of those answers that differ; None
            if none does.
        bleu: sacreBLEU of the corpus, 0 to 100.
        rouge1, rouge2, rouge_l: F1, 0 to 1, means over the answers.
        length_ratio: tokens of all answers, as a ratio to the baseline's.
        loops, loops_base: share of answers that end in a repeating phrase.
        distinct_2, distinct_2_base: different pairs of tokens as a share of all pairs, means.
        early_eos: share of answers that end by themselves where the baseline's is longer.
        missing_eos: share of answers that are cut where the baseline's ends by itself.
        examples: those that loop where the baseline's does not, then the worst by ROUGE-L.
    """

    num_answers: int
    temperature: float
    exact_match: float
    median_first_divergence: float | None
    bleu: float
    rouge1: float
    rouge2: float
    rouge_l: float
    length_ratio: float
    loops: float
    loops_base: float
    distinct_2: float
    distinct_2_base: float
    early_eos: float
    missing_eos: float
    examples: tuple[AnswerExample, ...]


class TaskFigures(_Entry):
    """Items of a task in both arms, compared in pairs.

    Attributes:
        metric: what is counted, as "exact_match,flexible".
        score, score_base: means, 0 to 1 where items are right or wrong.
        only_base, only_arm: items that only one of the two got right.
        drop: `score_base - score`.
        drop_low, drop_high: 95 % interval of the drop.
        p_value: of the hypothesis that there is no difference.
        test: how interval and p-value were made.
        conclusion: one sentence.
    """

    task: str
    metric: str
    num_items: int
    score: float
    score_base: float
    only_base: int
    only_arm: int
    drop: float
    drop_low: float
    drop_high: float
    p_value: float
    test: str
    conclusion: str


class RetrievalCell(_Entry):
    """A sentence hidden in a text.

    Attributes:
        length: tokens of the whole prompt.
        depth: where the sentence stands, 0 at the beginning, 1 at the end.
        found: share of trials whose answer has the hidden word.
        logprob: mean log-probability per token of the hidden word, in nats.
    """

    length: int
    depth: float
    found: float
    logprob: float


class RetrievalFigures(_Entry):
    """Needle in a haystack."""

    cells: tuple[RetrievalCell, ...]
    found: float
    found_base: float
    logprob: float
    logprob_base: float


class CacheFigures(_Entry):
    """What the arm's cache takes.

    Attributes:
        k, v: formats and where their scales are from, by layers, one line each.
        bits_per_value: with scales, over all layers.
        tokens_ratio: tokens that fit into the same bytes, as a ratio to the baseline.
    """

    k: str
    v: str
    bytes_per_token: float
    bits_per_value: float
    tokens_ratio: float


class Verdict(_Entry):
    """Whether the arm may be served, and why."""

    level: Level
    reasons: tuple[str, ...]


class ArmReport(_Entry):
    """One cache precision; what was not asked for is empty or None."""

    name: str
    cache: CacheFigures
    fidelity: dict[PassName, FidelityPass]
    layer_groups: tuple[LayerGroupFigures, ...] = ()
    layers: tuple[LayerFigures, ...] = ()
    generation: tuple[GenerationFigures, ...] = ()
    tasks: tuple[TaskFigures, ...] = ()
    retrieval: RetrievalFigures | None = None
    verdict: Verdict


class Thresholds(_Entry):
    """Beyond these an arm is unsafe; docs/evaluation.md gives the reasons of the defaults.

    Attributes:
        max_kld: mean KL divergence of a pass, in nats.
        min_top1: share of tokens with the same most probable token.
        max_accuracy_drop: share of a task's items.
    """

    max_kld: float
    min_top1: float
    max_accuracy_drop: float


class DataEntry(_Entry):
    """What was read."""

    sources: tuple[str, ...]
    sha256: str
    num_windows: int
    max_seq_len: int
    num_prompts: int


class EvaluationReport(_Entry):
    """All arms against one baseline.

    Attributes:
        tool: name and version.
        model: name of the model; `weights` is the digest of its identity.
        noise_floor: the baseline against itself, with another cut into chunks.
        options: all that decides the figures.
        arms: in the order asked for.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    tool: str
    model: str
    architecture: str
    weights: str
    baseline: str
    baseline_cache: CacheFigures
    data: DataEntry
    options: dict[str, Any]
    thresholds: Thresholds
    noise_floor: DivergenceFigures
    baseline_retrieval: tuple[RetrievalCell, ...] = ()
    arms: tuple[ArmReport, ...]

    @property
    def passed(self) -> bool:
        """Whether no arm is unsafe."""
        return all(arm.verdict.level != "unsafe" for arm in self.arms)
